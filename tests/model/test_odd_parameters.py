"""Parameters unlike the configuration's: honoured or refused on every path, never left out."""

import pytest
import torch
from torch import nn

from tests.model.tiny_models import PATHS, picture, tiny
from vitkern.engines.base import unpackable
from vitkern.engines.cpu import CpuEngine


def replace(model, name, value):
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, nn.Parameter(value, requires_grad=False))


def lazy_zero(t):
    return torch._efficientzerotensor(t.shape)


MISSHAPEN = {
    "a bias as a row": ("head.bias", lambda t: t[None]),
    "a bias as one number": ("head.bias", lambda t: t[3].clone()),
    "a gain as a block": ("blocks.1.ls1.gamma", lambda t: t[None, None]),
    "a bias as a block": ("blocks.1.mlp.fc1.bias", lambda t: t[None, None]),
    "a norm as a row": ("norm.weight", lambda t: t[None]),
    "a flat patch projection": ("patch_embed.proj.weight", lambda t: t.flatten(1)),
    "half of a weight": ("blocks.0.attn.proj.weight", lambda t: t[:, ::2]),
    "a weight with one more axis": ("head.weight", lambda t: t[..., None]),
    "a class token for two": ("cls_token", lambda t: t.expand(2, -1, -1)),
    "an unknown one": ("blocks.0.mlp.fc1.adapter", lambda _: torch.ones(3)),
}

LAZY = {
    "a negative matrix": ("head.weight", torch._neg_view),
    "a negative bias": ("blocks.0.attn.qkv.bias", torch._neg_view),
    "negative positions": ("pos_embed", torch._neg_view),
    "a bias of lazy zeros": ("head.bias", lazy_zero),
    "a matrix of lazy zeros": ("blocks.2.mlp.fc2.weight", lazy_zero),
    "positions of lazy zeros": ("pos_embed", lazy_zero),
}


def odd(case):
    name, change = case
    model = tiny(layer_scale=0.3)
    owner, _, key = name.rpartition(".")
    replace(model, name, change(getattr(model.get_submodule(owner), key, None)))
    return model, name


@pytest.mark.parametrize("case", (MISSHAPEN | LAZY).values(), ids=MISSHAPEN | LAZY)
def test_the_engine_says_which_parameter_it_cannot_pack(case):
    model, name = odd(case)
    with torch.no_grad():
        assert name in model.engines.unpackable("fp32")
        model.path = "engine"
        with pytest.raises(RuntimeError, match=rf"path 'engine' is impossible: {name} "):
            model(picture(model))
        with pytest.raises(ValueError, match=name):
            CpuEngine(model, "fp32")


@pytest.mark.parametrize("case", (MISSHAPEN | LAZY).values(), ids=MISSHAPEN | LAZY)
def test_the_automatic_path_honours_or_refuses(case):
    model, _ = odd(case)
    image, results = picture(model), []
    for path in ("reference", "auto"):
        model.path = path
        try:
            with torch.no_grad():
                results.append(model(image))
        except (ValueError, RuntimeError, AttributeError):
            results.append(None)
    want, got = results
    assert got is None or torch.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", LAZY.values(), ids=LAZY)
def test_lazy_parameters_are_honoured(case):
    model, _ = odd(case)
    with torch.no_grad():
        got = model(picture(model))
        model.path = "reference"
        torch.testing.assert_close(got, model(picture(model)), rtol=1e-4, atol=1e-4)


def test_biases_that_the_configuration_leaves_out_are_packed():
    model = tiny(qkv_bias=False, pre_norm=True)
    with torch.no_grad():
        replace(model, "blocks.0.attn.qkv.bias", torch.randn(96))
        replace(model, "patch_embed.proj.bias", torch.randn(32))
        model.head.bias = None
        model.path = "engine"
        got = model(picture(model))
        model.path = "reference"
        torch.testing.assert_close(got, model(picture(model)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_lazy_images_are_read(path):
    model = tiny()
    model.path = path
    image = picture(model)
    zeros, minus = torch._efficientzerotensor(image.shape), torch._neg_view(image)
    with torch.no_grad():
        assert torch.equal(model(zeros), model(torch.zeros_like(image)))
        assert torch.equal(model(minus), model(-image))


def test_the_gpu_engine_refuses_alike():
    pytest.importorskip("triton")
    from tests.evidence.interpreter import Interpreter
    from vitkern.engines import gpu as gpu_engine

    for case in (MISSHAPEN | LAZY).values():
        model, name = odd(case)
        assert name in unpackable(model, "cpu", gpu_engine.GpuEngine.DTYPES)
        with pytest.raises(ValueError, match=name):
            gpu_engine.GpuEngine(model, "fp32", Interpreter("sm_80"))
    model = tiny(depth=1)
    image = picture(model, B=2)
    gpu = gpu_engine.GpuEngine(model, "fp32", Interpreter("sm_80"))
    assert torch.equal(gpu.logits(torch._neg_view(image)), gpu.logits(-image))
    zeros = torch._efficientzerotensor(image.shape)
    assert torch.equal(gpu.logits(zeros), gpu.logits(torch.zeros_like(image)))


@pytest.mark.parametrize("name", ("head.weight", "head.bias", "blocks.0.ls1.gamma", "norm.bias"))
def test_a_parameter_that_became_a_buffer_is_honoured(name):
    """Modules compute with it, so the engine must not leave it out: packed before, or not."""
    model = tiny(layer_scale=0.5)
    image = picture(model)
    with torch.no_grad():
        model(image)
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        value = 2 * module._parameters[key].detach() + 1
        delattr(module, key)
        module.register_buffer(key, value)
        model.path = "reference"
        want = model(image)
        model.path = "auto"
        torch.testing.assert_close(model(image), want, rtol=1e-4, atol=1e-4)
        assert "path: engine" not in model.explain(image)
