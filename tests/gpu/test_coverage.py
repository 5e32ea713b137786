"""The ahead-of-time list has every kernel that the named models launch: nothing is compiled here.

A launch is looked for by its variant's name, as the runtime looks for its binary. Wanted is what a
model launches at batch sizes that the list was not recorded at: the engine's plans, the fused
operators, a training step; images as floats and as bytes.
"""

import itertools

import pytest

pytest.importorskip("triton")
from vitkern import config
from vitkern.config import VARIANTS, ViTConfig
from vitkern.engines import catalogue, trace
from vitkern.engines.catalogue import siglip
from vitkern.gpu.configs import ARCHS

CLIP = "vit_{}_clip_quickgelu_224"
# Models that are in use and in no list of names, by family.
OTHERS = {
    "vit": {
        "mean of the patches": ViTConfig.named("B/16", pool="mean", final_norm="after_pool"),
        "ImageNet-21k": ViTConfig.named("L/16", classes=21843),
        "CIFAR-100 at 384": ViTConfig.named("S/16", classes=100, image_size=384),
        "two classes": ViTConfig.named("Ti/16", classes=2),
    },
    "deit3": {"deit3 at 256": ViTConfig.named("deit3_large_patch16_224", image_size=256)},
    "dinov2": {
        f"dinov2 at {size}": ViTConfig.named("vit_large_patch14_reg4_dinov2", image_size=size)
        for size in (224, 252, 336, 448, 476, 616)
    },
    "clip": {
        "OpenAI's B/32": ViTConfig.named(CLIP.format("base_patch32"), classes=512),
        "OpenAI's L/14": ViTConfig.named(CLIP.format("large_patch14"), classes=768),
        "at 336": ViTConfig.named(CLIP.format("large_patch14"), classes=768, image_size=336),
        "H/14 at 378": ViTConfig.named("vit_huge_patch14_clip_378", classes=1024),
    },
    "siglip": {
        "B/16 at 512": siglip(16, 512, VARIANTS["B"]),
        "L/16 at 384": siglip(16, 384, VARIANTS["L"], "gelu_tanh"),
        "so400m/14 at 392": siglip(14, 392, activation="gelu_tanh"),
        "so400m/14 at 448": siglip(14, 448),
        "so400m/16 at 384": siglip(16, 384, activation="gelu_tanh"),
    },
    "qk_norm": {
        "qk-norm and LayerScale": ViTConfig.named("B/16", qk_norm=True, layer_scale=1e-5),
        "L/16 with qk-norm": ViTConfig.named("L/16", qk_norm=True, image_size=384),
    },
    "dinov3": {
        f"dinov3 {word} at {size}": ViTConfig.named(f"vit_{word}", image_size=size)
        for word, size in (
            ("small_patch16_dinov3", 224),
            ("base_patch16_dinov3", 512),
            ("large_patch16_dinov3_qkvb", 224),
            ("large_patch16_dinov3", 768),
        )
    },
    "eva02": {
        "eva02 at 336": ViTConfig.named("eva02_base_patch14_224", image_size=336),
    },
}
# Of names_rotary.py those that kernels are built for; others are compiled when first used.
ROTARY = [
    f"vit_{word}_patch16_dinov3{bias}"
    for word in ("small", "small_plus", "base", "large", "huge_plus")
    for bias in ("", "_qkvb")
]
ROTARY += [f"eva02_{word}_patch14_{size}" for word in ("base", "large") for size in (224, 448)]
ROTARY += ["eva02_base_patch16_clip_224", "eva02_large_patch14_clip_336"]
# In names that vitkern knows: the first that is found.
WORDS = {"dinov3": "dinov3", "eva02": "eva02"}
WORDS |= {"dinov2": "dinov2", "clip": "clip", "deit3_": "deit3"}


def family(name: str) -> str:
    return next((kind for word, kind in WORDS.items() if word in name), "vit")


def members(kind: str) -> list[str]:
    """Every model of a family that has a name anywhere."""
    named = [name for name in [*config.names(), *ROTARY] if family(name) == kind]
    return list(dict.fromkeys([*named, *catalogue.FAMILIES[kind], *OTHERS[kind]]))


@pytest.fixture(autouse=True)
def others(monkeypatch):
    for models in OTHERS.values():
        for name, one in models.items():
            monkeypatch.setitem(catalogue.OWN, name, one)


def missing(built: set[str], case: trace.Case, arch: str) -> list[str]:
    """Launches of a case that the list has no variant for, on a device of some size."""
    processors = (None, 24, 84, 304)[case.batch % 4]  # None: the usual board's
    wanted = {one.variant.name: one for one in trace.launches(case, arch, processors=processors)}
    return [f"{case}: {name}" for name in wanted if name not in built]


