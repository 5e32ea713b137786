"""timm's EVA, EVA-02, DINOv3, RoPE-ViT and PE against timm itself, small, with random weights."""

import copy

import pytest
import torch

import vitkern
from benchmarks import timm_import
from tests.model.tiny_models import PATHS, check_error

timm_import.prepare()
timm = pytest.importorskip("timm", exc_type=ImportError)

SMALL = dict(depth=2, img_size=(64, 96))
NARROW = dict(embed_dim=96, num_heads=2)
FAMILIES = {
    "eva02_tiny_patch14_224": dict(depth=2, img_size=56),
    "eva02_base_patch14_224": dict(depth=2, img_size=(56, 84), **NARROW),
    "eva02_base_patch16_clip_224": SMALL | NARROW,
    "eva_giant_patch14_224": dict(depth=2, img_size=56, embed_dim=176, num_heads=2),
    "vit_tiny_patch16_dinov3_qkvb": SMALL,
    "vit_small_plus_patch16_dinov3": SMALL | NARROW,
    "vit_7b_patch16_dinov3": dict(depth=2, img_size=64, embed_dim=256, num_heads=2),
    "vit_giant_patch16_lingbot": SMALL | NARROW,
    "vit_small_patch16_rope_224": SMALL | NARROW,
    "vit_small_patch16_rope_ape_224": SMALL | NARROW,
    "vit_small_patch16_rope_mixed_224": SMALL | NARROW,
    "vit_medium_patch16_rope_reg1_gap_256": SMALL | NARROW,
    "vit_pe_spatial_tiny_patch16_512": SMALL,
    "vit_pe_lang_gigantic_patch14_448": dict(depth=2, img_size=56, embed_dim=128, num_heads=2),
    "vit_giant_patch14_reg4_dinov2": dict(depth=2, img_size=(56, 84), **NARROW),
}
QUICK = ("eva02_base_patch14_224", "vit_small_plus_patch16_dinov3",
         "vit_small_patch16_rope_mixed_224", "vit_giant_patch14_reg4_dinov2")  # fmt: skip


def families(quick):
    """All of them; those that are not quick only in the full run."""
    marks = {name: [] if name in quick else [pytest.mark.full] for name in FAMILIES}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


every, most = families(QUICK), families(QUICK[1:3])


def made(name):
    """timm's model with weights so wide that every part shows, and images for it."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **FAMILIES[name]).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape)
            if p.ndim == 1 and not key.endswith("bias"):
                p.copy_(1 + 0.3 * noise)
            elif p.ndim >= 2 and key.endswith("weight"):
                p.copy_(1.2 * noise / p[0].numel() ** 0.5)
            elif "rope" not in key:
                p.copy_(0.5 * noise)
    return model, torch.randn(3, 3, *model.patch_embed.img_size)


def wide(model):
    """In float64, but for mixed tables, which timm computes in fp32 alone."""
    double = copy.deepcopy(model).double()
    if getattr(model, "rope_mixed", False):
        double.rope.float()
    return double


@every
@pytest.mark.parametrize("path", ("fused", "engine"))
def test_keeps_the_contract(name, path):
    theirs, image = made(name)
    ours = vitkern.accelerate(theirs)
    ours.path = path
    with torch.no_grad():
        got, torchs = ours(image), theirs(image)
        truth = wide(theirs)(image.double())
    check_error(got, torchs, truth, torch.float32, name, (6.0, 3.0))  # of torch as it is here


@most
def test_bf16_is_no_worse_than_timm_s(name):
    theirs, image = made(name)
    ours = vitkern.accelerate(copy.deepcopy(theirs), precision="bf16")
    with torch.no_grad():
        truth = theirs(image)
        error = (ours(image) - truth).square().mean().sqrt()
        if "mixed" in name:  # which timm cannot compute in bf16
            assert error < 0.02 * truth.square().mean().sqrt()
        else:
            narrow = theirs.bfloat16()(image.bfloat16()).float()
            assert error <= 1.25 * (narrow - truth).square().mean().sqrt()


@most
def test_gradients_are_timm_s(name):
    theirs, image = made(name)
    double = wide(theirs)
    ours = vitkern.accelerate(copy.deepcopy(theirs))
    for model, x in ((ours, image), (double, image.double())):
        model.zero_grad()
        y = model(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    wanted = {
        n.replace(".gamma_1", ".ls1.gamma").replace(".gamma_2", ".ls2.gamma"): p.grad
        for n, p in double.named_parameters()
    }
    for key, parameter in ours.named_parameters():
        scale = wanted[key].abs().max().clamp_min(1e-3)
        assert (parameter.grad - wanted[key]).abs().max() <= 2e-4 * scale, key


@pytest.mark.parametrize("name", QUICK[:2])
def test_an_image_has_the_same_bits_in_any_batch(name):
    theirs, image = made(name)
    for precision in ("fp32", "bf16", "int8"):
        ours = vitkern.accelerate(theirs, precision)
        with torch.no_grad():
            together = ours(image)
            for i in range(len(image)):
                assert torch.equal(ours(image[i : i + 1])[0], together[i]), precision


def test_parameters_are_shared():
    theirs, image = made("eva02_base_patch14_224")
    ours = vitkern.accelerate(theirs)
    with torch.no_grad():
        before = ours(image)
        theirs.blocks[0].attn.q_proj.weight.mul_(2)
        theirs.blocks[1].mlp.fc1_g.bias.add_(1)
        after = ours(image)
        torch.testing.assert_close(after, theirs(image), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after, atol=1e-3)


def test_images_of_other_sizes_are_those_of_timm():
    theirs, _ = made("vit_small_plus_patch16_dinov3")
    ours = vitkern.accelerate(theirs)
    images = [torch.randn(3, 48, 80), torch.randn(3, 64, 32), torch.randn(3, 16, 16)]
    with torch.no_grad():
        together = ours.forward_packed(images)
        for image, got in zip(images, together, strict=True):
            assert torch.equal(got, ours(image[None])[0])
            torch.testing.assert_close(got, theirs(image[None])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ("vit_base_patch16_rpn_224", "eva02_enormous_patch14_clip_224"))
def test_norms_after_attention_are_those_of_timm(name, path):
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=7, depth=2, img_size=56 if "14" in name else 64,
                               **NARROW).eval()  # fmt: skip
    ours, image = vitkern.accelerate(theirs), torch.randn(2, 3, *theirs.patch_embed.img_size)
    ours.path = path
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image), rtol=1e-4, atol=1e-5)


def test_what_vitkern_lacks_is_named():
    with torch.device("meta"):
        for name, reason in {
            "vit_base_patch16_sapiens2": "one LayerScale",
            "vit_pe_core_tiny_patch16_384": "attention pooling",
        }.items():
            with pytest.raises(ValueError, match=reason):
                vitkern.accelerate(timm.create_model(name))
