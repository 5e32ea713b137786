"""Models of timm's that are more than a plain ViT: heads, positions, blocks, stems of their own."""

import copy
import functools
from functools import partial

import pytest
import torch

import vitkern
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.model.tiny_models import PATHS, check_error, force
from vitkern import ViT
from vitkern.bench import timm_import

timm_import.prepare()
timm = pytest.importorskip("timm", exc_type=ImportError)
from timm.layers import RmsNorm  # noqa: E402
from timm.models import beit, deit, vision_transformer, vision_transformer_relpos  # noqa: E402

TINY = dict(img_size=(24, 16), patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=37)
_VIT, _BEIT = vision_transformer.VisionTransformer, beit.Beit
_RELPOS = vision_transformer_relpos.VisionTransformerRelPos
_RELATIVE = dict(use_abs_pos_emb=False, init_values=0.1)
# Name: class of timm's, what is changed of TINY.
FAMILIES = {
    "map": (_VIT, dict(global_pool="map", class_token=False)),
    "map-registers": (_VIT, dict(global_pool="map", class_token=False, reg_tokens=2)),
    "cropped": (_VIT, dict(img_size=(26, 19))),
    "distilled": (deit.VisionTransformerDistilled, {}),
    "distilled-no-head": (deit.VisionTransformerDistilled, dict(num_classes=0)),
    "beit": (_BEIT, dict(_RELATIVE, use_rel_pos_bias=True)),
    "beit-shared": (_BEIT, dict(_RELATIVE, use_shared_rel_pos_bias=True)),
    "beit-absolute": (_BEIT, dict(qkv_bias=False, global_pool="token")),
    "relpos": (_RELPOS, dict(rel_pos_dim=24, fc_norm=True, qkv_bias=False)),
    "relpos-class-token": (_RELPOS, dict(class_token=True, global_pool="token")),
    "relpos-shared": (_RELPOS, dict(shared_rel_pos=True, rel_pos_dim=16)),
    "relpos-table": (_RELPOS, dict(rel_pos_type="bias", class_token=True)),
    "relpos-post-norm": (
        _RELPOS,
        dict(block_fn=vision_transformer_relpos.ResPostRelPosBlock, init_values=0.5),
    ),
    "post-norm": (_VIT, dict(block_fn=vision_transformer.ResPostBlock, qk_norm=True)),
    "parallel": (_VIT, dict(block_fn=vision_transformer.ParallelScalingBlock, init_values=0.5)),
    "parallel-rms": (
        _VIT,
        dict(block_fn=vision_transformer.ParallelScalingBlock, norm_layer=RmsNorm, qk_norm=True,
             qkv_bias=False, pre_norm=True),
    ),
    "twin": (_VIT, dict(block_fn=vision_transformer.ParallelThingsBlock, init_values=0.5)),
    "rms": (_VIT, dict(norm_layer=partial(RmsNorm, eps=1e-5), qk_norm=True)),
}  # fmt: skip


# Another of the same family is there, which drops elements at the same places.
VARIANTS = ("map-registers", "cropped", "distilled-no-head", "beit-shared", "beit-absolute", "rms")


@functools.cache
def _made(name):
    torch.manual_seed(0)
    kind, changes = FAMILIES[name]
    model = kind(**{**TINY, **changes}).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return model


def timm_model(name):
    """With random weights everywhere, also where timm starts from zero or one."""
    return copy.deepcopy(_made(name))


@functools.cache
def expected(name):
    """Features and logits of torch in float32, and the truth: the paths share them."""
    theirs = timm_model(name)
    image = images(theirs)
    with torch.no_grad():
        with FixedOrder():
            torchs = theirs.forward_features(image), theirs(image)
        theirs.double()
        return torchs, (theirs.forward_features(image.double()), theirs(image.double()))


@functools.cache
def expected_gradients(name):
    theirs = timm_model(name).double()
    theirs(images(theirs).double()).square().sum().backward()
    return {key: p.grad for key, p in vitkern.foreign.timm.parameters_of(theirs).items()}


