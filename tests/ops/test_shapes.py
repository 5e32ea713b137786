"""Sizes that kernels do not like: primes, one more than a tile, one less, and very long ones."""

import copy
import functools
import os
import pathlib

import pytest
import torch

from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.model.test_engine import tf32_slack, tiny, truth_and_torch
from tests.ops.test_ops import BF16, FP32, ISAS, check
from vitkern import _C, cpu
from vitkern.contract import SLACK, judge
from vitkern.engines.cpu import CpuEngine
from vitkern.precision import CHOICES
from vitkern.registry import REGISTRY
from vitkern.verification.operators import native_results

ATTENTION, MLP = REGISTRY["attention"], REGISTRY["mlp"]

# ---- Attention ---------------------------------------------------------------


def check_attention(isa, dtype, **axes):
    inputs = ATTENTION.make_inputs(axes, dtype)
    check(ATTENTION, native_results(ATTENTION, inputs, isa), inputs, dtype)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("E", (1, 8, 32, 64, 72, 80, 88, 96, 128, 160))
@pytest.mark.parametrize("isa", ISAS)
def test_attention_of_any_head_dim(isa, E, dtype):
    check_attention(isa, dtype, B=1, S=67, H=2, E=E)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("S", (1, 2, 15, 16, 17, 31, 33, 197, 257, 577, 1025))
@pytest.mark.parametrize("isa", ISAS)
def test_attention_of_any_length(isa, S, dtype):
    check_attention(isa, dtype, B=1, S=S, H=2 if S < 500 else 1, E=24)


@pytest.mark.parametrize("isa", ISAS)
def test_attention_of_a_long_sequence(isa):
    check_attention(isa, FP32, B=1, S=4097, H=1, E=8)


@pytest.mark.parametrize("column", (100, 360, 768))
@pytest.mark.parametrize("isa", ISAS)
def test_hidden_columns_of_one_part_do_not_reach_the_next(isa, column):
    """AMX computes them in parts; what fills up the last tile must not be an earlier infinity."""
    inputs = MLP.make_inputs({"B": 1, "S": 3, "D": 32, "F": 769}, FP32)
    inputs["fc1_bias"][column] = float("inf")
    check(MLP, native_results(MLP, inputs, isa), inputs, FP32)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ("norm_linear", "mlp"))
def test_rows_have_the_same_bits_in_parts_of_any_height(name, isa, dtype):
    """Kernels cut 700 rows into parts that suit caches, K > 864 into slabs; 5 rows are one part."""
    op, D = REGISTRY[name], 900
    axes = {"norm_linear": {"M": 700, "K": D, "N": 70}, "mlp": {"B": 1, "S": 700, "D": D, "F": 950}}
    inputs = op.make_inputs(axes[name], dtype)
    x = inputs["x"].reshape(-1, D)
    shape = (-1, D) if name == "norm_linear" else (1, -1, D)
    y = native_results(op, inputs, isa)[0].reshape(len(x), -1)
    for first, count in ((0, 5), (221, 5), (345, 7), (445, 230), (699, 1)):
        some = inputs | {"x": x[first : first + count].reshape(shape)}
        part = native_results(op, some, isa)[0].reshape(count, -1)
        assert torch.equal(part, y[first : first + count]), f"rows from {first}"


def resident(field: str) -> int:
    """Bytes of this process that are in memory now (VmRSS), or were at most (VmHWM)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@pytest.mark.skipif("VITKERN_AMX_EMULATOR" in os.environ, reason="too slow when emulated")
@pytest.mark.parametrize("isa", ISAS)
def test_attention_needs_memory_linear_in_its_length(isa):
    S = 16384
    inputs = ATTENTION.make_inputs({"B": 1, "S": S, "H": 1, "E": 16}, FP32)
    _C.arena_trim()
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    except OSError as error:
        pytest.skip(f"the peak of memory cannot be measured: {error}")
    before = resident("VmRSS")
    native_results(ATTENTION, inputs, isa)
    used, scores = resident("VmHWM") - before, 4 * S * S  # 1 GiB
    assert used < scores / 32, f"{used >> 20} MiB"


# ---- The engine --------------------------------------------------------------

SHAPES = {
    "primes": {},
    "one_class": {"classes": 1},
    "one_head": {"width": 37, "heads": 1, "mlp_width": 1},
    "tiny_heads": {"width": 58, "heads": 29, "mlp_width": 31},
    "one_column_after_768": {"mlp_width": 769},
    "one_column_after_1536": {"mlp_width": 1537},
    "one_pixel_patches": {"image_size": (3, 5), "patch_size": 1},
    "one_patch": {"image_size": (13, 13), "patch_size": 13, "class_token": False, "pool": "mean"},
}
IMAGES = 101  # so many that the rms of few logits is no matter of luck


@functools.cache
def model_of(shape):
    sizes = dict(width=3 * 37, heads=3, mlp_width=131, classes=7, patch_size=7, image_size=(14, 21))
    return tiny(depth=1, **{**sizes, **SHAPES[shape]})


@functools.cache
def images_of(shape):
    size = model_of(shape).config.image_size
    return torch.randn(IMAGES, 3, *size, generator=torch.Generator().manual_seed(1))


@functools.cache
def truth_and_yardstick(shape, precision):
    """Logits in float64, and those of PyTorch at this precision."""
    model, images = model_of(shape), images_of(shape)
    truth, theirs = truth_and_torch(model, images)
    with torch.inference_mode(), FixedOrder(tf32=precision == "tf32"):
        plain = copy.deepcopy(model)
        plain.path = "reference"
        if precision == "bf16":
            theirs = plain.bfloat16()(images.bfloat16())
        elif precision == "tf32":
            theirs = plain(images)
    return truth, theirs


@pytest.mark.parametrize("precision", CHOICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", cpu.isas())
def test_engine_of_any_shape(isa, shape, precision):
    truth, yardstick = truth_and_yardstick(shape, precision)
    engine, images = CpuEngine(model_of(shape), precision, isa=isa), images_of(shape)
    got = engine.logits(images)
    slack = tf32_slack(isa) if precision == "tf32" else SLACK
    dtype = BF16 if precision == "bf16" else FP32
    assert not judge(got, yardstick, truth, dtype=dtype, slack=slack).problem
    for batch in (1, 3):
        assert torch.equal(engine.logits(images[:batch]), got[:batch])


@pytest.mark.parametrize("precision", CHOICES)
@pytest.mark.parametrize("isa", cpu.isas())
def test_smaller_batches_use_the_scratch_of_larger_ones(isa, precision):
    engine, images = CpuEngine(model_of("primes"), precision, isa=isa), images_of("primes")
    engine.logits(images)
    before = _C.arena_allocations()
    for batch in (IMAGES, 1, 3, 50, IMAGES):
        engine.logits(images[:batch])
    assert _C.arena_allocations() == before
