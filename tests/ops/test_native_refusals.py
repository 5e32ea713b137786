"""The extension by itself: whatever it is called with, an error and never a crash.

Each call starts from the keywords that vitkern itself passes, and changes one of them.
"""

import inspect

import pytest
import torch

from tests.model.tiny_models import picture, tiny
from vitkern import _C, cpu
from vitkern.engines.cpu import CpuEngine
from vitkern.registry import REGISTRY

OPERATORS = {  # with sizes above 1, so that every stride counts
    "layernorm": dict(M=3, D=5),
    "norm_linear": dict(M=3, K=5, N=4),
    "attention": dict(B=2, S=3, H=2, E=4),
    "linear_residual": dict(B=2, S=3, K=4, N=5),
    "mlp": dict(B=2, S=3, D=4, F=5),
    "patch_embed": dict(B=2, C=2, Y=4, X=8, py=2, px=4, D=3, T=2),
}
SIZES = {*"MKNDBSHEFCYXT", "py", "px", "sequences"}
REFUSED = (ValueError, OverflowError, TypeError)


@pytest.fixture(params=OPERATORS)
def call(request, monkeypatch):
    """(function, keywords of a good call); the tensors behind the addresses are kept."""
    name, seen = request.param, {}
    spec = REGISTRY[name]
    given = spec.make_inputs(OPERATORS[name], torch.float32)
    values = spec.arguments(given, save=True)
    shape = spec.op.call_shape(dict(zip(spec.op.arguments, values, strict=True)))
    results, native = shape.allocate(values[0]), getattr(_C, name)
    monkeypatch.setattr(_C, name, lambda isa, **keywords: seen.update(keywords))
    getattr(cpu, name)(shape.sizes, results, *values, isa=cpu.operator_isas()[0])
    monkeypatch.undo()
    native("", **seen)
    return native, seen, (given, results)


def is_size(name):
    return name in SIZES or name.endswith("_stride")


def test_operators_refuse_bad_sizes_and_strides(call):
    native, good, _ = call
    for name in filter(is_size, good):
        if name == "sequences" or name.startswith("bias_"):
            continue  # not read: there is one sequence and no bias
        for bad in (-1, -(2**63), 2**62, 2**63 - 1):
            with pytest.raises(REFUSED, match="vitkern"):
                native("", **{**good, name: bad})


def test_operators_refuse_products_that_overflow(call):
    native, good, _ = call
    sizes = {name: 2**42 for name in good if name in SIZES - {"sequences", "py", "px"}}
    with pytest.raises(OverflowError, match="larger than any memory"):
        native("", **{**good, **sizes})


def test_operators_refuse_null_where_there_is_something_to_read_or_write(call):
    native, good, _ = call
    needed = {"x", "qkv", "image", "weight", "fc1_weight", "fc2_weight", "residual", "y", "prefix"}
    for name in needed & good.keys():
        if native is _C.layernorm and name == "weight":
            continue  # a LayerNorm may do without
        if good[name]:
            with pytest.raises(ValueError, match=f"{name} is null"):
                native("", **{**good, name: 0})


def test_operators_refuse_unknown_choices(call):
    native, good, _ = call
    for name, value in good.items():
        if isinstance(value, (_C.DType, _C.Activation)):
            for bad in (type(value)(99), type(value)(-1), 0, None):
                with pytest.raises(REFUSED, match=name):
                    native("", **{**good, name: bad})
        if isinstance(value, _C.DType) and name != "image_dtype":
            with pytest.raises(ValueError, match=name):
                native("", **{**good, name: _C.DType.u8})


def test_operators_refuse_impossible_numbers_of_threads(call):
    native, good, _ = call
    for bad in (0, -1, 5000, 2**31 - 1, 2**40):
        with pytest.raises(REFUSED, match="threads"):
            native("", **{**good, "threads": bad})


def test_operators_name_a_missing_keyword(call):
    native, good, _ = call
    for name in good:
        with pytest.raises(TypeError, match=f"missing keyword '{name}'"):
            native("", **{key: value for key, value in good.items() if key != name})


def test_operators_name_a_keyword_that_they_do_not_read(call):
    native, good, _ = call
    for name in ("nonesuch", "Threads", "x_strides"):
        with pytest.raises(TypeError, match=f"unknown keyword '{name}'; known: threads, "):
            native("", **good, **{name: 1})


def test_every_field_of_an_operator_is_a_keyword_that_python_passes(call):
    """What C++ reads is what cpu.py passes: neither side has a name that the other has not."""
    native, good, _ = call
    with pytest.raises(TypeError, match="unknown keyword") as raised:
        native("", **good, nonesuch=1)
    known = str(raised.value).split("known: ")[1].split(", ")
    assert sorted(known) == sorted(good)


