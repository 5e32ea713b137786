"""Tools around a model: exports that run elsewhere, adapters, attention maps, fp16."""

import subprocess
import sys

import pytest
import torch

import vitkern
from tests.model.tiny_models import picture, tiny
from vitkern.bench import timm_import

timm_import.prepare()


def test_an_export_made_without_gradients_runs_with_them(tmp_path):
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        exported = torch.export.export(model, (image,))
    result = exported.module()(image)
    torch.testing.assert_close(result, model(image), rtol=1e-4, atol=1e-4)
    result.sum().backward()
    torch.export.save(exported, tmp_path / "model.pt2")
    torch.save(image, tmp_path / "image.pt")
    code = (
        "import sys, torch, vitkern\n"
        f"model = torch.export.load({str(tmp_path / 'model.pt2')!r}).module()\n"
        f"y = model(torch.load({str(tmp_path / 'image.pt')!r}))\n"
        f"torch.save(y.detach(), {str(tmp_path / 'y.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), result.detach())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_runs_it(dynamo, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = tiny()
    image = picture(model)
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (image,), path, dynamo=dynamo, verbose=False)
    session = runtime.InferenceSession(path)
    (y,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(image).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exported", [True, False])
def test_openvino_converts_it(exported):
    openvino = pytest.importorskip("openvino")
    model = tiny()
    image = picture(model)
    if exported:
        converted = openvino.convert_model(torch.export.export(model, (image,)))
    else:
        converted = openvino.convert_model(model, example_input=image)
    y = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(image.numpy())
    y = torch.from_numpy(y[0])
    torch.testing.assert_close(y, model(image).detach(), rtol=1e-3, atol=1e-3)


def test_scripting_is_refused_in_one_sentence():
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot compile it; use"):
        torch.jit.script(tiny())


def test_lora_adapters_live_and_merged():
    peft = pytest.importorskip("peft", exc_type=ImportError)
    model = tiny()
    image = picture(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv", "fc1"], r=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.eval()
    with torch.no_grad():
        assert "not vitkern's own module" in model.explain(image)
        live = adapted(image)
        with pytest.raises(ValueError, match="not vitkern's own module"):
            vitkern.accelerate(model)
        merged = adapted.merge_and_unload()
        assert "path: engine" in merged.explain(image)
        torch.testing.assert_close(merged(image), live, rtol=1e-4, atol=1e-4)


def test_hooks_on_attention_give_maps():
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        wanted, maps = model(image), []
        model.blocks[1].attn.attn_drop.register_forward_hook(lambda m, i, o: maps.append(o))
        torch.testing.assert_close(model(image), wanted, rtol=1e-4, atol=1e-4)
    (one,) = maps
    assert one.shape[-2:] == (model.config.tokens,) * 2
    torch.testing.assert_close(one.sum(-1), torch.ones(one.shape[:-1]))


def test_timm_extracts_attention_maps():
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        found = timm.utils.AttentionExtract(model, method="hook")(image)
    assert len(found) == model.config.depth
    with pytest.raises(TypeError, match=r'AttentionExtract.*method="hook"'):
        timm.utils.AttentionExtract(tiny(), method="fx")


def test_half_precision_models_are_accelerated():
    model = tiny().half()
    image = picture(tiny())
    fast = vitkern.accelerate(model)
    with torch.no_grad():
        got, wanted = fast(image.half()), tiny()(image)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), wanted, rtol=0.05, atol=0.05)
