"""Code written for timm runs on a vitkern.ViT: keywords, masks, features, data configuration."""

import functools

import pytest
import torch

import vitkern
from tests.model.test_timm import timm_model
from vitkern import ViT
from vitkern.bench import timm_import

timm_import.prepare()
timm = pytest.importorskip("timm", exc_type=ImportError)
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=7)
KEYWORDS = {
    "sizes": {},
    "tuple": dict(img_size=(32, 16), patch_size=(8, 8)),
    "channels": dict(in_chans=1),
    "ratio": dict(mlp_ratio=2.5),
    "mean": dict(global_pool="avg"),
    "mean, norm before": dict(global_pool="avg", fc_norm=False),
    "token, norm after": dict(fc_norm=True),
    "every row": dict(global_pool=""),
    "no class token": dict(class_token=False, global_pool="avg", reg_tokens=2),
    "no final norm": dict(final_norm=False),
    "DeiT III": dict(no_embed_class=True, init_values=1e-6),
    "CLIP": dict(pre_norm=True, act_layer="quick_gelu", norm_layer=torch.nn.LayerNorm),
    "eps": dict(norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-3)),
    "classes": dict(norm_layer="layernorm", act_layer=torch.nn.GELU, qk_norm=True, qkv_bias=False),
    "tanh": dict(act_layer=functools.partial(torch.nn.GELU, approximate="tanh")),
    "no positions": dict(pos_embed="none"),
    "rates": dict(
        drop_rate=0.1, pos_drop_rate=0.2, proj_drop_rate=0.3, attn_drop_rate=0.4, drop_path_rate=0.5
    ),
    "dynamic": dict(dynamic_img_size=True),
    "plain": dict(scale_attn_norm=False, proj_bias=True, weight_init="", patch_drop_rate=0.0),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_timms_keywords_build_timms_model(name):
    given = {**SMALL, **KEYWORDS[name]}
    theirs = VisionTransformer(**given).eval()
    ours = ViT(**given).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert ours.config.replace(image_size=32) == vitkern.accelerate(theirs).config.replace(
        image_size=32, layer_scale=ours.config.layer_scale
    )
    image = torch.randn(2, ours.in_chans, *ours.patch_embed.img_size)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image), rtol=1e-4, atol=1e-4)
    for attribute in (
        "global_pool num_classes num_features embed_dim num_prefix_tokens num_reg_tokens in_chans"
        " has_class_token no_embed_class dynamic_img_size"
    ).split():
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    for attribute in ("img_size", "grid_size", "num_patches", "patch_size"):
        wanted = getattr(theirs.patch_embed, attribute)
        assert getattr(ours.patch_embed, attribute) == wanted, attribute


@pytest.mark.parametrize(
    "changes",
    [
        dict(global_pool="avg"),
        dict(embed_dim=384, num_heads=6),
        dict(img_size=384, num_classes=10, in_chans=1),
        dict(global_pool="avg", class_token=False, reg_tokens=4),
        dict(num_classes=0, global_pool=""),
    ],
)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_medium_patch16_gap_256"])
def test_changes_of_a_named_model_are_timms(name, changes):
    with torch.device("meta"):
        theirs = timm.create_model(name, **changes)
    ours = ViT(name, device="meta", **changes)
    shapes = {n: p.shape for n, p in ours.state_dict().items()}
    assert shapes == {n: p.shape for n, p in theirs.state_dict().items()}


