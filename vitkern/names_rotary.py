"""timm's names of models with rotary positions, gated MLPs and EVA's blocks: all their fields.

As in names.py a name stands for the first of its pretrained tags. Image sizes are part of these
names, or the family's own.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]  # of ViTConfig

_SIZES = ("width", "depth", "heads", "mlp_width")


def _sizes(*numbers: int) -> Fields:
    return dict(zip(_SIZES, numbers, strict=False))


_TINY, _SMALL, _BASE = _sizes(192, 12, 3, 768), _sizes(384, 12, 6, 1536), _sizes(768, 12, 12, 3072)
_MEDIUM, _LARGE = _sizes(512, 12, 8, 2048), _sizes(1024, 24, 16, 4096)
_GIANT = _sizes(1536, 40, 24, 4096)  # DINOv2's, with a gated MLP
_HEADLESS: Fields = {"classes": 0}
_GATED: Fields = {"mlp": "swiglu", "activation": "silu"}
_SPLIT: Fields = {"mlp": "swiglu_split", "activation": "silu"}
_NO_KEY_BIAS: Fields = {"key_bias": False}
_MEAN: Fields = {"pool": "mean", "final_norm": "after_pool"}


def _eva(patch: int, image: int, **changes: Any) -> Fields:
    return {"patch_size": patch, "image_size": image, **_NO_KEY_BIAS, **changes}


_EVA02: Fields = {"rope": "axial", "rope_grid": (16, 16)}
_EVA02_SPLIT: Fields = {**_EVA02, **_SPLIT, "mlp_norm": True, "separate_qkv": True}
_EVA02_CLIP: Fields = {**_EVA02_SPLIT, "attention_norm": True}
_EVA02_TINY: Fields = {**_sizes(192, 12, 3, 512), **_EVA02, **_GATED, **_MEAN}
_EVA02_SMALL: Fields = {**_sizes(384, 12, 6, 1024), **_EVA02, **_GATED, **_MEAN}
_EVA02_BASE: Fields = {**_sizes(768, 12, 12, 2048), **_EVA02_SPLIT, **_MEAN}
_EVA02_LARGE: Fields = {**_sizes(1024, 24, 16, 2730), **_EVA02_SPLIT, **_MEAN}
_EVA_GIANT = _sizes(1408, 40, 16, 6144)

_DINOV3: Fields = {
    "image_size": 256, "classes": 0, "registers": 4, "pool": "mean", "position": "none",
    "rope": "dinov3", "rope_temperature": 100.0, "rope_half": True, "layer_scale": 1e-5,
    "norm_eps": 1e-5, "dynamic_image_size": True, "qkv_bias": False,
}  # fmt: skip
_QKVB: Fields = {"qkv_bias": True, **_NO_KEY_BIAS}
_LINGBOT: Fields = {**_DINOV3, "image_size": 512, "pool": "token"}

_ROPE: Fields = {"rope": "axial", "rope_temperature": 100.0}
_MIXED: Fields = {"rope": "mixed", "rope_temperature": 10.0}
_ROPE_VIT: Fields = {"rope_x_first": True, "layer_scale": 1e-5}
_APE: Fields = {"position_covers_prefix": False}
_NONE: Fields = {"position": "none"}

_PE: Fields = {
    "classes": 0, "pool": "mean", "rope": "axial", "rope_offset": 1.0, "rope_x_first": True,
    "rope_grid": (32, 32), "pre_norm": True, "final_norm": "none", "norm_eps": 1e-5,
}  # fmt: skip
_PE_14: Fields = {**_PE, "image_size": 448, "patch_size": 14}
_PE_16: Fields = {**_PE, "image_size": 512}
_PE_GIGANTIC: Fields = {
    **_PE_14, "class_token": False, "rope_offset": 0.0, "layer_scale": 0.1,
    "width": 1536, "heads": 16, "mlp_width": 8960,
}  # fmt: skip


_PE_CORE: Fields = {
    **_PE, "pool": "map", "pool_heads": 8, "pool_prefix": True, "final_norm": "before_pool",
}  # fmt: skip


def _pe_core(sizes: Fields, patch: int, image: int, classes: int, **changes: Any) -> Fields:
    sides = (image // patch,) * 2
    fields = {**sizes, **_PE_CORE, "patch_size": patch, "image_size": image, "rope_grid": sides}
    return fields | {"classes": classes} | changes


def _gap(sizes: Fields, registers: int, **changes: Any) -> Fields:
    """timm's own models with registers instead of a class token."""
    fields = {**sizes, "image_size": 256, "class_token": False, "registers": registers, **_MEAN}
    fields |= {**_NONE, **_EVA02, **_NO_KEY_BIAS, "layer_scale": 1e-5}
    return fields | changes