def test_attention_refuses_offsets_outside_the_tokens():
    qkv, y = torch.zeros(1, 4, 3, 1, 8), torch.zeros(1, 4, 1, 8)
    for bad in ([0, 9], [-1, 4], [0, 3, 1, 4], [0, 2], [1, 4]):
        offsets = torch.tensor(bad, dtype=torch.int32)
        with pytest.raises(ValueError, match="offsets must ascend from 0 to S = 4"):
            _C.attention(
                "", threads=1, dtype=_C.DType.f32, qkv=qkv.data_ptr(), bias=0,
                offsets=offsets.data_ptr(), y=y.data_ptr(), lse=0, B=1, S=4, H=1, E=8,
                sequences=len(bad) - 1, b_stride=96, s_stride=24, part_stride=8, h_stride=8,
                bias_b_stride=0, bias_h_stride=0, bias_s_stride=0, scale=1.0, dropout=(0, 0, 1.0),
            )  # fmt: skip


@pytest.mark.parametrize("seconds", (float("inf"), float("nan"), -1.0, 1e9))
def test_calibrate_refuses_times_that_never_end(seconds):
    with pytest.raises(ValueError, match="calibrate: seconds is"):
        cpu.calibrate(seconds=seconds)


def test_calibrate_refuses_memory_that_is_not_there():
    with pytest.raises(ValueError, match="data is null"):
        cpu.calibrate(data=torch._efficientzerotensor(64 * 64), seconds=0)
    keywords = dict(threads=1, precision=_C.Precision.fp32, data=0, floats=0, seconds=0.0, rates=0)
    with pytest.raises(ValueError, match="rates is null"):
        _C.calibrate("", **keywords)
    with pytest.raises(ValueError, match="precision"):
        _C.calibrate("", **{**keywords, "precision": _C.Precision(7)})


# ---- the engine --------------------------------------------------------------


class Recorder:
    """Stands in for the native engine and keeps the keywords of forward()."""

    def __init__(self, native):
        self.native = native

    def __getattr__(self, name):
        return getattr(self.native, name)

    def forward(self, **keywords):
        self.keywords = keywords
        self.native.forward(**keywords)


@pytest.fixture
def forward():
    """(native engine, keywords of a good forward, what must stay alive)."""
    model = tiny(position="relative", mean=(0.5,) * 3, std=(0.5,) * 3)
    engine, image = CpuEngine(model, "fp32"), picture(model).mul(50).byte()
    engine._native = Recorder(engine._native)
    y = engine.logits(image)
    return engine._native.native, engine._native.keywords, (engine, image, y)


BAD_FORWARDS = {
    "a batch for no memory": {"B": 2**40},
    "a negative batch": {"B": -1},
    "rows for no memory": {"Y": 2**61},
    "no rows": {"Y": 0},
    "negative rows": {"Y": -16},
    "columns that are no patches": {"X": 15},
    "a negative count of tokens": {"T": -1},
    "tokens for no memory": {"T": 2**40},
    "a negative stride": {"strides": (384, 128, -16, 1)},
    "a stride for no memory": {"strides": (2**61, 128, 16, 1)},
    "too few strides": {"strides": (384, 128)},
    "an unknown pool": {"pool": _C.Pool(9)},
    "an unknown dtype": {"dtype": _C.DType(9)},
    "no thread": {"threads": 0},
    "minus one thread": {"threads": -1},
    "too many threads": {"threads": 2**30},
    "no image": {"image": 0},
    "no tokens": {"prefix": 0},
    "no result": {"y": 0},
    "a mean without a std": {"std": 0},
    "null biases": {"biases": [0, 0, 0]},
    "one bias for three blocks": {"biases": [64]},
    "more blocks than there are": {"blocks": 99},
    "minus one block": {"blocks": -1},
    "blocks kept of pooled rows": {"kept": [0, 0, 0], "pool": _C.Pool.token},
    "a place for one block of three": {"kept": [0], "pool": _C.Pool.tokens},
    "turns of a model that has none": {"turns": [64, 64, 64]},
    "an address that is none": {"image": -1},
}


@pytest.mark.parametrize("bad", BAD_FORWARDS.values(), ids=BAD_FORWARDS)
def test_forward_refuses(bad, forward):
    native, good, (_, _, y) = forward
    before = y.clone()
    with pytest.raises(REFUSED, match="vitkern"):
        native.forward(**{**good, **bad})
    native.forward(**good)
    assert torch.equal(y, before)


def test_forward_names_a_missing_keyword(forward):
    native, good, _ = forward
    for name in good:
        with pytest.raises(TypeError, match=f"missing keyword '{name}'"):
            native.forward(**{key: value for key, value in good.items() if key != name})


def test_forward_names_a_keyword_that_it_does_not_read(forward):
    native, good, (_, _, y) = forward
    before = y.clone()
    for name in ("nonesuch", "position_", "bias"):
        with pytest.raises(TypeError, match=f"unknown keyword '{name}'; known: threads, dtype, "):
            native.forward(**good, **{name: 0})
    assert torch.equal(y, before)


