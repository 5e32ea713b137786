"""vitkern.ViT against timm itself: the same state dict, the same rows after every block."""

import pytest
import torch

import vitkern
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.model.tiny_models import PATHS, check_error, force
from vitkern import ViT, ViTConfig
from vitkern.bench import timm_import
from vitkern.foreign import timm as timm_models

timm_import.prepare()
timm = pytest.importorskip("timm", exc_type=ImportError)
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

TINY = dict(img_size=(24, 16), patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=37)
MODELS = {
    "plain": {},
    "registers": {"reg_tokens": 2},
    "deit3": {"no_embed_class": True, "init_values": 1e-1},
    "dinov2-registers": {"no_embed_class": True, "reg_tokens": 4, "init_values": 0.5},
    "gap": {"class_token": False, "global_pool": "avg", "fc_norm": False, "qkv_bias": False},
    "gap-fc-norm": {"global_pool": "avg"},
    "every-row": {"global_pool": ""},
    "clip": {"pre_norm": True, "act_layer": "quick_gelu"},
    "tanh": {"act_layer": "gelu_tanh"},
    "qk-norm": {"qk_norm": True},
    "no-positions": {"pos_embed": "none"},
    "no-head": {"num_classes": 0},
    "no-final-norm": {"final_norm": False},
    "dynamic": {"dynamic_img_size": True},
    "wide-mlp": {"mlp_ratio": 48 / 11},
}
NAMES = """
    vit_tiny_patch16_224 vit_small_patch32_384 vit_base_patch16_224 vit_base_patch8_224
    vit_large_patch14_224 vit_huge_patch14_224 vit_giant_patch14_224 deit_tiny_patch16_224
    deit_base_patch16_384 deit3_small_patch16_224 vit_base_patch14_dinov2
    vit_small_patch14_reg4_dinov2 vit_base_patch32_clip_224 vit_base_patch16_clip_quickgelu_224
""".split()


def timm_model(**changes):
    """A timm model with random weights everywhere, also where timm starts from zero or one."""
    torch.manual_seed(0)
    model = VisionTransformer(**{**TINY, **changes}).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_named_config_is_timms(name):
    with torch.device("meta"):
        theirs = timm.create_model(name)
    config = timm_models.config_of(theirs)
    named = ViTConfig.named(name, classes=config.classes, mean=config.mean, std=config.std)
    assert named.grid == config.grid and named.replace(image_size=config.image_size) == config
    shapes = {n: tuple(p.shape) for n, p in ViT(named, device="meta").state_dict().items()}
    assert shapes == {n: tuple(p.shape) for n, p in theirs.state_dict().items()}


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("name", MODELS)
def test_matches_timm_block_by_block(name, path):
    theirs = timm_model(**MODELS[name]).double()
    ours = ViT(timm_models.config_of(theirs), dtype=torch.float64).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ours.path = path
    image = torch.randn(3, 3, 24, 16, dtype=torch.float64)
    options = dict(output_fmt="NLC", return_prefix_tokens=True)
    with torch.no_grad():
        their_final, their_rows = theirs.forward_intermediates(image, **options)
        our_final, our_rows = ours.forward_intermediates(image, **options)
        for i, (mine, wanted) in enumerate(zip(our_rows, their_rows, strict=True)):
            torch.testing.assert_close(
                mine,
                wanted,
                rtol=0,
                atol=1e-10,
                msg=lambda m, i=i: f"block {i} is the first that differs: {m}",
            )
        torch.testing.assert_close(our_final, their_final, rtol=0, atol=1e-10)
        torch.testing.assert_close(ours.forward_features(image), theirs.forward_features(image))
        torch.testing.assert_close(ours(image), theirs(image), rtol=0, atol=1e-10)
        for norm in (True, False):
            for mine, wanted in zip(
                ours.forward_intermediates(image, [0, 2], norm=norm, intermediates_only=True),
                theirs.forward_intermediates(image, [0, 2], norm=norm, intermediates_only=True),
                strict=True,
            ):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MODELS)
def test_float32_keeps_the_error_rule_against_timm(name, path):
    theirs = timm_model(**MODELS[name])
    ours = ViT(timm_models.config_of(theirs)).eval()
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(5, 3, 24, 16)
    force(ours, path, image)
    with torch.no_grad():
        got = ours.forward_features(image)
        with FixedOrder():
            torchs = theirs.forward_features(image)
        truth = theirs.double().forward_features(image.double())
    check_error(got, torchs, truth, torch.float32, "features")


@pytest.mark.parametrize("size", [(48, 16), (12, 40)])
def test_resizing_matches_timm(size):
    theirs = timm_model(dynamic_img_size=True)
    ours = ViT(timm_models.config_of(theirs)).eval()
    ours.load_state_dict(theirs.state_dict())
    ours.path = "reference"
    image = torch.randn(2, 3, *size)
    torch.testing.assert_close(ours(image), theirs(image))
    ours.set_input_size(size)
    theirs.set_input_size(size)
    torch.testing.assert_close(ours.pos_embed, theirs.pos_embed)
    torch.testing.assert_close(ours(image), theirs(image))
    ours.set_input_size((size[0] * 2, size[1] * 2), patch_size=8)
    theirs.set_input_size((size[0] * 2, size[1] * 2), patch_size=(8, 8))
    torch.testing.assert_close(
        ours.patch_embed.proj.weight, theirs.patch_embed.proj.weight, rtol=1e-4, atol=1e-5
    )


def test_gradients_match_timm():
    theirs = timm_model(init_values=0.5).double().train()
    ours = ViT(timm_models.config_of(theirs), dtype=torch.float64).train()
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(3, 3, 24, 16, dtype=torch.float64)
    for model in (theirs, ours):
        model(image).square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad, q.grad, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_accelerates_timm_models(name, precision):
    theirs = timm_model(**MODELS[name])
    fast = vitkern.accelerate(theirs, precision)
    image = torch.randn(3, 3, 24, 16)
    close = dict(rtol=1e-4, atol=1e-4) if precision == "fp32" else dict(rtol=0.1, atol=0.1)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), theirs(image), **close)
    with torch.no_grad():
        theirs.patch_embed.proj.weight.mul_(0.5)  # shared: the result follows
        torch.testing.assert_close(fast(image), theirs(image), **close)


REFUSED = {
    "global_pool='max'": {"global_pool": "max"},
    "patch dropout": {"patch_drop_rate": 0.1},
    "gated otherwise": {"mlp_layer": timm.layers.GluMlp},
    "the activation ReLU": {"act_layer": "relu"},
    "SimpleNorm": {"norm_layer": timm.layers.SimpleNorm},
    "without a bias": {"proj_bias": False},
    "dynamic_img_pad": {"dynamic_img_pad": True},
    "mean pooling over class": {"global_pool": "avg", "pool_include_prefix": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_timm_models_are_refused(reason):
    with pytest.raises(ValueError) as error:
        vitkern.accelerate(timm_model(**REFUSED[reason]))
    assert reason in str(error.value) and str(error.value).startswith("timm.config_of: ")


def test_touched_timm_models_are_refused():
    model = timm_model()
    model.blocks[1].attn.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"blocks\.1\.attn has a hook"):
        vitkern.accelerate(model)
    with torch.device("meta"):
        with pytest.raises(ValueError, match="is not a timm VisionTransformer"):
            timm_models.config_of(timm.create_model("resnet18"))
