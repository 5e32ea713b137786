"""The AMX kernels on any x86-64 Linux machine: their object code, tile instructions emulated.

Where the CPU has AMX, the other tests run these kernels as they are, and this file adds only that
they share the tile unit with PyTorch's.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from vitkern import _C, cpu

# Those with matmuls and of few rows: a thousand would take minutes.
BACKWARDS = "amx and not beside_amx and not are_those_asked_for" + "".join(
    f" and not {name}"
    for name in ("197x", "601x", "530", "many_rows", "layernorm", "rotary", "swiglu")
)
CPUID = re.compile(r"\tcpuid\s*$")
NATIVE = "amx" in cpu.isas()
only_emulated = pytest.mark.skipif(NATIVE, reason="this CPU has AMX: tested natively")


def emulation(folder) -> dict[str, str]:
    """The environment of a process in which AMX works by tests/evidence/amx/amx_emulator.c."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or os.uname().machine != "x86_64" or not compiler:
        pytest.skip("the emulator needs Linux on x86-64 and a C compiler")
    library = folder / "amx_emulator.so"
    source = pathlib.Path(__file__).with_name("amx_emulator.c")
    build = [compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    env = {"LD_PRELOAD": str(library), "VITKERN_AMX_EMULATOR": "require"}
    if shutil.which("objdump"):  # for a CPU that cannot make CPUID fault
        listing = subprocess.run(["objdump", "-d", _C.__file__], capture_output=True, text=True)
        found = [line.split(":")[0] for line in listing.stdout.splitlines() if CPUID.search(line)]
        assert found, "no CPUID instruction in the extension"
        env["VITKERN_AMX_EMULATOR_CPUID"] = " ".join([_C.__file__, *found])
    return env


@pytest.fixture(scope="module")
def on_tiles(tmp_path_factory):
    """Runs Python where AMX works, emulated if need be; status 77 skips the test."""
    env = os.environ | ({} if NATIVE else emulation(tmp_path_factory.mktemp("amx")))

    def run(*arguments, **more):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env | more)
        if done.returncode == 77:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run


def passed(summary: str) -> int:
    return int(summary.strip().splitlines()[-1].split()[0])


