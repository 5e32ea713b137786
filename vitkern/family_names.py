"""timm's names of models that are more than a plain ViT: pools, heads, positions, blocks, stems.

A row is what comes before the image size, the word of names.TIMM_WORDS whose sizes it has, the
patch, what it changes, and the sizes that timm has.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]  # of ViTConfig
Row = tuple[str, int, Fields, tuple[int, ...]]

_MAP: Fields = {"class_token": False, "pool": "map"}
_SIGLIP: Fields = {**_MAP, "classes": 0}
_SIGLIP2: Fields = {**_SIGLIP, "activation": "gelu_tanh"}
_MEAN: Fields = {"class_token": False, "pool": "mean"}
_RELATIVE: Fields = {"position": "relative_mlp", "layer_scale": 1e-6, "qkv_bias": False}
_REL_MEAN: Fields = {**_RELATIVE, **_MEAN}
_REL_AFTER: Fields = {**_REL_MEAN, "final_norm": "after_pool"}
_REL_POST: Fields = {**_REL_MEAN, "block": "post_norm"}
_SHARED: Fields = {**_REL_MEAN, "position": "shared_relative_mlp"}
_PLUS: Fields = {"width": 896, "heads": 14, "mlp_width": 3584, "qkv_bias": True}
_BEIT: Fields = {
    "pool": "mean", "final_norm": "after_pool", "position": "relative", "key_bias": False,
    "layer_scale": 1e-5,
}  # fmt: skip
_PARALLEL: Fields = {
    "block": "parallel", "norm": "rmsnorm", "qkv_bias": False, "qk_norm": True, "pre_norm": True,
    "position_covers_prefix": False,
}  # fmt: skip
_SHALLOW: Fields = {"depth": 8, "heads": 8, "mlp_width": 2304}
_TWIN: Fields = {"depth": 18, "block": "twin", "layer_scale": 1e-5}
_DISTILLED: Fields = {"head": "distilled"}


def _stem(name: str, **changes: Any) -> Fields:
    return {"stem": name, **changes}


ROWS: dict[str, Row] = {
    "beit_base_patch16": ("base", 16, {**_BEIT, "layer_scale": 0.1}, (224, 384)),
    "beit_large_patch16": ("large", 16, _BEIT, (224, 384, 512)),
    "beitv2_base_patch16": ("base", 16, _BEIT, (224,)),
    "beitv2_large_patch16": ("large", 16, _BEIT, (224,)),
    "deit_tiny_distilled_patch16": ("tiny", 16, _DISTILLED, (224,)),
    "deit_small_distilled_patch16": ("small", 16, _DISTILLED, (224,)),
    "deit_base_distilled_patch16": ("base", 16, _DISTILLED, (224, 384)),
    "vit_base_patch16_siglip": ("base", 16, _SIGLIP, (224, 256, 384, 512)),
    "vit_base_patch32_siglip": ("base", 32, _SIGLIP2, (256,)),
    "vit_large_patch16_siglip": ("large", 16, _SIGLIP, (256, 384, 512)),
    "vit_so400m_patch14_siglip": ("so400m", 14, _SIGLIP, (224, 378, 384)),
    "vit_so400m_patch16_siglip": ("so400m", 16, _SIGLIP2, (256, 384, 512)),
    "vit_giantopt_patch16_siglip": ("giantopt", 16, _SIGLIP2, (256, 384)),
    "vit_so150m_patch16_reg4_map": ("so150m", 16, {**_MAP, "registers": 4}, (256,)),
    "vit_base_patch16_rpn": (
        "base", 16,
        {**_MEAN, "block": "post_norm", "qkv_bias": False, "layer_scale": 1e-5,
         "final_norm": "after_pool"},
        (224,),
    ),
    "vit_small_patch16_18x2": ("small", 16, _TWIN, (224,)),
    "vit_base_patch16_18x2": ("base", 16, _TWIN, (224,)),
    "vit_base_patch16_xp": ("base", 16, _PARALLEL, (224,)),
    "vit_large_patch14_xp": ("large", 14, _PARALLEL, (224,)),
    "vit_huge_patch14_xp": ("huge", 14, _PARALLEL, (224,)),
    "vit_pwee_patch16_reg1_gap": (
        "wee", 16,
        {**_MEAN, "block": "parallel", "depth": 16, "registers": 1, "layer_scale": 1e-5,
         "final_norm": "after_pool", "position_covers_prefix": False},
        (256,),
    ),
    "vit_relpos_small_patch16": ("small", 16, _REL_AFTER, (224,)),
    "vit_relpos_medium_patch16": ("medium", 16, _REL_AFTER, (224,)),
    "vit_relpos_base_patch16": ("base", 16, _REL_AFTER, (224,)),
    "vit_relpos_medium_patch16_cls": ("medium", 16, {**_RELATIVE, "relative_width": 256}, (224,)),
    "vit_relpos_base_patch16_cls": ("base", 16, _RELATIVE, (224,)),
    "vit_relpos_base_patch16_clsgap": ("base", 16, {**_REL_AFTER, "class_token": True}, (224,)),
    "vit_relpos_base_patch16_plus": ("base", 16, {**_REL_MEAN, **_PLUS}, (240,)),
    "vit_relpos_small_patch16_rpn": ("small", 16, _REL_POST, (224,)),
    "vit_relpos_medium_patch16_rpn": ("medium", 16, _REL_POST, (224,)),
    "vit_relpos_base_patch16_rpn": ("base", 16, _REL_POST, (224,)),
    "vit_relpos_base_patch32_plus_rpn": ("base", 32, {**_REL_POST, **_PLUS}, (256,)),
    "vit_srelpos_small_patch16": ("small", 16, {**_SHARED, "relative_width": 384}, (224,)),
    "vit_srelpos_medium_patch16": ("medium", 16, {**_SHARED, "relative_width": 512}, (224,)),
    "vit_tiny_r_s16_p8": ("tiny", 8, _stem("r"), (224, 384)),
    "vit_small_r26_s32": ("small", 1, _stem("r26_s32"), (224, 384)),
    "vit_base_r26_s32": ("base", 1, _stem("r26_s32"), (224,)),
    "vit_base_r50_s16": ("base", 1, _stem("r50"), (224, 384)),
    "vit_large_r50_s32": ("large", 1, _stem("r50_s32"), (224, 384)),
    "vit_small_resnet26d": ("base", 1, _stem("resnet26d", **_SHALLOW), (224,)),
    "vit_small_resnet50d_s16": ("base", 1, _stem("resnet50d_s16", **_SHALLOW), (224,)),
    "vit_base_resnet26d": ("base", 1, _stem("resnet26d"), (224,)),
    "vit_base_resnet50d": ("base", 1, _stem("resnet50d"), (224,)),
    "vit_base_mci": (
        "base", 2, _stem("mci", classes=512, position_covers_prefix=False), (224,),
    ),
}  # fmt: skip
# Names whose first pretrained tag has other classes or another activation, or whose patches leave
# pixels over.
ODD: dict[str, Fields] = {
    "vit_base_r50_s16_224": {"classes": 0},
    "vit_large_patch16_siglip_512": {"activation": "gelu_tanh"},
    "vit_so400m_patch14_siglip_384": {"crop": True},
    "vit_so400m_patch14_siglip_gap_384": {"crop": True},
}
