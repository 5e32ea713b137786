"""Checkpoints of models that are more than a plain ViT: written, read back, and read as theirs."""

import json

import pytest
import torch
from safetensors.torch import save_file

import vitkern
from tests.layouts.foreign_models import transformers_model
from tests.model.test_timm_families import FAMILIES, images, timm_model
from vitkern.bench import timm_import

timm_import.prepare()
timm = pytest.importorskip("timm", exc_type=ImportError)

SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    image_size=32, patch_size=8,
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_is_loaded_again(name, tmp_path):
    theirs = timm_model(name)
    fast, image = vitkern.accelerate(theirs), images(theirs)
    vitkern.save(fast, tmp_path / "model.safetensors")
    again = vitkern.load(tmp_path / "model.safetensors")
    assert again.config == fast.config
    with torch.inference_mode():
        torch.testing.assert_close(again(image), fast(image), rtol=1e-5, atol=1e-5)


READ = (
    "map",
    "map-registers",
    "distilled",
    "relpos",
    "relpos-class-token",
    "relpos-shared",
    "beit",
)


@pytest.mark.parametrize("name", READ)
def test_timms_own_state_dict_is_read_by_its_shapes(name):
    theirs = timm_model(name)
    said = dict(image_size=(24, 16), heads=2)
    if "relpos" in name:
        said |= dict(norm_eps=1e-6)
    ours = vitkern.load(theirs.state_dict(), **said)
    with torch.inference_mode():
        wanted = theirs(images(theirs))
        torch.testing.assert_close(ours(images(theirs)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", ["vit_tiny_r_s16_p8_224", "vit_base_patch16_rpn_224"])
def test_a_name_tells_what_tensors_do_not(name, tmp_path):
    theirs = timm.create_model(name).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    ours, image = vitkern.load(tmp_path), torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        torch.testing.assert_close(ours(image), theirs(image), rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_a_stem_that_is_named_is_read(tmp_path):
    small = dict(embed_dim=64, depth=2, num_heads=1, num_classes=7, img_size=64)
    theirs = timm.create_model("vit_small_r26_s32_224", **small).eval()
    ours, image = vitkern.load(theirs.state_dict(), stem="r26_s32"), torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(ours(image), theirs(image), rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_a_hybrids_statistics_are_kept(tmp_path):
    model = vitkern.ViT("vit_small_resnet26d_224", depth=1, width=32, heads=2, mlp_width=64)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1)
    vitkern.save(model.eval(), tmp_path / "model.safetensors")
    again, image = vitkern.load(tmp_path / "model.safetensors"), torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        torch.testing.assert_close(again(image), model(image))


@pytest.mark.full
def test_deit_with_its_teachers_head_goes_to_transformers_and_back(tmp_path):
    theirs = transformers_model("DeiTForImageClassificationWithTeacher", "DeiTConfig", SIZES)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, image = vitkern.load(tmp_path / "theirs"), torch.randn(2, 3, 32, 32)
    assert ours.config.head == "distilled"
    vitkern.save(ours, tmp_path / "ours", layout="hf_deit")
    back = type(theirs).from_pretrained(tmp_path / "ours").eval()
    with torch.inference_mode():
        wanted = theirs(image).logits
        torch.testing.assert_close(ours(image), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(back(image).logits, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.full
def test_siglips_pool_is_read(tmp_path):
    theirs = transformers_model("SiglipVisionModel", "SiglipVisionConfig", SIZES)
    theirs.save_pretrained(tmp_path)
    ours, image = vitkern.load(tmp_path), torch.randn(2, 3, 32, 32)
    assert ours.config.pool == "map"
    with torch.inference_mode():
        wanted = theirs(image).pooler_output
        torch.testing.assert_close(ours(image), wanted, rtol=1e-4, atol=1e-5)
