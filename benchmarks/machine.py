"""This machine's facts and measured limits, for the roofline: `python -m benchmarks.machine`.

The limits are measured, not data-sheet figures. `vitkern.cpu.calibrate` gives the rate of
multiply-adds on data in L1 and of reads from each level of memory, by loops of the instruction
set that the kernels run; `torch.mm` on tensors of the precision's dtype stands beside them as what
a BLAS makes of the same machine.
"""

from __future__ import annotations

import json
import time

import torch

from vitkern.measure.limits import best_rate, multiply_gflops, precisions, read_gbs, read_sizes
from vitkern.measure.machine import describe, let_torch_run_bf16
from vitkern.precision import PRECISIONS

MATMUL_SIZES = (512, 1024, 1536)  # 1 to 9 MB an operand in fp32: past L2, a tenth of a second each


def matmul_gflops(dtype: torch.dtype, seconds: float) -> float:
    """Of the best size; the larger ones are left out where one matmul would take a second."""

    def rate(n: int) -> float:
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))  # zeros would draw less power

        def run() -> float:
            start = time.perf_counter()
            torch.mm(a, b)
            return 2 * n**3 / (time.perf_counter() - start)

        return best_rate(run, seconds)

    best = 0.0
    for n in MATMUL_SIZES:
        if best and 2 * n**3 > best:
            break
        best = max(best, rate(n))
    return round(best / 1e9, 1)


def limits(seconds: float = 0.5) -> dict[str, object]:
    """A results row with the measured roofs, and the sizes that each read rate was measured on."""
    sizes = read_sizes()
    return {
        "kind": "limits",
        "multiply_gflops": {p: multiply_gflops(p, seconds) for p in precisions()},
        "matmul_gflops": {p: matmul_gflops(PRECISIONS[p].dtype, seconds) for p in precisions()},
        "read_gbs": {place: read_gbs(size, seconds) for place, size in sizes.items()},
        "read_bytes": sizes,
    }


if __name__ == "__main__":
    let_torch_run_bf16()
    print(json.dumps({**describe(), **limits()}, indent=1))
