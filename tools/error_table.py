"""Print how exact every operator is on this machine, as multiples of PyTorch's own error.

    python tools/error_table.py

The truth is the reference in float64. For each row of the operator table, dtype and instruction
set: the largest ratio over the test cases of more than 50 elements. The contract is 2 (worst) and
1.25 (rms), plus one eps.
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see tests/conftest.py

import torch

import vitkern.ops  # noqa: F401  fills the registry
from vitkern import cpu
from vitkern.contract import Error
from vitkern.registry import REGISTRY, OpSpec


def ratios(spec: OpSpec, dtype: torch.dtype, isa: str) -> tuple[float, float]:
    """Largest (worst, rms) ratio of the native kernel's error to torch's over the spec's cases."""
    largest = [0.0, 0.0]
    for axes in spec.cases:
        inputs = spec.make_inputs(axes, dtype)
        args = spec.arguments(inputs)
        shape = spec.op.call_shape(dict(zip(spec.op.arguments, args, strict=True)))
        results = shape.allocate(args[0])
        if results[0].numel() <= 50:
            continue  # a handful of elements has no stable rms
        spec.load("native")(shape.sizes, results, *args, isa=isa)
        wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
        truth = spec.op.reference(*spec.arguments(wide))[0]
        ours, torchs = (
            Error.of(y, truth) for y in (results[0], spec.op.reference(*spec.arguments(inputs))[0])
        )
        ratio = [o / t if t else float(o > 0) for o, t in zip(ours, torchs, strict=True)]
        largest = [max(pair) for pair in zip(largest, ratio, strict=True)]
    return tuple(largest)


def main() -> None:
    isas = cpu.isas()
    print("| operator | dtype | " + " | ".join(f"{isa}: worst, rms" for isa in isas) + " |")
    print("|---|---" + "|---" * len(isas) + "|")
    for spec in REGISTRY.values():
        for dtype in (torch.float32, torch.bfloat16):
            cells = ("{:.2f}x, {:.2f}x".format(*ratios(spec, dtype, isa)) for isa in isas)
            print(f"| {spec.name} | {str(dtype)[6:]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
