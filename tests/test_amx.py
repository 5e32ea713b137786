"""The AMX kernels on any x86-64 Linux machine: their object code, tile instructions emulated.

Where the CPU has AMX, the other tests run these kernels as they are, and this file adds nothing.
"""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from vitkern import cpu

pytestmark = pytest.mark.skipif("amx" in cpu.isas(), reason="this CPU has AMX: tested natively")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Runs Python in an environment where AMX works, by tests/amx_emulator.c."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or os.uname().machine != "x86_64" or not compiler:
        pytest.skip("the emulator needs Linux on x86-64 and a C compiler")
    library = tmp_path_factory.mktemp("amx") / "amx_emulator.so"
    source = ROOT / "tests" / "amx_emulator.c"
    build = [compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    env = {**os.environ, "LD_PRELOAD": str(library), "VITKERN_AMX_EMULATOR": "require"}

    def run(*arguments, **more):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env={**env, **more}
        )
        if done.returncode == 77:
            pytest.skip(f"AMX cannot be emulated here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run


def passed(summary: str) -> int:
    return int(summary.strip().splitlines()[-1].split()[0])


@pytest.mark.parametrize(
    "tests, least",
    [
        (["tests/test_ops.py", "-k", "amx"], 600),
        (["tests/test_engine.py", "-k", "amx"], 15),
        (["tests/test_golden.py", "-k", "logits and engine"], 0),  # skipped without the data
    ],
    ids=["operators", "engine", "golden"],
)
def test_holds_the_contract_on_tiles(emulated, tests, least):
    report = emulated("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert passed(report) >= least


def test_products_are_computed_by_tiles(emulated):
    """Each precision by its number of products: 1 in bf16, 3 in tf32, 6 in fp32."""
    code = """
import ctypes, torch
from vitkern import ViT, cpu
from vitkern.engine import Engine
count = ctypes.CDLL(None).vitkern_amx_emulated
count.restype = ctypes.c_ulonglong
model = ViT("Ti/16", image_size=64, depth=2).eval()
image = torch.randn(1, 3, 64, 64)
print(cpu.isa())
for precision in ("bf16", "tf32", "fp32"):
    engine = Engine(model, precision)
    before = count()
    engine.logits(image)
    print(count() - before)
"""
    isa, bf16, tf32, fp32 = emulated("-c", code).split()
    assert isa == "amx"
    assert 2 * int(bf16) < int(tf32) < int(fp32) and int(fp32) > 4 * int(bf16) > 0


def test_the_machine_is_calibrated_on_tiles(emulated):
    code = """
import ctypes, torch
from vitkern import cpu
count = ctypes.CDLL(None).vitkern_amx_emulated
count.restype = ctypes.c_ulonglong
print(cpu.calibrate("fp32", seconds=0.02), cpu.calibrate("bf16", seconds=0.02), count())
"""
    fp32, bf16, instructions = map(float, emulated("-c", code).split())
    assert 2 < bf16 / fp32 < 18 and instructions > 1000
