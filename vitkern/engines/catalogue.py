"""The models whose kernels `vitkern aot` builds: families of them, by name.

A kernel's variant depends on few things about a model: patch and image size, head width, which
tensors there are (LayerScale, biases, qk-norm, rotary positions), the activation, what divides its
widths. So the few models here have the kernels of all named ones of their families and of others
like them: tests/gpu/test_coverage.py compares.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..config import VARIANTS, ViTConfig

_SO400M = (1152, 27, 16, 4304)  # width, depth, heads (of 72 channels), MLP width


def siglip(
    patch: int, size: int, of: tuple[int, int, int, int] = _SO400M, activation: str = "gelu"
) -> ViTConfig:
    """SigLIP's image tower without its attention pooling: no class token, a mean of the patches.

    timm's `vit_base_patch16_siglip_gap_224` and its like; SigLIP 2 has gelu_tanh.
    """
    width, depth, heads, mlp_width = of
    return ViTConfig(
        patch_size=patch, image_size=size, width=width, depth=depth, heads=heads,
        mlp_width=mlp_width, class_token=False, pool="mean", classes=0, activation=activation,
    )  # fmt: skip


def _at(name: str, *sizes: int) -> dict[str, ViTConfig]:
    """A model at other image sizes."""
    return {f"{name}_at_{size}": ViTConfig.named(name, image_size=size) for size in sizes}


# Models that ViTConfig.named has no name for. Image sizes are small ones of their kind: a small
# batch of them meets the settings for few rows, a large batch all others. Kinds: rows of pixels are
# multiples of 16 long or not, and so are planes (of multiples of 14: 224, 252 and 210); tiles of
# 128 queries waste much (257, 289 tokens) or little (197, 226).
OWN: dict[str, ViTConfig] = {
    # A classifier's kernels depend on what divides the number of classes: 16, 4 or nothing.
    **{f"vit_base_patch16_{n}_classes": ViTConfig.named("B/16", classes=n) for n in (0, 10, 400)},
    **_at("deit3_small_patch16_224", 256),
    **_at("vit_base_patch14_dinov2", 210, 224, 252),
    "clip_base_patch32_512_columns": ViTConfig.named("vit_base_patch32_clip_224", classes=512),
    **_at("vit_large_patch14_clip_224", 210, 252),
    **_at("vit_huge_patch14_clip_224", 210),
    "siglip_base_patch16_224": siglip(16, 224, VARIANTS["B"]),
    "siglip_so400m_patch14_224": siglip(14, 224),
    "siglip_so400m_patch14_210": siglip(14, 210),
    "siglip_so400m_patch14_252": siglip(14, 252),
    "siglip2_base_patch32_256": siglip(32, 256, VARIANTS["B"], "gelu_tanh"),
    "siglip2_so400m_patch16_272": siglip(16, 272, activation="gelu_tanh"),
    "qk_norm_base_patch16_224": ViTConfig.named("B/16", qk_norm=True),
    "qk_norm_large_patch14_224": ViTConfig.named("L/14", qk_norm=True, layer_scale=1e-5),
    "qk_norm_huge_patch14_224": ViTConfig.named("H/14", qk_norm=True),
    **_at("vit_small_patch16_dinov3", 224),
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "vit": (
        "Ti/16", "S/16", "B/16", "B/8", "B/14", "H/14", "H/16", "g/14", "B/32",
        *(name for name in OWN if name.endswith("_classes")),
    ),
    "deit3": (
        "deit3_small_patch16_224", "deit3_base_patch16_224", "deit3_small_patch16_224_at_256",
    ),
    "dinov2": ("vit_small_patch14_dinov2", *(name for name in OWN if "dinov2" in name)),
    "clip": (
        "vit_base_patch32_clip_224", "vit_base_patch16_clip_224", "vit_large_patch14_clip_224",
        "vit_huge_patch14_clip_224", "vit_giant_patch14_clip_224",
        "vit_base_patch16_clip_quickgelu_224",
        *(name for name in OWN if "clip" in name),
    ),
    "siglip": tuple(name for name in OWN if name.startswith("siglip")),
    "qk_norm": tuple(name for name in OWN if name.startswith("qk_norm_")),
    "dinov3": (
        "vit_small_patch16_dinov3", "vit_base_patch16_dinov3_qkvb", "vit_large_patch16_dinov3",
        "vit_huge_plus_patch16_dinov3", "vit_small_patch16_dinov3_at_224",
    ),
    "eva02": (
        "eva02_base_patch14_224", "eva02_large_patch14_224", "eva02_large_patch14_448",
        "eva02_base_patch16_clip_224",
    ),
}  # fmt: skip
MODELS = tuple(name for names in FAMILIES.values() for name in names)


def config(name: str, **changes: object) -> ViTConfig:
    """The configuration of a model named here, or of any that ViTConfig.named knows."""
    own = OWN.get(name)
    return ViTConfig.named(name, **changes) if own is None else own.replace(**changes)


def models(names: Iterable[str]) -> tuple[str, ...]:
    """Models by name, and all of a family by its own; each once."""
    each = (one for name in names for one in FAMILIES.get(name, (name,)))
    return tuple(dict.fromkeys(each))