def gaps(built: set[str], models, precision: str, arch: str) -> list[str]:
    """What is missing of these models, each at some of the batch sizes of real use."""
    batches = itertools.cycle((1, 5, 12, 33, 100, 2, 7, 24, 48, 200, 600, 3, 10, 80))
    found = []
    for name in models:
        for batch in itertools.islice(batches, 3):
            found += missing(built, trace.Case(name, precision, batch), arch)
        found += missing(built, trace.Case(name, precision, next(batches), training=True), arch)
        for images in trace.IMAGES[1:]:
            case = trace.Case(name, precision, next(batches), images=images)
            found += missing(built, case, arch)
    return found


def build_list(arch: str, precision: str, models=catalogue.MODELS) -> set[str]:
    return {variant.name for variant in trace.variants(arch, (precision,), models)}


def test_a_family_built_alone_has_the_kernels_of_its_models():
    """The smallest family; the others are in the long test below."""
    built = build_list("sm_90", "autocast-bf16", ("deit3",))
    assert not gaps(built, members("deit3"), "autocast-bf16", "sm_90")


@pytest.mark.full
@pytest.mark.parametrize("kind", catalogue.FAMILIES)
def test_every_family_built_alone_has_the_kernels_of_its_models(kind):
    for arch, precision in (("sm_80", "bf16"), ("sm_90", "fp32"), ("gfx942", "autocast-fp16")):
        built = build_list(arch, precision, (kind,))
        assert not gaps(built, members(kind), precision, arch)


@pytest.mark.full
@pytest.mark.parametrize("precision", trace.MIXTURES)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_list_has_the_kernels_of_every_named_model(arch, precision):
    assert precision in trace.USUAL
    built = build_list(arch, precision)
    for kind in catalogue.FAMILIES:
        assert not gaps(built, members(kind), precision, arch)


@pytest.mark.full
@pytest.mark.parametrize("name", ("B/16", "vit_base_patch14_dinov2", "vit_base_patch32_clip_224"))
@pytest.mark.parametrize("arch", ("sm_80", "sm_90", "gfx942"))
def test_a_model_s_list_has_the_kernels_of_every_batch(arch, name):
    built = build_list(arch, "bf16", (name,))
    found = []
    for batch in (*range(1, 40), *range(40, 1100, 97)):
        found += missing(built, trace.Case(name, "bf16", batch), arch)
        found += missing(built, trace.Case(name, "bf16", batch, training=True), arch)
        for images in trace.IMAGES[1:]:
            found += missing(built, trace.Case(name, "bf16", batch, images=images), arch)
    assert not found


@pytest.mark.parametrize(
    "name, shape",
    [
        pytest.param("vit_tiny_r_s16_p8_224", (2, 64, 56, 56), id="hybrid"),
        pytest.param("vit_so400m_patch14_siglip_384", (2, 3, 378, 378), id="cropped"),
        pytest.param("vit_relpos_base_patch32_plus_rpn_256", (2, 3, 256, 256), id="post-norm"),
    ],
)
def test_launches_are_those_of_an_image_of_the_models_size(name, shape):
    """A stem's stride and pixels beyond the last patch count; engines may refuse blocks."""
    found = trace.launches(trace.Case(name, "bf16", 2), "sm_90")
    embeds = [one for one in found if one.kernel.__name__ == "patch_embed_forward"]
    assert {tuple(one.arguments["image"].shape) for one in embeds} == {shape}
    pixels = catalogue.config(name).pixels[1] if "_r_" not in name else shape[3]
    assert {one.arguments["strides"][2] for one in embeds} == {pixels}


@pytest.mark.parametrize("precision", ["bf16", "autocast-fp16"])
def test_the_blocks_of_a_case_stand_for_all(precision):
    """First, middle and last: a fourth brings no other kernel."""
    case = trace.Case("deit3_base_patch16_224", precision, 8, training=True)
    recorded, deeper = (
        {one.variant.name for one in trace.launches(case._replace(depth=depth), "sm_90")}
        for depth in (case.depth, case.depth + 1)
    )
    assert recorded == deeper


def test_a_missing_kernel_is_seen():
    """B/16's kernels do not serve a model with LayerScale."""
    built = build_list("sm_80", "bf16", ("B/16",))
    assert not missing(built, trace.Case("B/16", "bf16", 5), "sm_80")
    found = missing(built, trace.Case("deit3_base_patch16_224", "bf16", 5), "sm_80")
    assert found and all("linear_residual_forward" in one for one in found)


def test_families_are_models_each_once():
    assert len(set(catalogue.MODELS)) == len(catalogue.MODELS)
    assert catalogue.models(("deit3", "B/16", "B/16")) == (*catalogue.FAMILIES["deit3"], "B/16")
    for name in catalogue.MODELS:
        assert catalogue.config(name, depth=1).depth == 1
