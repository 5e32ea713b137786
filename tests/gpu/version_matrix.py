"""One Triton and some architectures: every kernel of a model's forward and backward, compiled.

    python -m tests.gpu.version_matrix sm_80,gfx90a B/16 bf16,fp32

in a process whose Triton is the one to try (PYTHONPATH). A line for each architecture and a line
for each kernel that failed; status 1 if one did. Kernels are started as a user's first forward
would start them (mocked_driver.py). A compiler that dies leaves the name of its kernel behind.
"""

from __future__ import annotations

import faulthandler
import sys
import time
import warnings

from tests.gpu.mocked_driver import pretended
from vitkern.engines import trace
from vitkern.gpu.configs import nearest_arch
from vitkern.gpu.launch import Launch


def launches(arch: str, model: str, precisions: list[str]) -> list[Launch]:
    """One launch for each kernel of inference and of training, at a batch of 1 and of 8."""
    found: dict[str, Launch] = {}
    for precision in precisions:
        for batch, training in ((1, False), (8, False), (8, True)):
            case = trace.Case(model, precision, batch, training)
            for one in trace.launches(case, nearest_arch(arch)):
                found.setdefault(one.variant.name, one)
    return list(found.values())


def compile_all(arch: str, wanted: list[Launch]) -> list[str]:
    """A line for each that failed; what one does to another's warning counts as failure."""
    failed = []
    with pretended(arch) as (executor, driver):
        for one in wanted:
            print(f"compiling {arch} {one.variant.name}", file=sys.stderr, flush=True)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    executor.run(one)
            except Exception as error:
                first: BaseException = error
                while first.__cause__ is not None:
                    first = first.__cause__
                said = " ".join(str(first).split())[-300:]
                failed.append(f"FAILED {arch} {one.variant.name}: {type(first).__name__}: {said}")
        assert len(driver.launched) + len(failed) == len(wanted)
    return failed


def main(archs: str, model: str, precisions: str) -> int:
    import triton

    faulthandler.enable()
    failed = []
    for arch in archs.split(","):
        wanted, start = launches(arch, model, precisions.split(",")), time.perf_counter()
        wrong = compile_all(arch, wanted)
        seconds = time.perf_counter() - start
        count = f"{len(wanted) - len(wrong)} of {len(wanted)} kernels"
        print(f"triton {triton.__version__} {arch}: {count} in {seconds:.0f} s", flush=True)
        failed += wrong
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
