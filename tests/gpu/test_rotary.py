"""Rotary positions, gates and inner norms on the GPU engine: what writes q and k turns them."""

import copy

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.evidence.interpreter import Interpreter
from tests.evidence.ptx import PtxExecutor
from tests.gpu.contract import problem
from tests.model.tiny_models import OPTIONS, check_error, picture, tiny
from vitkern.contract import SLACK
from vitkern.engines.gpu import GpuEngine
from vitkern.gpu import launch, layernorm, norm_linear, rotary, tiles
from vitkern.ops.rotary import reference
from vitkern.precision import PRECISIONS

NEW = ("swiglu", "swiglu-split-normed", "mlp-norm", "separate-qkv", "position-rope",
       "position-rope-x-first", "position-rope-mixed", "position-rope-dinov3")  # fmt: skip
DINOV3 = OPTIONS["position-rope-dinov3"]
MODELS = {name: OPTIONS[name] for name in NEW} | {
    "halves-qk-norm": {**DINOV3, "qk_norm": True, "qkv_bias": False},
    "halves-without-key-bias": {**DINOV3, "key_bias": False, "registers": 4},
    "halves-class-token": {**DINOV3, "class_token": True, "pool": "token", "separate_qkv": True},
    "mixed-qk-norm": {**OPTIONS["position-rope-mixed"], "qk_norm": True},
    "eva02": {**OPTIONS["swiglu-split-normed"], **OPTIONS["position-rope"]},
    "heads-of-64": {"width": 128, "rope": "axial"},
    "heads-of-80": {"width": 160, "rope": "axial", "rope_half": True},
    "heads-of-88": {"width": 176, "rope": "mixed"},
}
SHAPES = [(2, 37, 2, 64), (1, 21, 3, 20), (1, 5, 2, 80), (2, 19, 1, 88), (1, 70, 3, 128)]
EPS = 1e-6


