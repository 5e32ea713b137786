"""timm's EVA, EVA-02, DINOv3, RoPE-ViT and PE against timm itself, small, with random weights."""

import copy
import functools

import pytest
import torch

import vitkern
from tests.evidence.fixed_order.torch_mode import FixedOrder, fixed_backwards
from tests.model.tiny_models import PATHS, check_error
from vitkern.bench import timm_import
from vitkern.verification.models import joint_error

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
    "vit_pe_core_tiny_patch16_384": SMALL,
    "vit_pe_core_gigantic_patch14_448": dict(depth=2, img_size=56, embed_dim=128, num_heads=2),
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
    model, image = _made(name)
    return copy.deepcopy(model), image


@functools.cache
def _made(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=37, **FAMILIES[name]).eval()
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


@functools.cache
def expected(name):
    """Features and logits of torch in float32, and the truth: the paths share them."""
    theirs, image = made(name)
    double = wide(theirs)
    with torch.no_grad():
        with FixedOrder():
            torchs = theirs.forward_features(image), theirs(image)
        return torchs, (double.forward_features(image.double()), double(image.double()))


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
        got = ours.forward_features(image), ours(image)
    for one in zip(got, *expected(name), strict=True):
        check_error(*one, torch.float32, f"{name}: features, logits")


@most
@pytest.mark.parametrize("path", ("fused", "engine"))
def test_bf16_keeps_the_contract(name, path):
    theirs, image = made(name)
    ours = vitkern.accelerate(copy.deepcopy(theirs), precision="bf16")
    ours.path = path
    _, (truth, _) = expected(name)
    if getattr(theirs, "rope_mixed", False):  # its tables are fp32 alone: as autocast runs it
        context, narrow, pixels = torch.autocast("cpu", torch.bfloat16), theirs, image
    else:
        context, narrow, pixels = FixedOrder(), theirs.bfloat16(), image.bfloat16()
    with torch.no_grad():
        got = ours.forward_features(image)
        with context:
            torchs = narrow.forward_features(pixels)
    check_error(got, torchs, truth, torch.bfloat16, name)


@most
def test_gradients_keep_the_contract(name):
    theirs, _ = made(name)
    ours, double = vitkern.accelerate(copy.deepcopy(theirs)), wide(theirs)
    g = torch.Generator().manual_seed(0)  # eight: the worst error of three is luck
    image = torch.randn(8, 3, *theirs.patch_embed.img_size, generator=g)

    def gradients(model, x):
        y = model(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        return {key: p.grad for key, p in vitkern.foreign.timm.parameters_of(model).items()}

    truth = gradients(double, image.double())
    with FixedOrder():
        torchs = gradients(theirs, image)
    with fixed_backwards():
        got = gradients(ours, image)
    assert got.keys() == truth.keys()
    error, room = joint_error(got, truth), joint_error(torchs, truth)
    assert error.within(room, torch.float32), f"{error} against PyTorch's {room}"


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
        }.items():
            with pytest.raises(ValueError, match=reason):
                vitkern.accelerate(timm.create_model(name))