@only_emulated
@pytest.mark.parametrize(
    "tests, least",
    [
        (["tests/ops/test_ops.py", "-k", "amx"], 600),
        (["tests/model/test_engine.py", "-k", "amx"], 15),
        (["tests/model/test_int8.py", "-k", "amx"], 9),
        (["tests/model/test_golden.py", "-k", "logits and engine"], 0),  # skipped without the data
        (["tests/ops/test_shapes.py", "-k", "amx"], 60),
        (["tests/ops/test_backward.py", "-k", BACKWARDS], 150),
    ],
    ids=["operators", "engine", "int8", "golden", "shapes", "backward"],
)
def test_holds_the_contract_on_tiles(on_tiles, tests, least):
    report = on_tiles("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert passed(report) >= least


@only_emulated
@pytest.mark.parametrize(
    "isa, tf32_products, fp32_products", [("amx", 3, 6), ("amx_fp16", 1, 3)], ids=["amx", "fp16"]
)
def test_products_are_computed_by_tiles(on_tiles, isa, tf32_products, fp32_products):
    """Each precision by its number of products; attention takes those of bf16 terms."""
    code = f"""
import ctypes, torch
from vitkern import ViT, cpu
from vitkern.engines.cpu import CpuEngine
count = ctypes.CDLL(None).vitkern_amx_emulated
count.restype = ctypes.c_ulonglong
model = ViT("Ti/16", image_size=64, depth=2).eval()
image = torch.randn(1, 3, 64, 64)
for precision in ("bf16", "tf32", "fp32"):
    engine = CpuEngine(model, precision, isa="{isa}")
    before = count()
    engine.logits(image)
    print(count() - before)
"""
    bf16, tf32, fp32 = map(int, on_tiles("-c", code).split())
    assert bf16 > 0
    for found, products in ((tf32, tf32_products), (fp32, fp32_products)):
        assert 0.65 * products < found / bf16 < 1.35 * products


@only_emulated
@pytest.mark.parametrize("isa", ("amx", "amx_fp16"))
def test_the_machine_is_calibrated_on_tiles(on_tiles, isa):
    code = f"""
import ctypes, torch
from vitkern import cpu
count = ctypes.CDLL(None).vitkern_amx_emulated
count.restype = ctypes.c_ulonglong
rates = [cpu.calibrate(p, seconds=0.02, isa="{isa}") for p in ("fp32", "bf16")]
print(*rates, count())
"""
    fp32, bf16, instructions = map(float, on_tiles("-c", code).split())
    products = 6 if isa == "amx" else 3
    assert products / 3 < bf16 / fp32 < 3 * products and instructions > 1000


def test_fp32_is_left_to_multiply_adds_unless_tiles_are_named(on_tiles):
    """A host may hold the tile unit back, and what a machine computes must not depend on that."""
    code = """
import torch
from vitkern import ViT, cpu
from vitkern.engines.cpu import CpuEngine
model = ViT("Ti/16", image_size=32, depth=1).eval()
found = [CpuEngine(model, precision).isa for precision in cpu.PRECISIONS]
assert found == [cpu.engine_isa(precision) for precision in cpu.PRECISIONS], found
print(*found, cpu.operator_isa("", torch.float32), CpuEngine(model, "fp32", isa="amx").isa)
"""
    if "amx_fp16" not in cpu.isas():
        plain = on_tiles("-c", code, VITKERN_ISA="", VITKERN_AMX_EMULATOR_WITHOUT_FP16="1").split()
        assert plain == ["avx512", "amx", "amx", "amx", "avx512", "amx"]
    if "amx_fp16" in cpu.isas() or not NATIVE:
        plain = on_tiles("-c", code, VITKERN_ISA="").split()
        assert plain == ["avx512", *["amx_fp16"] * 3, "avx512", "amx"]
        assert on_tiles("-c", code, VITKERN_ISA="amx_fp16").split() == ["amx_fp16"] * 5 + ["amx"]
    assert on_tiles("-c", code, VITKERN_ISA="amx").split() == ["amx"] * 6


SHARING = """
import ctypes, itertools, mmap, sys
from concurrent.futures import ThreadPoolExecutor
import torch
from vitkern import ViT
from vitkern.engines.cpu import CpuEngine

torch.manual_seed(0)
factors = [torch.randn(2, n, n, dtype=torch.bfloat16) for n in (32, 70, 129)]
model, image = ViT("Ti/16", image_size=48, depth=1).eval(), torch.randn(1, 3, 48, 48)
engines = [CpuEngine(model, precision, isa="amx") for precision in ("bf16", "tf32", "fp32")]
count = getattr(ctypes.CDLL(None), "vitkern_amx_emulated", lambda: -1)
"""


def test_takes_turns_with_torch(on_tiles):
    """On the same threads, each gives the bits that it gives on threads of its own."""
    code = """
for threads in (1, 2):
    torch.set_num_threads(threads)
    with ThreadPoolExecutor(1) as pool:
        before = count()
        products = pool.submit(lambda: [a @ b for a, b in factors]).result()
    if count() == before != -1:
        print("PyTorch multiplies bf16 without AMX here", file=sys.stderr)
        sys.exit(77)
    with ThreadPoolExecutor(1) as pool:
        logits = pool.submit(lambda: [e.logits(image) for e in engines]).result()
    for (i, theirs), (j, mine) in itertools.product(enumerate(products), enumerate(logits)):
        a, b = factors[i]
        assert torch.equal(a @ b, theirs), f"product {i} after vitkern"
        assert torch.equal(engines[j].logits(image), mine), f"logits {j} after torch"
"""
    alone = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "ALL"}
    if NATIVE and subprocess.run([sys.executable, "-c", alone], env=env).returncode < 0:
        pytest.skip("PyTorch's own bf16 product dies on this machine: it hides CPUID leaf 0x1D")
    on_tiles("-c", SHARING + code, ONEDNN_MAX_CPU_ISA="ALL")


def test_leaves_the_tiles_as_it_found_them(on_tiles):
    """Configured for someone else's product, or not at all: no part of that shows in ours."""
    code = """
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("c4e2794907c3"))  # sttilecfg (%rdi); ret
page.write(bytes.fromhex("c4e2784907c3"))  # ldtilecfg (%rdi); ret
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
function = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
store, load, found = function(start), function(start + 6), ctypes.create_string_buffer(64)
none = bytes(64)
small = bytes([1] + 15 * [0] + 8 * [4, 0] + 16 * [0] + 8 * [1] + 8 * [0])  # 8 tiles of 1 x 4 bytes

torch.set_num_threads(1)
for engine in engines:
    logits = engine.logits(image)
    for config in (none, small, none):
        load(config)
        assert torch.equal(engine.logits(image), logits)
        store(found)
        assert found.raw == config, found.raw.hex()
"""
    on_tiles("-c", SHARING + code)
