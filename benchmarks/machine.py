"""This machine's facts and measured limits, for the roofline: `python -m benchmarks.machine`.

The limits are what plain tools reach, not data-sheet figures. Arithmetic: the best rate of
`torch.mm` over a few square sizes, so a kernel better than the BLAS behind it may stand above that
roof. Memory: the best rate of `Tensor.copy_`, counting the bytes read and the bytes written, on
512 MB (main memory) and on 1 MB a thread (the cores' own caches).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from vitkern.cli.machine import describe, let_torch_run_bf16

MATMUL_SIZES = (
    512,
    1024,
    1536,
)  # 1 to 9 MB an operand in fp32: past L2, yet a tenth of a second at most
DRAM_BYTES = 512 << 20  # past any L3 a virtual machine is really given
CACHE_BYTES = 1 << 20  # a thread's half of a 2 MB L2 for source and target together


def best_rate(run: Callable[[], object], work: float, seconds: float) -> float:
    """The best of repeated calls, as work per second: limits are what the quietest moment shows."""
    run()
    best, stop = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = time.perf_counter()
        run()
        best = max(best, work / (time.perf_counter() - start))
    return best


def matmul_gflops(dtype: torch.dtype, seconds: float = 0.5) -> float:
    def rate(n: int) -> float:
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))  # zeros would draw less power
        return best_rate(lambda: torch.mm(a, b), 2 * n**3, seconds)

    return round(max(map(rate, MATMUL_SIZES)) / 1e9, 1)


def copy_gbs(total: int, seconds: float = 0.5) -> float:
    source, target = torch.ones(total // 8), torch.empty(total // 8)  # fp32: half of `total` each
    return round(best_rate(lambda: target.copy_(source), total, seconds) / 1e9, 1)


def limits(seconds: float = 0.5) -> dict[str, object]:
    """A results row with the measured roofs and how each was measured."""
    threads = torch.get_num_threads()
    return {
        "kind": "limits",
        "float32_gflops": matmul_gflops(torch.float32, seconds),
        "bfloat16_gflops": matmul_gflops(torch.bfloat16, seconds),
        "dram_gbs": copy_gbs(DRAM_BYTES, seconds),
        "cache_gbs": copy_gbs(CACHE_BYTES * threads, seconds),
        "method": f"best torch.mm of {MATMUL_SIZES} squares; best Tensor.copy_ of"
        f" {DRAM_BYTES >> 20} MB and {threads} x {CACHE_BYTES >> 20} MB, reads and writes counted",
    }


if __name__ == "__main__":
    let_torch_run_bf16()
    print(json.dumps({**describe(), **limits()}, indent=1))
