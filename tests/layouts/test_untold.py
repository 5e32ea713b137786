"""Models that their tensors do not tell apart: refused where one would silently become another."""

import json

import pytest
import torch

import vitkern
from tests.model.tiny_models import picture, tiny
from vitkern import ViTConfig, names
from vitkern.weights import convert
from vitkern.weights.layouts import BY_NAME
from vitkern.weights.layouts.base import Refused

pytest.importorskip("safetensors")
POST = dict(block="post_norm", layer_scale=1e-5, class_token=False, pool="mean", qkv_bias=False)
PE = dict(rope="axial", rope_offset=1.0, rope_x_first=True, pre_norm=True, norm_eps=1e-5)
UNTOLD = {
    "post-norm": POST | dict(final_norm="after_pool"),
    "post-norm-relative": POST | dict(position="relative_mlp"),
    "pe-spatial": PE | dict(final_norm="none", pool="mean", classes=0),
    "pe-core": PE | dict(pool="map", pool_heads=4, pool_prefix=True),
    "hybrid": dict(stem="r", patch_size=2, image_size=(16, 24)),
    "parallel": dict(block="parallel"),
}


def bare(model):
    """A state dict, which says nothing but names and shapes."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_tensors_do_not_tell_is_asked_for(name):
    changes = UNTOLD[name]
    model = tiny(**changes)
    with pytest.raises(
        Refused, match=r"its tensors look like .*config.json, or pass (block|rope|stem)="
    ):
        vitkern.load(bare(model))
    c = model.config
    sizes = dict(heads=2, image_size=c.image_size, mlp_width=c.mlp_width, qkv_bias=c.qkv_bias)
    loaded = vitkern.load(bare(model), **{**changes, **sizes, "classes": None})
    image = picture(model)
    with torch.no_grad():
        assert torch.equal(loaded(image), model(image))


def test_a_caller_may_say_that_it_is_the_plain_one():
    changes = dict(class_token=False, pool="mean", qkv_bias=False)
    model = tiny(**changes)
    loaded = vitkern.load(bare(model), block="pre_norm", heads=2, pool="mean",
                          image_size=model.config.image_size)  # fmt: skip
    assert loaded.config.block == "pre_norm"


def test_a_folder_that_names_the_architecture_tells_all(tmp_path):
    """config.json of a Perception Encoder: rotary positions, heads and rows of its pool."""
    from safetensors.torch import save_file

    known = ViTConfig.named("vit_pe_core_tiny_patch16_384", depth=1)
    model = vitkern.ViT(known).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    about = {"architecture": "vit_pe_core_tiny_patch16_384"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    loaded = vitkern.load(tmp_path)
    assert loaded.config == known


# What a bare state dict does not show, and docs/checkpoints.md says so; key_bias=False loads as
# zeros, and an image that was cropped is 6 pixels smaller.
NOT_SHOWN = {
    "heads", "activation", "norm_eps", "image_size", "dynamic_image_size", "mean", "std", "crop",
    "key_bias",
}  # fmt: skip


@pytest.mark.full
def test_no_bare_model_of_timms_becomes_another_one():
    """All names: what loads has the fields of the name, but for a headless DINOv3's pooling."""
    from vitkern import loading
    from vitkern.weights import source

    wrong = {}
    for name in names.timm_names():
        whole = ViTConfig.named(name)
        config = whole if whole.depth == 64 else whole.replace(depth=2)
        layout = BY_NAME["timm" if BY_NAME["eva"].unwritable(config) else "eva"]
        model = vitkern.ViT(config, device="meta")
        empty = {n: torch.empty(()).expand(t.shape) for n, t in model.state_dict().items()}
        c = source.find(convert.write(layout, empty, config), None)
        try:
            found, prefix = loading._layout_of(c)
            got, _ = loading._configuration(found, found.bare(c, prefix), None, {})
        except Refused:
            continue
        scaled = (config.layer_scale is None) != (got.layer_scale is None)
        fields = set(ViTConfig.__dataclass_fields__) - NOT_SHOWN - {"layer_scale"}
        odd = {f for f in fields if getattr(config, f) != getattr(got, f)} | (
            {"layer_scale"} if scaled and config.block != "post_norm" else set()
        )
        if odd and not ("dinov3" in name and odd == {"pool"}):
            wrong[name] = odd
    assert not wrong