class Projection:
    """Rows, their moments, and a Linear that makes qkv of them; a table of angles."""

    def __init__(self, shape, precision="fp32", shared=True):
        self.shape, self.precision = shape, PRECISIONS[precision]
        B, S, H, E = shape
        M, D, dtype = B * S, H * E, self.precision.dtype
        g = torch.Generator().manual_seed(0)
        self.x = (torch.randn(M, D, generator=g) + 0.5).to(dtype)
        weight, bias = torch.randn(3 * D, D, generator=g) * D**-0.5, torch.randn(3 * D, generator=g)
        self.linear = weight.to(dtype), bias
        angles = torch.randn(1 if shared else H, S, E // 2, generator=g) * 3
        angles[:, 0] = 0  # a class token's
        self.table = torch.cat([angles.cos(), angles.sin()], -1)
        ones, zeros = torch.ones(D), torch.zeros(D)
        self.folded = norm_linear.fold(ones, zeros, *self.linear, self.precision, dtype)
        mean = self.x.double().mean(1, keepdim=True)
        squares = (self.x.double() - mean).square().sum(1, keepdim=True)
        self.parts = torch.cat([mean * D, squares], 1)[None].float()

    def qkv(self, executor, turned=True):
        executor.tf32 = self.precision.name == "tf32"
        B, S, H, E = self.shape
        y = torch.full((B, S, 3, H, E), torch.nan, dtype=self.precision.dtype)
        turns = rotary.by_pairs(self.table) if turned else None
        with launch.executing(executor):
            norm_linear.folded_linear(
                self.x, self.parts, H * E, *self.folded, y, "none", EPS, turns
            )
        return y

    def theirs(self, dtype):
        """In float64, or as PyTorch computes it in `dtype`."""
        x, weight, bias = (t.to(dtype) for t in (self.x, *self.linear))
        rows = torch.nn.functional.layer_norm(x, x.shape[1:], eps=EPS)
        B, S, H, E = self.shape
        qkv = torch.nn.functional.linear(rows, weight, bias).view(B, S, 3, H, E)
        table = self.table.double() if dtype == torch.float64 else self.table
        (turned,) = reference(qkv, table, False)
        return turned

    def check(self, got):
        name = self.precision.name
        with FixedOrder(tf32=name == "tf32"):
            torchs = self.theirs(self.precision.dtype)
        assert not (wrong := problem(got, torchs, self.theirs(torch.float64), SLACK, name)), wrong


def operator(qkv, table):
    """The same by a launch of its own."""
    y = torch.empty_like(qkv)
    with launch.executing(Interpreter("sm_80")):
        rotary.forward({}, [y], qkv, table, False)
    return y


def tiled(executor, tile):
    executor.tile = tile
    return executor


# ---- the GEMM that makes qkv ---------------------------------------------------------------------


@pytest.mark.parametrize("shared", (True, False), ids=("one-table", "a-table-each"))
@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qkv_comes_turned_with_the_bits_of_the_operator(shape, precision, shared):
    case = Projection(shape, precision, shared)
    got = case.qkv(Interpreter("sm_80", order="shuffled", races=True))
    assert torch.equal(got, operator(case.qkv(Interpreter("sm_80"), turned=False), case.table))
    case.check(got)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90", "gfx942"))
@pytest.mark.parametrize("shared", (True, False), ids=("one-table", "a-table-each"))
def test_every_tile_gives_the_same_bits(arch, shared):
    """Tiles of several heads, of one, and of half of one; some hold keys and values."""
    case = Projection((1, 37, 1, 64), "bf16", shared)
    several = range(len(tiles.fitting("folded_linear", arch, 16)))
    first, *others = (case.qkv(tiled(Interpreter(arch), tile)) for tile in several)
    assert len(others) > 2 and all(torch.equal(one, first) for one in others)


@pytest.mark.parametrize(
    "arch, shared, several",
    [
        ("sm_80", True, (0, 3)),
        ("sm_90", True, (2,)),
        pytest.param("sm_80", False, range(4), marks=pytest.mark.ptx_full),
        pytest.param("sm_90", True, range(5), marks=pytest.mark.ptx_full),
        pytest.param("sm_90", False, range(5), marks=pytest.mark.ptx_full),
    ],
)
def test_qkv_comes_turned_as_compiled(arch, shared, several):
    case = Projection((1, 37, 1, 64), "bf16", shared)
    first, *others = (case.qkv(tiled(PtxExecutor(arch), tile)) for tile in several)
    case.check(first)
    assert all(torch.equal(one, first) for one in others)


def test_values_are_not_touched_by_what_turns_their_neighbours():
    """Infinity times a sine of 0 would be NaN."""
    case = Projection((1, 5, 1, 20), "fp32")
    case.folded[2][2 * 20 + 3] = torch.inf
    values = case.qkv(Interpreter("sm_80"))[:, :, 2, 0]
    assert values[..., 3].isinf().all() and values.isfinite().sum() == 5 * 19


# ---- the norm of queries and keys ----------------------------------------------------------------


@pytest.mark.parametrize("shared", (True, False), ids=("one-table", "a-table-each"))
@pytest.mark.parametrize("executor", (Interpreter, PtxExecutor), ids=("interpreter", "ptx"))
def test_normalised_heads_come_turned(executor, shared):
    g = torch.Generator().manual_seed(1)
    qkv, table = torch.randn(2, 7, 3, 3, 20, generator=g), torch.randn(3, 7, 20, generator=g)
    table = table[:1] if shared else table
    norms = [(1 + torch.randn(20, generator=g), torch.randn(20, generator=g)) for _ in range(2)]
    plain, got = qkv.clone(), qkv.clone()
    with launch.executing(executor("sm_80")):
        layernorm.normalise_heads(plain, *norms, EPS)
        layernorm.normalise_heads(got, *norms, EPS, rotary.by_pairs(table))
    assert torch.equal(got[:, :, 2], qkv[:, :, 2])
    torch.testing.assert_close(got, reference(plain, table, False)[0])


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [name for name in MODELS if name not in NEW])
def test_the_engine_gives_what_the_modules_give(option):
    """Whichever channels turn together; the order of the weight's rows is the engine's own.

    test_engine.py has the others.
    """
    model = tiny(**MODELS[option])
    image, double = picture(model, B=2), copy.deepcopy(model).double()
    model.path = double.path = "reference"
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    with torch.no_grad():
        truth = double.forward_features(image.double()), double(image.double())
        with FixedOrder():
            theirs = model.forward_features(image), model(image)
        got = engine.tokens(image), engine.logits(image)
    for one in zip(got, theirs, truth, strict=True):
        check_error(*one, torch.float32, option, PRECISIONS["fp32"])


@pytest.mark.parametrize("option", (*NEW, "halves-class-token"))
def test_an_image_s_result_does_not_depend_on_its_batch(option):
    model = tiny(torch.bfloat16, **MODELS[option])
    image = picture(model, B=3)
    engine = GpuEngine(model, "bf16", Interpreter("sm_80"))
    together = engine.logits(image)
    assert torch.equal(engine.logits(image[:1]), together[:1])


@pytest.mark.parametrize(
    "option, launches",
    [("position-rope", 5), ("halves-class-token", 5), ("position-rope-x-first", 6), ("eva02", 8)],
)
def test_rotary_positions_add_no_launch(option, launches):
    """Six with qk-norm; EVA-02 has a gate and two more norms in a block."""
    model, recorder = tiny(**MODELS[option]), launch.Recorder("sm_80")
    GpuEngine(model, "fp32", recorder).logits(picture(model))
    names = [one.kernel.__name__ for one in recorder.launches]
    assert "rotary_forward" not in names
    assert len(names) == 2 + launches * model.config.depth


def test_blocks_share_their_table_unless_it_is_learned():
    for option, tables in (("position-rope", 1), ("position-rope-mixed", 3)):
        model = tiny(**MODELS[option])
        engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
        engine.tokens(picture(model, B=1))
        (places,) = engine._grids.values()
        assert len({t.data_ptr() for t in places.turns}) == tables
