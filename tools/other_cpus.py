"""Run the tests that touch host arithmetic as other CPUs would run them: `make test-cpus`.

PyTorch, MKL, oneDNN, OpenBLAS and numpy choose their kernels, and with them an order of summation,
by the CPU. Each row below forces those of one class of CPUs, so that one machine tests as several;
a class whose instructions this CPU lacks is named and left out.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
# numpy's names, since 2.4 and before
NO_AVX512 = "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
NO_AVX2 = f"X86_V3 AVX2 FMA3 {NO_AVX512}"


class Cpu(NamedTuple):
    """A class of CPUs: the flags it needs of the host, and what every library is told."""

    needs: frozenset[str]
    aten: str
    mkl: str
    onednn: str
    openblas: str
    vitkern: str
    numpy_without: str = ""

    def environment(self) -> dict[str, str]:
        chosen = {
            "ATEN_CPU_CAPABILITY": self.aten,
            "MKL_CBWR": self.mkl,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "OPENBLAS_CORETYPE": self.openblas,
            "VITKERN_ISA": self.vitkern,
            "NPY_DISABLE_CPU_FEATURES": self.numpy_without,
        }
        return {name: value for name, value in chosen.items() if value}


_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
CPUS = {
    "sse": Cpu(
        frozenset(), "default", "COMPATIBLE", "SSE41", "Nehalem", "portable",
        NO_AVX2,
    ),
    "haswell": Cpu(_AVX2, "avx2", "AVX2", "AVX2", "Haswell", "avx2", NO_AVX512),
    "zen": Cpu(_AVX2, "avx2", "AUTO", "AVX2", "Zen", "avx2_int16", NO_AVX512),
    "skylake-x": Cpu(_AVX512, "avx512", "AVX512", "AVX512_CORE", "SkylakeX", "avx512"),
    "ice-lake": Cpu(
        _AVX512 | {"avx512_vnni"}, "avx512", "AVX512", "AVX512_CORE_VNNI", "SkylakeX", "avx512_vnni"
    ),
}  # fmt: skip

# Everything whose verdict compares floating-point results.
TESTS = [
    "tests/ops/test_ops.py",
    "tests/ops/test_shapes.py",
    "tests/ops/test_backward.py",
    *(f"tests/model/test_{name}.py" for name in ("engine", "golden", "model", "options", "timm")),
    "tests/model/test_gradients.py",
    *(f"tests/train/test_{name}.py" for name in ("batches", "probe", "run", "weights")),
    *(f"tests/gpu/test_{n}.py" for n in ("attention", "ops", "patch_embed", "engine", "model")),
    "tests/gpu/test_ptx.py",
    "tests/evidence/interpreter/test_interpreter.py",
    "tests/evidence/fixed_order/test_fixed_order.py",
]
# Of the backwards, a thousand tests, those whose matmuls are the library's and those of the CPU's
# own set; of training, nothing that waits for other processes.
SELECTED = "(not test_backward or blas or -{isa}-) and not killed and not commands"


def flags() -> set[str]:
    """What the host's CPU has; nothing where the system does not say."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return set(re.search(r"^flags\s*:(.*)$", text, re.M)[1].split())


def lacks(cpu: Cpu) -> set[str]:
    return set(cpu.needs - flags())


def run(cpu: Cpu, arguments: list[str]) -> subprocess.CompletedProcess:
    """pytest on a machine whose libraries take it for this CPU."""
    environment = os.environ | cpu.environment()
    for name in list(environment):  # a test run inside of a test run
        if name.startswith("PYTEST_"):
            del environment[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cpus", nargs="*", metavar="CPU", help=f"of {', '.join(CPUS)}; default all")
    parser.add_argument("-k", metavar="EXPRESSION", help="only these tests, as pytest's -k")
    given = parser.parse_args()
    unknown = set(given.cpus) - CPUS.keys()
    if unknown:
        parser.error(f"no such CPU: {', '.join(sorted(unknown))}; there are {', '.join(CPUS)}")
    failed = False
    for name in given.cpus or CPUS:
        missing = lacks(CPUS[name])
        if missing:
            print(f"{name:<10} left out: this CPU has no {', '.join(sorted(missing))}", flush=True)
            continue
        print(f"{name:<10} ...", end="", flush=True)
        start = time.monotonic()
        chosen = SELECTED.format(isa=CPUS[name].vitkern)
        chosen = f"{chosen} and ({given.k})" if given.k else chosen
        done = run(CPUS[name], ["-n", "2", "--dist", "worksteal", *TESTS, "-k", chosen])
        summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
        print(f"\r{name:<10} {summary} ({time.monotonic() - start:.0f} s)", flush=True)
        if done.returncode:
            failed = True
            print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