REFUSED = {
    "num_classes is timm's word for classes": dict(num_classes=3, classes=3),
    "no_embed_class is timm's word": dict(no_embed_class=True, position_covers_prefix=True),
    "global_pool must be one of": dict(global_pool="max"),
    "act_layer must be a GELU": dict(act_layer=torch.nn.ReLU),
    "norm_layer must be a LayerNorm": dict(norm_layer=timm.layers.RmsNorm),
    "patch_drop_rate=0.5 is not supported": dict(patch_drop_rate=0.5),
    "mlp_layer=": dict(mlp_layer=timm.layers.SwiGLUPacked),
    "has no field 'nonsense'": dict(nonsense=1),
    "patch_size must be an integer": dict(patch_size=(8, 16)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_keyword_cannot_mean_is_refused(message):
    with pytest.raises((TypeError, ValueError)) as error:
        ViT("Ti/16", device="meta", **REFUSED[message])
    assert message in str(error.value)


# ---- masks and intermediates ----


@pytest.fixture
def both():
    theirs = timm_model()
    return theirs, vitkern.accelerate(theirs), torch.randn(2, 3, 24, 16)


def masks():
    S = 25
    torch.manual_seed(1)
    keep = torch.rand(2, 1, S, S) > 0.5
    keep[..., 0] = True  # a row that sees nothing is NaN
    return {
        "booleans": dict(attn_mask=keep),
        "floats": dict(attn_mask=torch.randn(S, S)),
        "causal": dict(is_causal=True),
    }


@pytest.mark.parametrize("name", masks())
def test_masks_are_timms(both, name):
    (theirs, ours, image), mask = both, masks()[name]
    with torch.no_grad():
        for call in ("forward", "forward_features"):
            got, wanted = (getattr(m, call)(image, **mask) for m in (ours, theirs))
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        got, wanted = (m.forward_intermediates(image, [1], **mask)[1][0] for m in (ours, theirs))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_mask_of_another_size_is_refused(both):
    with pytest.raises(ValueError, match="attn_mask must end in two axes of 25 rows"):
        both[1](both[2], attn_mask=torch.ones(24, 24))


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("only", [False, True])
def test_intermediates_come_as_a_dict(both, prefix, only):
    theirs, ours, image = both
    options = dict(return_prefix_tokens=prefix, intermediates_only=only, output_dict=True)
    with torch.no_grad():
        got, wanted = (m.forward_intermediates(image, 2, **options) for m in (ours, theirs))
    assert got.keys() == wanted.keys()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prune_norm", [False, True])
@pytest.mark.parametrize("prune_head", [False, True])
def test_blocks_are_pruned_as_timm_does(both, prune_norm, prune_head):
    theirs, ours, image = both
    for model in (theirs, ours):
        assert model.prune_intermediate_layers([0, 1], prune_norm, prune_head) == [0, 1]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.feature_info == [dict(one, reduction=4) for one in theirs.feature_info[:2]]
    with torch.no_grad():
        assert "path: engine" in ours.explain(image)
        torch.testing.assert_close(ours(image), theirs(image), rtol=1e-4, atol=1e-4)
        got, wanted = (m.forward_intermediates(image, [0, 1])[1] for m in (ours, theirs))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


# ---- data ----


def data_config(model):
    return timm.data.resolve_model_data_config(model)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_tiny_patch16_384"])
def test_images_are_prepared_as_for_timms_model(name):
    theirs = timm.create_model(name)
    wanted = data_config(theirs)
    assert data_config(vitkern.accelerate(theirs)) == wanted
    assert data_config(vitkern.accelerate(vitkern.accelerate(theirs))) == wanted
    assert data_config(ViT(name, device="meta")) == wanted


def test_images_are_prepared_at_the_model_s_own_size():
    model = ViT("Ti/16", img_size=96, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), device="meta")
    found = data_config(model)
    assert found["input_size"] == (3, 96, 96)
    assert (found["mean"], found["std"]) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    model.set_input_size(img_size=128)
    assert data_config(model)["input_size"] == (3, 128, 128)
    assert model.default_cfg == model.pretrained_cfg


# ---- timm.create_model ----


def test_timm_creates_vitkerns_models():
    vitkern.register_with_timm()
    vitkern.register_with_timm()
    model = timm.create_model(
        "vitkern.vit_tiny_patch16_224.augreg_in21k", num_classes=5, img_size=96, drop_rate=0.1
    )
    assert isinstance(model, ViT) and model.head_drop.p == 0.1
    assert model(torch.zeros(1, 3, 96, 96)).shape == (1, 5)
    assert model.pretrained_cfg["architecture"] == "vit_tiny_patch16_224"
    assert model.pretrained_cfg["tag"] == "augreg_in21k"
    with pytest.raises(ValueError, match=r'"vitkern" needs a model\'s name'):
        timm.create_model("vitkern")
    with pytest.raises(ValueError, match="unknown variant"):
        timm.create_model("vitkern.resnet50")


def test_features_only_is_timms():
    vitkern.register_with_timm()
    options = dict(features_only=True, img_size=64, out_indices=(1, 3))
    ours = timm.create_model("vitkern.vit_tiny_patch16_224", **options).eval()
    theirs = timm.create_model("vit_tiny_patch16_224", **options).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert ours.feature_info.channels() == theirs.feature_info.channels() == [192, 192]
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image), rtol=1e-4, atol=1e-4)
