"""The C++ kernels by themselves, built with sanitizers and run without Python."""

import shutil
import subprocess

import pytest
from conftest import ROOT


@pytest.mark.skipif(
    not shutil.which("cmake") and not shutil.which("ninja"), reason="no cmake or ninja"
)
def test_kernels_are_clean_under_sanitizers():
    """native_test.cpp under ASan and UBSan; the build folder is kept for the next run."""
    build = ROOT / "build" / "native"
    configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DVITKERN_NATIVE_TEST=ON"]
    subprocess.run(configure, check=True, capture_output=True)
    made = subprocess.run(["cmake", "--build", build], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-4000:]
    ran = subprocess.run([build / "native_test"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    passed, failed = (
        int(part.split()[0]) for part in ran.stdout.strip().splitlines()[-1].split(", ")
    )
    assert passed > 500 and failed == 0
