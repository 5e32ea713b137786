"""The C++ kernels by themselves, built with sanitizers and run without Python."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from vitkern import cpu

# a virtual environment's cmake too
PATH = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(
    not (shutil.which("cmake", path=PATH) and shutil.which("ninja", path=PATH)),
    reason="needs cmake and ninja",
)
def test_kernels_are_clean_under_sanitizers():
    """native_test.cpp under ASan and UBSan; the build folder is kept for the next run."""
    build = ROOT / "build" / "native"

    def run(*command):
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PATH": PATH}
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    isas = ";".join(cpu.isas())  # what cannot run here need not be built
    options = ["-DVITKERN_NATIVE_TEST=ON", f"-DVITKERN_ISAS={isas}"]
    run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options)
    run("cmake", "--build", build)
    summary = run(build / "native_test").strip().splitlines()[-1]
    passed, failed = (int(part.split()[0]) for part in summary.split(", "))
    assert passed > 500 and failed == 0