def test_a_finished_engine_takes_no_weights(forward):
    native, good, (_, _, y) = forward
    before, weight = y.clone(), torch.zeros(37, 32)
    for change in (
        lambda: native.set_matrix("head.weight", _C.DType.f32, weight.data_ptr(), 37, 32),
        lambda: native.set_vector("head.bias", weight.data_ptr(), 5),
        lambda: native.finish(),
    ):
        with pytest.raises(RuntimeError, match=r"finish\(\) was called"):
            change()
    native.forward(**good)
    assert torch.equal(y, before)


SIZED = dict(channels=1, patch_y=2, patch_x=2, width=2, heads=1, mlp_width=2, depth=0, eps=1e-6)
KINDS = dict(
    activation=_C.Activation.gelu, precision=_C.Precision.fp32,
    norm=_C.NormKind.layer, order=_C.Order.pre_norm,
)  # fmt: skip
PLAIN = dict(gated=False, rotary_heads=0, rotary_half=False)
ONES = torch.ones(8)


def blank():
    return _C.Engine("", **SIZED, **KINDS, **PLAIN)


def test_an_engine_that_was_not_finished_does_not_run(forward):
    _, good, _ = forward
    native = blank()
    with pytest.raises(RuntimeError, match=r"finish\(\) was not called"):
        native.forward(**good)
    native.set_matrix("patch_embed.proj.weight", _C.DType.f32, ONES.data_ptr(), 2, 4)
    native.set_vector("norm.weight", ONES.data_ptr(), 3)
    with pytest.raises(ValueError, match="has 3 elements, expected 2"):
        native.finish()
    with pytest.raises(RuntimeError, match=r"finish\(\) was not called"):
        native.forward(**good)


@pytest.mark.parametrize(
    "name, rows",
    [("head.bias", 0), ("head.bias", 1), ("norm.bias", 0), ("norm.weight", 1), ("norm.gain", 0),
     ("head.weight", 0), ("blocks.0.norm1.weight", 0), ("", 0)],
)  # fmt: skip
def test_weights_that_the_engine_would_not_use_are_refused(name, rows):
    native = blank()
    native.set_matrix("patch_embed.proj.weight", _C.DType.f32, ONES.data_ptr(), 2, 4)
    if rows:
        native.set_matrix(name, _C.DType.f32, ONES.data_ptr(), rows, 2)
    else:
        native.set_vector(name, ONES.data_ptr(), 2)
    with pytest.raises(ValueError, match=r"is no weight of this engine|is missing"):
        native.finish()


def test_weights_are_checked_when_they_are_set():
    native = blank()
    for bad in ((0, 2, 2), (64, -2, 2), (64, 2**62, 2), (64, 2**42, 2**42)):
        with pytest.raises((ValueError, OverflowError), match="vitkern"):
            native.set_matrix("head.weight", _C.DType.f32, *bad)
    for kind in (_C.DType.u8, _C.DType(9)):
        with pytest.raises(ValueError, match="dtype"):
            native.set_matrix("head.weight", kind, ONES.data_ptr(), 2, 2)
    for bad in ((0, 2), (64, -1), (64, 2**62)):
        with pytest.raises((ValueError, OverflowError), match="vitkern"):
            native.set_vector("head.bias", *bad)


def test_an_engine_names_keywords_that_it_lacks_and_that_it_does_not_read():
    good = {**SIZED, **KINDS, **PLAIN}
    for name in good:
        with pytest.raises(TypeError, match=f"missing keyword '{name}'"):
            _C.Engine("", **{key: value for key, value in good.items() if key != name})
    with pytest.raises(TypeError, match="unknown keyword 'layers'; known: channels, patch_y, "):
        _C.Engine("", **good, layers=3)


def test_an_engine_has_possible_sizes():
    for name in SIZED:
        for bad in (-1, 2**62) if name != "eps" else ():
            with pytest.raises((ValueError, OverflowError), match="vitkern engine"):
                _C.Engine("", **{**SIZED, name: bad}, **KINDS, **PLAIN)
    with pytest.raises(OverflowError):
        _C.Engine("", **{**SIZED, "patch_y": 2**40, "patch_x": 2**40}, **KINDS, **PLAIN)
    for name, kind in KINDS.items():
        with pytest.raises(ValueError, match=name):
            _C.Engine("", **SIZED, **{**KINDS, name: type(kind)(99)}, **PLAIN)


def test_an_engine_that_was_never_initialised_is_refused():
    empty = _C.Engine.__new__(_C.Engine)
    properties = [n for n, v in inspect.getmembers(_C.Engine) if isinstance(v, property)]
    assert properties
    for name in properties:
        with pytest.raises(TypeError, match="without __init__"):
            getattr(empty, name)
    for attempt in (
        lambda: empty.finish(),
        lambda: empty.forward(B=1),
        lambda: empty.set_vector("a", 0, 0),
        lambda: empty.set_matrix("a", _C.DType.f32, 0, 0, 0),
    ):
        with pytest.raises(TypeError, match="without __init__"):
            attempt()