def images(model, B=5, dtype=torch.float32):
    size = model.patch_embed.img_size
    return torch.randn(B, 3, *size, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_float32_keeps_the_error_rule_against_timm(name, path):
    theirs = timm_model(name)
    ours, image = vitkern.accelerate(theirs), images(theirs)
    force(ours, path, image)
    with torch.no_grad():
        got = ours.forward_features(image), ours(image)
    for one in zip(got, *expected(name), strict=True):
        check_error(*one, torch.float32, "features, logits")


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_keeps_the_error_rule_against_timm(name):
    theirs = timm_model(name).bfloat16()
    ours, image = vitkern.accelerate(theirs), images(theirs).bfloat16()
    with torch.inference_mode():
        got, torchs = ours.forward_features(image), theirs.forward_features(image)
        truth = copy.deepcopy(theirs).double().forward_features(image.double())
    check_error(got, torchs, truth, torch.bfloat16, "features")


@pytest.mark.parametrize("path", ["reference", "fused"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_match_timm(name, path):
    theirs = timm_model(name)
    ours, image = vitkern.accelerate(theirs).double(), images(theirs).double()
    ours.path = path  # in eval mode: timm's relative MLP drops while training
    ours(image).square().sum().backward()
    wanted = expected_gradients(name)
    for key, parameter in ours.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(
            parameter.grad, wanted[key], rtol=1e-6, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_the_parameters_are_shared_and_their_changes_seen(name):
    theirs = timm_model(name)
    fast, image = vitkern.accelerate(theirs), images(theirs)
    with torch.no_grad():
        for change in (None, "weight", "all"):
            for p in theirs.parameters() if change == "all" else [theirs.patch_embed.proj.weight]:
                p.mul_(1 if change is None else 0.8)
            torch.testing.assert_close(fast(image), theirs(image), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_the_configuration_has_as_many_parameters(name):
    theirs = timm_model(name)
    ours = ViT(vitkern.accelerate(theirs).config, device="meta")
    tables = "relative_position_bias_table"  # a shared one is each block's own in vitkern
    count = [
        sum(p.numel() for n, p in m.named_parameters() if tables not in n) for m in (ours, theirs)
    ]
    assert count[0] == count[1]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in VARIANTS)) for n in FAMILIES]
)
def test_training_drops_the_same_elements_by_modules_and_operators(name):
    theirs = timm_model(name)
    if "relpos" in name and "table" not in name:
        pytest.skip("the relative MLP's dropout is torch's own")
    rates = dict(attention_dropout=0.2, projection_dropout=0.3, drop_path=0.4)
    ours = ViT(vitkern.accelerate(theirs).config.replace(**rates))
    ours.load_state_dict(vitkern.accelerate(theirs).state_dict())
    ours.train()
    results = []
    for path in ("reference", "fused"):
        torch.manual_seed(3)
        ours.path = path
        results.append(ours(images(theirs)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name, said",
    [("map", "in PyTorch: attention pooling"), ("distilled", "in PyTorch: both heads"),
     ("twin", "the packed engine has no twin blocks"), ("post-norm", "path: engine")],
)  # fmt: skip
def test_explain_names_what_the_engine_does_not_run(name, said):
    theirs = timm_model(name)
    with torch.inference_mode():
        assert said in vitkern.accelerate(theirs).explain(images(theirs))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["map", "beit", "relpos", "post-norm", "parallel-rms", "twin"])
def test_rows_after_blocks_are_timms(name, norm):
    theirs = timm_model(name)
    ours, image = vitkern.accelerate(theirs), images(theirs)
    asked = dict(indices=[0, 1], norm=norm, output_fmt="NCHW")
    with torch.inference_mode():
        got, wanted = (m.forward_intermediates(image, **asked) for m in (ours, theirs))
        assert bool(ours.engines.packed()) == (name != "twin"), "which path ran"
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-4)


def test_two_heads_are_trained_apart_and_averaged():
    theirs = timm_model("distilled")
    ours, image = vitkern.accelerate(theirs), images(theirs)
    for model in (theirs, ours):
        model.train()
        model.set_distilled_training(True)
    got, wanted = ours(image), theirs(image)
    assert isinstance(got, tuple)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    ours.eval()
    torch.testing.assert_close(ours(image), (got[0] + got[1]) / 2, rtol=1e-4, atol=1e-4)
    assert ours.get_classifier() == (ours.head, ours.head_dist)


HYBRIDS = {
    "vit_tiny_r_s16_p8_224": dict(img_size=64),
    "vit_small_r26_s32_224": dict(img_size=64),
    "vit_base_r50_s16_224": dict(img_size=(48, 32)),
    "vit_small_resnet26d_224": dict(img_size=64),
    "vit_base_mci_224": dict(img_size=(48, 32), embed_dim=768, num_heads=12),
}


@pytest.mark.full
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_timms_and_their_stems_are_shared(name):
    torch.manual_seed(0)
    small = dict(embed_dim=32, depth=2, num_heads=2, num_classes=7) | HYBRIDS[name]
    theirs = timm.create_model(name, **small).eval()
    with torch.no_grad():
        for value in [*theirs.parameters(), *theirs.buffers()]:
            if value.is_floating_point() and value.ndim < 4:  # norms, BatchNorm's statistics
                value.add_(torch.rand_like(value) * 0.3)
    image = images(theirs, 2, torch.float64)
    fast = vitkern.accelerate(theirs)
    with torch.no_grad():
        got, wanted = fast(image.float()), theirs(image.float())
        assert fast.engines.packed(), fast.explain()
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    wide = copy.deepcopy(fast).double()
    wide.path = "reference"
    for model in (wide.train(), copy.deepcopy(theirs).double().train()):  # BatchNorm's own, too
        result = model(image)
        result.square().sum().backward()
        first = model.patch_embed.backbone.get_parameter(
            next(n for n, _ in model.patch_embed.backbone.named_parameters())
        )
        torch.testing.assert_close(result, wide(image), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            first.grad, next(wide.patch_embed.backbone.parameters()).grad, rtol=1e-5, atol=1e-8
        )
