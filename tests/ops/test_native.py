"""The C++ kernels and launcher by themselves, built with sanitizers and run without Python."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from vitkern import cpu

# a virtual environment's cmake too
PATH = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
pytestmark = pytest.mark.skipif(
    not (shutil.which("cmake", path=PATH) and shutil.which("ninja", path=PATH)),
    reason="needs cmake and ninja",
)


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def build_native(target, folder, *options):
    """The program, in a folder that is kept for the next run."""
    build = ROOT / "build" / folder
    run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DVITKERN_NATIVE_TEST=ON", *options)
    run("cmake", "--build", build, "--target", target)
    return build / target


def run_native(target, folder, isas):
    """The lines that a target says under ASan and UBSan."""
    return run(build_native(target, folder, f"-DVITKERN_ISAS={';'.join(isas)}")).splitlines()


def counted(summary):
    """(passed, failed)"""
    return [int(part.split()[0]) for part in summary.split(", ")]


# One source serves all instruction sets; a minute to compile each. What cannot run is not built.
@pytest.mark.full
def test_kernels_are_clean_under_sanitizers():
    isas = cpu.isas()
    *sets, summary = run_native("native_test", "native", isas)
    counts = {name: int(text.split()[0]) for name, text in (line.split(": ") for line in sets)}
    passed, failed = counted(summary)
    assert counts.keys() == set(isas)
    assert min(counts.values()) == max(counts.values()) > 400
    assert passed >= sum(counts.values()) and failed == 0


@pytest.mark.full
@pytest.mark.skipif(
    "avx2" not in cpu.isas() or not pathlib.Path("/usr/include/simde").exists(),
    reason="needs AVX2 and Debian's libsimde-dev",
)
def test_avx512_kernels_are_right_without_avx512():
    """Their own source, on SIMDe's vectors of 512 bits. Not their assembly, nor their speed."""
    isas = ("avx512_vnni", "avx512", "portable")
    options = ["-DVITKERN_EMULATE_AVX512=ON", "-DVITKERN_SANITIZE=OFF"]
    program = build_native("native_test", "avx512", *options, f"-DVITKERN_ISAS={';'.join(isas)}")
    *sets, summary = run(program).splitlines()
    passed, failed = counted(summary)
    assert [line.split(":")[0] for line in sets] == list(isas) and passed > 1200 and failed == 0


@pytest.mark.full
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="needs Debian's g++-aarch64-linux-gnu and qemu-user",
)
def test_portable_kernels_are_right_on_arm():
    """Cross-compiled, and run by an emulator: no sanitizers there. Warnings are errors."""
    toolchain = ROOT / "tests" / "ops" / "native" / "aarch64.cmake"
    options = [f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", "-DVITKERN_SANITIZE=OFF"]
    program = build_native("native_test", "arm", *options, "-DVITKERN_WERROR=ON")
    only, summary = run("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program).splitlines()
    passed, failed = counted(summary)
    assert only.startswith("portable: ") and passed > 400 and failed == 0


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in driver needs Linux")
def test_launcher_is_clean_under_sanitizers():
    """In a folder of its own: both tests may be built at the same time."""
    passed, failed = counted(
        run_native("native_launcher_test", "native_launcher", ["portable"])[-1]
    )
    assert passed > 10_000 and failed == 0