WHOLE: dict[str, Fields] = {
    "eva02_tiny_patch14_224": {**_EVA02_TINY, **_eva(14, 224), **_HEADLESS},
    "eva02_tiny_patch14_336": {**_EVA02_TINY, **_eva(14, 336)},
    "eva02_small_patch14_224": {**_EVA02_SMALL, **_eva(14, 224), **_HEADLESS},
    "eva02_small_patch14_336": {**_EVA02_SMALL, **_eva(14, 336)},
    "eva02_base_patch14_224": {**_EVA02_BASE, **_eva(14, 224), **_HEADLESS},
    "eva02_base_patch14_448": {**_EVA02_BASE, **_eva(14, 448)},
    "eva02_large_patch14_224": {**_EVA02_LARGE, **_eva(14, 224), **_HEADLESS},
    "eva02_large_patch14_448": {**_EVA02_LARGE, **_eva(14, 448)},
    "eva02_base_patch16_clip_224": {
        **_sizes(768, 12, 12, 2048), **_EVA02_CLIP, **_eva(16, 224, classes=512),
    },
    **{
        f"eva02_large_patch14_clip_{size}": {
            **_sizes(1024, 24, 16, 2730), **_EVA02_CLIP, **_eva(14, size, classes=768),
        }
        for size in (224, 336)
    },
    "eva02_enormous_patch14_clip_224": {
        **_sizes(1792, 64, 16, 15360), **_eva(14, 224, classes=1024), "block": "post_norm",
    },
    **{
        f"eva_giant_patch14_{size}": {**_EVA_GIANT, **_MEAN, **_eva(14, size)}
        for size in (224, 336, 560)
    },
    "eva_giant_patch14_clip_224": {**_EVA_GIANT, **_eva(14, 224, classes=1024)},
    **{
        f"eva_large_patch14_{size}": {**_LARGE, **_MEAN, "patch_size": 14, "image_size": size}
        for size in (196, 336)
    },
    "vit_tiny_patch16_dinov3_qkvb": {**_TINY, **_DINOV3, **_QKVB},
    **{
        f"vit_{word}_patch16_dinov3{suffix}": {**sizes, **_DINOV3, **bias}
        for word, sizes in {
            "small": _SMALL, "small_plus": {**_SMALL, **_SPLIT}, "base": _BASE, "large": _LARGE,
            "huge_plus": {**_sizes(1280, 32, 20, 5120), **_SPLIT},
        }.items()
        for suffix, bias in {"": {}, "_qkvb": _QKVB}.items()
    },
    "vit_7b_patch16_dinov3": {**_sizes(4096, 40, 32, 8192), **_DINOV3, **_SPLIT},
    **{
        f"vit_{word}_patch16_lingbot": {**sizes, **_LINGBOT, **_QKVB}
        for word, sizes in {"small": _SMALL, "base": _BASE, "large": _LARGE}.items()
    },
    "vit_giant_patch16_lingbot": {**_GIANT, **_LINGBOT, **_SPLIT},
    **{
        f"vit_{word}_patch16_{kind}_224": {**sizes, **_ROPE_VIT, **fields}
        for word, sizes in {"small": _SMALL, "base": _BASE, "large": _LARGE}.items()
        for kind, fields in {
            "rope": {**_ROPE, **_NONE}, "rope_ape": {**_ROPE, **_APE},
            "rope_mixed": {**_MIXED, **_NONE}, "rope_mixed_ape": {**_MIXED, **_APE},
        }.items()
    },
    "vit_medium_patch16_rope_reg1_gap_256": _gap(_MEDIUM, 1),
    "vit_mediumd_patch16_rope_reg1_gap_256": _gap(
        _MEDIUM, 1, depth=20, qkv_bias=False, key_bias=True
    ),
    "vit_betwixt_patch16_rope_reg4_gap_256": _gap(_sizes(640, 12, 10, 2560), 4),
    "vit_base_patch16_rope_reg1_gap_256": _gap(_BASE, 1),
    "vit_pe_core_tiny_patch16_384": _pe_core(_TINY, 16, 384, 512),
    "vit_pe_core_small_patch16_384": _pe_core(_SMALL, 16, 384, 512),
    "vit_pe_core_base_patch16_224": _pe_core(_BASE, 16, 224, 1024),
    "vit_pe_core_large_patch14_336": _pe_core(_LARGE, 14, 336, 1024),
    "vit_pe_core_gigantic_patch14_448": _pe_core(
        _sizes(1536, 50, 16, 8960), 14, 448, 1280, class_token=False, rope_offset=0.0,
        pool_mlp_width=6144, pool_prefix=False,
    ),
    "vit_pe_lang_large_patch14_448": {**_LARGE, **_PE_14, "depth": 23, "layer_scale": 0.1},
    "vit_pe_lang_gigantic_patch14_448": {**_PE_GIGANTIC, "depth": 47},
    "vit_pe_spatial_tiny_patch16_512": {**_TINY, **_PE_16},
    "vit_pe_spatial_small_patch16_512": {**_SMALL, **_PE_16},
    "vit_pe_spatial_base_patch16_512": {**_BASE, **_PE_16},
    "vit_pe_spatial_large_patch14_448": {**_LARGE, **_PE_14},
    "vit_pe_spatial_gigantic_patch14_448": {**_PE_GIGANTIC, "depth": 50},
    **{
        name: {**_GIANT, **_GATED, "patch_size": 14, "classes": 0, **fields}
        for name, fields in {
            "vit_giant_patch14_dinov2": {"image_size": 518, "layer_scale": 1e-5},
            "vit_giant_patch14_reg4_dinov2": {
                "image_size": 518, "layer_scale": 1e-5, "registers": 4, **_APE,
            },
            "vit_giant_patch14_reg1_tipsv2": {
                "image_size": 448, "layer_scale": 1.0, "registers": 1, **_APE,
            },
        }.items()
    },
}  # fmt: skip
