"""Packed weights on disk: read back without packing, unpacked where another CPU packed them."""

import copy
import itertools
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

import vitkern
from tests.model.tiny_models import OPTIONS, picture, tiny
from vitkern import _C, cpu, int8, packed_file, packing
from vitkern.contract import Error
from vitkern.panels import Form

save_file = pytest.importorskip("safetensors.torch").save_file
PRECISIONS = ("fp32", "tf32", "bf16")
NAME = "blocks.0.attn.qkv.weight"


def form_here(precision):
    return Form(*_C.panel_form(_C.engine_layout("", cpu.PRECISIONS[precision])))


def words(panels):
    """A copy of packed panels as a file holds them."""
    import ctypes

    place = (ctypes.c_int32 * (panels.bytes // 4)).from_address(panels.panels)
    return torch.frombuffer(place, dtype=torch.int32).clone()


@pytest.fixture
def no_packing(monkeypatch):
    def refuse(*_):
        raise AssertionError("packed again")

    def start():
        monkeypatch.setattr(packing, "shared", refuse)
        monkeypatch.setattr(packing, "unshared", refuse)
        monkeypatch.setattr(int8, "quantise_weight", refuse)

    return start


# ---- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    ["plain", "qk-norm", "head-token-norm", "odd-sizes", "stem", "swiglu", "position-rope"],
)
@pytest.mark.parametrize("precision", (*PRECISIONS, "int8"))
def test_a_file_keeps_the_bits_and_is_not_packed_again(option, precision, tmp_path, no_packing):
    model, file = tiny(**OPTIONS[option]).eval(), tmp_path / "model.safetensors"
    model.precision, image = precision, picture(model)
    with torch.inference_mode():
        want = model(image)
    model.save_packed(file)
    no_packing()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = vitkern.load(file)
    assert loaded.config == model.config and not loaded.training and loaded.precision == precision
    copied = copy.deepcopy(loaded)
    with torch.inference_mode():
        assert torch.equal(loaded(image), want)
        assert torch.equal(copied(image), want)
        assert "engine" in loaded.explain(image)
    loaded.save_packed(tmp_path / "again.safetensors")
    with torch.inference_mode():
        assert torch.equal(vitkern.load(tmp_path / "again.safetensors")(image), want)


def test_the_weights_come_back_where_nothing_was_rounded(tmp_path):
    if form_here("fp32").kind == "halves":
        pytest.skip("fp32 is rounded to two terms of fp16 on this CPU")
    model, file = tiny(), tmp_path / "model.safetensors"
    model.save_packed(file, "fp32")
    loaded = vitkern.load(file)
    assert loaded.weight_bytes()["parameters"] < model.weight_bytes()["parameters"] / 4
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    loaded.restore_weights()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    loaded.train()(picture(model)).sum().backward()


def test_rounded_weights_say_so(tmp_path):
    model, file = tiny(), tmp_path / "model.safetensors"
    model.save_packed(file, "bf16")
    loaded = vitkern.load(file)
    if form_here("bf16") == form_here("fp32"):
        pytest.skip("bf16 computes as fp32 on this CPU")
    with pytest.raises(RuntimeError, match=r"rounded them.*restore_weights"):
        loaded.state_dict()
    with pytest.raises(ValueError, match=r"embed needs the weights.*packed for bf16, rounded"):
        packed_file.with_parameters(loaded, "embed")
    left = copy.deepcopy(loaded)
    left.restore_weights(rounded=True)
    assert 0 < Error.of(left.head.weight, model.head.weight).rms < 2**-8
    loaded.restore_weights(model.state_dict())
    assert torch.equal(loaded.head.weight, model.head.weight)


@pytest.mark.parametrize("precision", ("bf16", "int8"))
def test_bfloat16_models_and_batch_norms_are_kept(precision, tmp_path):
    changes = dict(stem="resnet26d", patch_size=1, image_size=64, depth=1)
    model = tiny(torch.float32 if precision == "int8" else torch.bfloat16, **changes).eval()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    model.precision = precision
    model.save_packed(tmp_path / "model.safetensors")
    loaded, image = vitkern.load(tmp_path / "model.safetensors"), picture(model)
    assert loaded.dtype == model.dtype
    with torch.inference_mode():
        assert torch.equal(loaded(image), model(image))


def test_released_weights_are_written_as_they_are(tmp_path, no_packing):
    model = tiny().eval()
    model.precision, image = "bf16", picture(model)
    with torch.inference_mode():
        want = model(image)
    model.release_weights()
    with pytest.raises(
        ValueError, match=r"released as packed for bf16; call model.restore_weights"
    ):
        model.save_packed(tmp_path / "model.safetensors", "fp32")
    no_packing()
    model.save_packed(tmp_path / "model.safetensors")
    with torch.inference_mode():
        assert torch.equal(vitkern.load(tmp_path / "model.safetensors")(image), want)


def test_a_file_is_mapped_and_aligned_or_copied(tmp_path):
    """Kernels read panels where the file is mapped; one that others wrote again is copied."""
    from safetensors import safe_open

    model, file = tiny().eval(), tmp_path / "model.safetensors"
    model.save_packed(file, "fp32")
    with safe_open(file, "pt") as opened:
        about, tensors = opened.metadata(), {n: opened.get_tensor(n) for n in opened.keys()}
    assert all(t.data_ptr() % 64 == 0 for t in tensors.values() if t.dtype is torch.int32)
    moved = {"a": torch.zeros(1, dtype=torch.int32), **tensors}
    save_file(moved, tmp_path / "moved.safetensors", about)
    loaded, image = vitkern.load(file), picture(model)
    file.unlink()
    with torch.inference_mode():
        assert torch.equal(loaded(image), model(image))
    with safe_open(tmp_path / "moved.safetensors", "pt") as opened:
        assert any(opened.get_tensor(n).data_ptr() % 64 for n in tensors)
    del moved["a"]
    save_file(moved, tmp_path / "moved.safetensors", {**about, "note": "x" * 8})
    with torch.inference_mode():
        assert torch.equal(vitkern.load(tmp_path / "moved.safetensors")(image), model(image))


# ---- panels of other machines --------------------------------------------------------------------

SIZES = ((1, 1), (37, 53), (64, 300), (5, 768))
LAYOUTS = sorted(
    {_C.engine_layout(isa, cpu.PRECISIONS[p]) for isa in _C.isas() for p in PRECISIONS}
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda n: "-".join(map(str, _C.panel_form(n))))
def test_every_form_is_unpacked_without_its_instructions(layout):
    form = Form(*_C.panel_form(layout))
    for N, K in SIZES:
        weight = torch.randn(N, K, generator=torch.Generator().manual_seed(N))
        packed = packing.unshared(weight, layout)
        assert packed.bytes == form.bytes(N, K)
        found = form.unpacked(words(packed), N, K)
        assert found.is_contiguous() and found.shape == weight.shape
        if form.kind == "floats" or form.terms == 3:
            assert torch.equal(found, weight)
        else:
            assert Error.of(found, weight).rms < 2**-8 / form.terms**2
        place, size = packed.panels, packed.bytes
        again = _C.Packed.of_panels(layout, place, size, N, K, packed)
        want = words(packed)
        del packed  # which `again` keeps
        assert torch.equal(words(again), want)
        with pytest.raises(ValueError, match=r"the panels of a weight .* bytes, not"):
            _C.Packed.of_panels(layout, place, size + 64, N, K, again)
        with pytest.raises(ValueError, match="begin at a multiple of 64 bytes"):
            _C.Packed.of_panels(layout, place + 4, size, N, K, again)


def amx_panels(weight, terms):
    """As csrc/cpu/terms_amx.hpp draws them, by loops: no machine here may have AMX."""
    (N, K), parts, rest = weight.shape, [], weight
    for _ in range(terms):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    panels = torch.zeros(-(-N // 32), -(-K // 32), terms, 2, 16, 16, 2, dtype=torch.bfloat16)
    for n, k, t in itertools.product(range(N), range(K), range(terms)):
        at = (n // 32, k // 32, t, n % 32 // 16, k % 32 // 2, n % 16, k % 2)
        panels[at] = parts[t][n, k]
    return panels.flatten().view(torch.int32)


@pytest.mark.parametrize("terms", (1, 2, 3))
def test_terms_of_amx_are_unpacked_anywhere(terms):
    weight = torch.randn(37, 53, generator=torch.Generator().manual_seed(2))
    form = Form("terms", 32, 32, terms)
    found = form.unpacked(amx_panels(weight, terms), 37, 53)
    assert amx_panels(weight, terms).nbytes == form.bytes(37, 53)
    assert (
        torch.equal(found, weight)
        if terms == 3
        else Error.of(found, weight).rms < 2 ** (-8 * terms)
    )


@pytest.mark.parametrize("terms", (1, 2))
def test_halves_of_amx_are_unpacked_anywhere(terms):
    """As csrc/cpu/split_amx.hpp draws them: rows times powers of two in fp16, then scales."""
    (N, K), columns = (37, 53), 32
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(2)) * 1e-6
    up = torch.exp2(14 - weight.abs().amax(1, keepdim=True).log2().floor())
    parts, rest = [], weight * up
    for _ in range(terms):
        parts.append(rest.half())
        rest = rest - parts[-1].float()
    panels, form = [], Form("halves", columns, 32, terms)
    for begin in range(0, N, columns):
        tiles = torch.zeros(-(-K // 32), terms, 2, 16, 16, 2, dtype=torch.float16)
        rows = range(begin, min(N, begin + columns))
        for n, k, t in itertools.product(rows, range(K), range(terms)):
            tiles[k // 32, t, n % 32 // 16, k % 32 // 2, n % 16, k % 2] = parts[t][n, k]
        scales = torch.zeros(3, columns)
        scales[0, : len(rows)], scales[1, : len(rows)] = up[rows, 0], 1 / up[rows, 0]
        panels += [tiles.flatten().view(torch.int32), scales.flatten().view(torch.int32)]
    packed = torch.cat(panels)
    assert packed.nbytes == form.bytes(N, K)
    assert Error.of(form.unpacked(packed, N, K), weight).rms < 2.0 ** (-11 * terms)


WRITER = """
import sys, torch, vitkern
from tests.model.tiny_models import tiny
for precision in ("fp32", "bf16"):
    tiny().save_packed(f"{sys.argv[1]}/{precision}.safetensors", precision)
"""


@pytest.mark.parametrize("isa", ["portable"])
def test_a_file_of_another_cpu_is_packed_again_with_a_notice(isa, tmp_path):
    env = {**os.environ, "VITKERN_ISA": isa}
    subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], env=env, check=True)
    model = tiny().eval()
    image = picture(model)
    for precision in ("fp32", "bf16"):
        model.precision = precision
        with pytest.warns(UserWarning, match=r"another kind of CPU \(floats, 8 columns\).*again"):
            loaded = vitkern.load(tmp_path / f"{precision}.safetensors")
        with torch.inference_mode():
            assert torch.equal(loaded(image), model(image)), precision
    fp32 = vitkern.load
    with pytest.warns(UserWarning):
        state = fp32(tmp_path / "fp32.safetensors").state_dict()
    assert torch.equal(state[NAME], model.state_dict()[NAME])


# ---- files of strangers --------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path):
    from safetensors import safe_open

    tiny().save_packed(tmp_path / "good.safetensors", "fp32")
    with safe_open(tmp_path / "good.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        return file.metadata(), tensors, tmp_path / "bad.safetensors"


def refused(path, message):
    for read in (vitkern.load, vitkern.load_packed):
        with pytest.raises(ValueError, match=message):
            read(path)


def test_damaged_tensors_are_refused_by_name(opened):
    about, good, path = opened
    nan, inf = good[NAME].clone(), good["norm.weight"].clone()
    nan.view(torch.float32)[7], inf[3] = torch.nan, torch.inf
    bad = {
        f"lacks {NAME}": {k: v for k, v in good.items() if k != NAME},
        f"{NAME} is .*int32.*expected": {**good, NAME: good[NAME][:-16].clone()},
        f"{NAME} is .*float32.*expected.*int32": {**good, NAME: good[NAME].float()},
        f"{NAME} has elements that are NaN or Inf": {**good, NAME: nan},
        "norm.weight has elements that are NaN": {**good, "norm.weight": inf},
        "has extra, which": {**good, "extra": torch.ones(1)},
    }
    for message, tensors in bad.items():
        save_file(tensors, path, about)
        refused(path, message)


def test_integers_with_bad_scales_are_refused(tmp_path):
    if form_here("bf16").kind != "integers":
        pytest.skip("bf16 has no integers on this CPU")
    from safetensors import safe_open

    path = tmp_path / "model.safetensors"
    tiny().save_packed(path, "bf16")
    with safe_open(path, "pt") as file:
        about, good = file.metadata(), {n: file.get_tensor(n).clone() for n in file.keys()}
    good[NAME].view(torch.float32)[-1] = torch.inf  # the last scale
    save_file(good, path, about)
    refused(path, f"{NAME} has elements that are NaN or Inf")


@pytest.mark.parametrize(
    "change",
    [
        {"form": "[]"},
        {"form": '["floats", 0, 1, 1]'},
        {"form": '["floats", 99999999999, 1, 1]'},
        {"form": '["tiles", 16, 1, 1]'},
        {"form": '["integers", 15, 256, 1]'},
        {"form": "{"},
        {"precision": "int8"},
        {"precision": "fp8"},
        {"dtype": "float64"},
        {"exact": "maybe"},
    ],
    ids=str,
)
def test_metadata_that_no_writer_makes_are_refused(opened, change):
    about, good, path = opened
    save_file(good, path, {**about, **change})
    refused(path, "has no usable metadata")


def test_metadata_may_not_lie_about_the_form(opened):
    about, good, path = opened
    save_file(good, path, {**about, "form": json.dumps(["integers", 32, 256, 1])})
    refused(path, "int32.*expected")
    for missing in ("form", "exact", "precision", "dtype"):
        save_file(good, path, {k: v for k, v in about.items() if k != missing})
        refused(path, "has no usable metadata")
    for config in ("", "{", '{"width": -3}', '{"nothing": 1}', "[]", "[" * 100000):
        save_file(good, path, {**about, "config": config})
        refused(path, "no usable configuration")


def test_truncated_files_are_refused_wherever_they_end(opened, tmp_path):
    whole, path = (tmp_path / "good.safetensors").read_bytes(), opened[2]
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, "damaged or not safetensors|not written by|no layout")


def test_what_cannot_be_packed_says_why(tmp_path):
    path = tmp_path / "model.safetensors"
    cases = {
        "precision must be one of": (tiny(), "fp16"),
        "a parallel block's projection": (tiny(block="parallel"), "fp32"),
        "float64": (tiny(torch.float64), None),
    }
    for message, (model, precision) in cases.items():
        with pytest.raises(ValueError, match=f"save_packed: .*{message}"):
            model.save_packed(path, precision)
    model = tiny()
    model.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"save_packed: .*hook"):
        model.save_packed(path)
    assert not path.exists()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_packed_precision_is_the_only_one(precision, tmp_path):
    tiny().save_packed(tmp_path / "model.safetensors", precision)
    with pytest.raises(ValueError, match=f"packed for {precision} and holds no weights for fp32"):
        vitkern.load(tmp_path / "model.safetensors", precision="fp32")
    loaded = vitkern.load(tmp_path / "model.safetensors", precision=precision)
    assert loaded.precision == precision
