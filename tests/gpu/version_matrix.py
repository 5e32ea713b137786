"""One Triton and some architectures: every kernel of a model's forward and backward, compiled.

    python -m tests.gpu.version_matrix sm_80,gfx90a B/16 bf16,fp32
    python -m tests.gpu.version_matrix sm_80,gfx90a B/16 bf16 forward    # the engine's alone

in a process whose Triton is the one to try (PYTHONPATH). A line for each architecture and a line
for each kernel that failed; status 1 if one did. Kernels are compiled and loaded as a user's first
forward would do it (mocked_driver.py). A compiler that dies leaves the name of its kernel behind.
"""

from __future__ import annotations

import faulthandler
import sys
import time
import warnings

import triton

from tests.gpu.mocked_driver import pretended
from vitkern.engines import trace
from vitkern.gpu.configs import nearest_arch
from vitkern.gpu.launch import Launch, Recorder


def forward(arch: str, model: str, precision: str) -> list[Launch]:
    """One launch for each kernel of the engine's forward at a batch of 8."""
    recorder = Recorder(nearest_arch(arch), trace.MIXTURES[precision].tf32)
    trace.engine_launches(trace.Case(model, precision, 8), recorder)
    return list({one.variant.name: one for one in recorder.launches}.values())


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
    """A line for each that failed; a warning (of a default that will change) is a failure."""
    failed = []
    with pretended(arch) as executor:
        for one in wanted:
            print(f"compiling {arch} {one.variant.name}", file=sys.stderr, flush=True)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    executor.native.prepare([one])
            except Exception as error:
                first: BaseException = error
                while first.__cause__ is not None:
                    first = first.__cause__
                said = " ".join(str(first).split())[-300:]
                failed.append(f"FAILED {arch} {one.variant.name}: {type(first).__name__}: {said}")
        assert executor.native.loaded["cache"] + len(failed) == len({one.variant for one in wanted})
    return failed


def main(archs: str, model: str, precisions: str, part: str = "all") -> int:
    faulthandler.enable()
    names, failed = precisions.split(","), []
    for arch in archs.split(","):
        wanted = launches(arch, model, names)
        if part == "forward":
            wanted = [one for name in names for one in forward(arch, model, name)]
        start = time.perf_counter()
        wrong = compile_all(arch, wanted)
        seconds = time.perf_counter() - start
        count = f"{len(wanted) - len(wrong)} of {len(wanted)} kernels"
        print(f"triton {triton.__version__} {arch}: {count} in {seconds:.0f} s", flush=True)
        failed += wrong
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
