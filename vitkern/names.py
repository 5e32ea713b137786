"""The names of the usual Vision Transformers: short ones ("B/16") and timm's.

A timm name is a row of TIMM, or of family_names.ROWS, (what comes before the image size) and a
size; it stands for the first
of the name's pretrained tags, so the number of classes is that one's.
"""

from __future__ import annotations

from typing import Any

from . import family_names
from .names_rotary import WHOLE as ROTARY

Fields = dict[str, Any]  # of ViTConfig

# name: (width D, depth, heads H, MLP width F), from the ViT paper, DeiT (Ti) and Scaling ViT (g)
VARIANTS = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
}
PATCHES = (8, 14, 16, 32)

# The same for the second word of a timm name.
TIMM_WORDS = {
    "tiny": VARIANTS["Ti"],
    "wee": (256, 14, 4, 1280),
    "xsmall": (256, 10, 4, 1024),
    "little": (320, 14, 5, 1792),
    "small": VARIANTS["S"],
    "medium": (512, 12, 8, 2048),
    "mediumd": (512, 20, 8, 2048),
    "betwixt": (640, 12, 10, 2560),
    "base": VARIANTS["B"],
    "so150m": (896, 18, 14, 2304),
    "so150m2": (832, 21, 13, 2176),
    "large": VARIANTS["L"],
    "intern300m": VARIANTS["L"],
    "so400m": (1152, 27, 16, 4304),
    "huge": VARIANTS["H"],
    "giant": VARIANTS["g"],
    "giantopt": (1536, 40, 16, 6144),
    "gigantic": (1664, 48, 16, 8192),
}
# Words that go with every patch.
_PLAIN = ("tiny", "small", "base", "large", "huge", "giant")

# What families change about the plain ViT.
_NO_HEAD: Fields = {"classes": 0}
_DEIT3: Fields = {"layer_scale": 1e-6, "position_covers_prefix": False}
_DINOV2: Fields = {"image_size": 518, "layer_scale": 1e-5, "classes": 0}
_DINOV2_REG4: Fields = {**_DINOV2, "registers": 4, "position_covers_prefix": False}
_TIPS: Fields = {**_DINOV2_REG4, "image_size": 448, "registers": 1, "layer_scale": 1.0}
_CLIP: Fields = {"pre_norm": True, "norm_eps": 1e-5}
_QUICK: Fields = {**_CLIP, "activation": "quick_gelu"}
_MEAN: Fields = {"class_token": False, "pool": "mean"}
_MEAN_NO_HEAD: Fields = {**_MEAN, "classes": 0}
_MEAN_SCALED: Fields = {**_MEAN, "qkv_bias": False, "layer_scale": 1e-6}
_SIGLIP: Fields = _MEAN_NO_HEAD
_SIGLIP2: Fields = {**_MEAN_NO_HEAD, "activation": "gelu_tanh"}
_PLUS: Fields = {"width": 896, "heads": 14, "mlp_width": 3584}
# Kind and family of names that are taken with every plain word and patch.
_ANY_SIZE: dict[tuple[str, str], Fields] = {
    ("vit", ""): {},
    ("vit", "clip"): _CLIP,
    ("vit", "clip_quickgelu"): _QUICK,
    ("deit", ""): {},
    ("deit3", ""): _DEIT3,
}


def _registers(count: int, **changes: Any) -> Fields:
    """Registers instead of a class token, the mean of the patches, and the norm after it."""
    fields = {**_MEAN, "registers": count, "final_norm": "after_pool", "layer_scale": 1e-5}
    return {**fields, "position_covers_prefix": False, **changes}


def _clip(embedding: int, **changes: Any) -> Fields:
    return {**_CLIP, "classes": embedding, **changes}


# The name before its size: what it changes, and the sizes that timm has (none: the size is not part
# of the name). Other multiples of the patch are taken, too.
TIMM: dict[str, tuple[Fields, tuple[int, ...]]] = {
    "vit_tiny_patch16": ({}, (224, 384)),
    "vit_small_patch8": (_NO_HEAD, (224,)),
    "vit_small_patch16": ({}, (224, 384)),
    "vit_small_patch16_36x1": ({"depth": 36, "layer_scale": 1e-5}, (224,)),
    "vit_small_patch32": ({}, (224, 384)),
    "vit_base_patch8": ({}, (224,)),
    "vit_base_patch16": ({}, (224, 384)),
    "vit_base_patch16_gap": ({**_MEAN, "heads": 16}, (224,)),
    "vit_base_patch16_plus": ({**_PLUS, "layer_scale": 1e-5}, (240,)),
    "vit_base_patch32": ({}, (224, 384)),
    "vit_base_patch32_plus": ({**_PLUS, "layer_scale": 1e-5}, (256,)),
    "vit_large_patch14": ({}, (224,)),
    "vit_large_patch16": ({}, (224, 384)),
    "vit_large_patch32": ({}, (224, 384)),
    "vit_huge_patch14": (_NO_HEAD, (224,)),
    "vit_huge_patch14_gap": (_MEAN_NO_HEAD, (224,)),
    "vit_huge_patch16_gap": (_MEAN_NO_HEAD, (448,)),
    "vit_giant_patch14": ({}, (224,)),
    "vit_giant_patch16_gap": (_MEAN_NO_HEAD, (224,)),
    "vit_gigantic_patch14": ({}, (224,)),
    "vit_intern300m_patch14": (
        {"classes": 0, "layer_scale": 0.1, "final_norm": "none", "dynamic_image_size": True},
        (448,),
    ),
    "deit_tiny_patch16": ({}, (224,)),
    "deit_small_patch16": ({}, (224,)),
    "deit_base_patch16": ({}, (224, 384)),
    "deit3_small_patch16": (_DEIT3, (224, 384)),
    "deit3_medium_patch16": (_DEIT3, (224,)),
    "deit3_base_patch16": (_DEIT3, (224, 384)),
    "deit3_large_patch16": (_DEIT3, (224, 384)),
    "deit3_huge_patch14": (_DEIT3, (224,)),
    **{f"vit_{word}_patch14_dinov2": (_DINOV2, ()) for word in ("small", "base", "large")},
    **{
        f"vit_{word}_patch14_reg4_dinov2": (_DINOV2_REG4, ()) for word in ("small", "base", "large")
    },
    **{f"vit_{word}_patch14_reg1_tipsv2": (_TIPS, ()) for word in ("base", "large", "so400m")},
    "vit_xsmall_patch16_clip": (_clip(512), (224,)),
    "vit_medium_patch16_clip": (_clip(512), (224,)),
    "vit_medium_patch32_clip": (_clip(512), (224,)),
    "vit_betwixt_patch32_clip": (_clip(512), (224,)),
    "vit_base_patch16_clip": (_CLIP, (224, 384)),
    "vit_base_patch16_clip_quickgelu": ({**_QUICK, "classes": 512}, (224,)),
    "vit_base_patch16_plus_clip": (_clip(640, **_PLUS), (240,)),
    "vit_base_patch32_clip": (_CLIP, (224, 256, 384, 448)),
    "vit_base_patch32_clip_quickgelu": ({**_QUICK, "classes": 512}, (224,)),
    "vit_large_patch14_clip": (_CLIP, (224, 336)),
    "vit_large_patch14_clip_quickgelu": ({**_QUICK, "classes": 768}, (224, 336)),
    "vit_huge_patch14_clip": (_CLIP, (224, 336, 378)),
    "vit_huge_patch14_clip_quickgelu": ({**_QUICK, "classes": 1024}, (224, 378)),
    "vit_giant_patch14_clip": (_clip(1024), (224,)),
    "vit_gigantic_patch14_clip": (_clip(1280), (224, 378)),
    "vit_gigantic_patch14_clip_quickgelu": ({**_QUICK, "classes": 1280}, (224,)),
    "vit_base_patch16_siglip_gap": (_SIGLIP, (224, 256, 384, 512)),
    "vit_base_patch32_siglip_gap": (_SIGLIP2, (256,)),
    "vit_large_patch16_siglip_gap": (_SIGLIP, (256, 384, 512)),
    "vit_so400m_patch14_siglip_gap": (_SIGLIP, (224, 378, 384, 448, 896)),
    "vit_so400m_patch16_siglip_gap": (_SIGLIP2, (256, 384, 512)),
    "vit_giantopt_patch16_siglip_gap": (_SIGLIP2, (256, 384)),
    "vit_medium_patch16_gap": (_MEAN_SCALED, (240, 256, 384)),
    "vit_betwixt_patch16_gap": (_MEAN_SCALED, (256,)),
    "vit_wee_patch16_reg1_gap": (_registers(1), (256,)),
    "vit_little_patch16_reg1_gap": (_registers(1), (256,)),
    "vit_little_patch16_reg4_gap": (_registers(4), (256,)),
    "vit_medium_patch16_reg1_gap": (_registers(1), (256,)),
    "vit_medium_patch16_reg4_gap": (_registers(4), (256,)),
    "vit_mediumd_patch16_reg4_gap": (_registers(4), (256, 384)),
    "vit_betwixt_patch16_reg1_gap": (_registers(1), (256,)),
    "vit_betwixt_patch16_reg4_gap": (_registers(4), (256, 384)),
    "vit_base_patch16_reg4_gap": (_registers(4, layer_scale=None), (256,)),
    "vit_so150m_patch16_reg4_gap": ({**_MEAN, "registers": 4}, (256, 384)),
    "vit_so150m2_patch16_reg1_gap": (
        _registers(1, qkv_bias=False, position_covers_prefix=True),
        (256, 384, 448),
    ),
}
# Names whose first pretrained tag has other classes, or another activation, than its row.
_ODD: dict[str, Fields] = {
    "vit_large_patch32_224": {"classes": 0},
    "vit_base_patch32_clip_256": {"classes": 512},
    "vit_huge_patch14_clip_378": {"classes": 1024},
    "vit_medium_patch16_gap_240": {"classes": 11821},
    "vit_large_patch16_siglip_gap_512": {"activation": "gelu_tanh"},
    **family_names.ODD,
}
# Names that are not made of a word, a patch and a size.
_WHOLE: dict[str, tuple[str, Fields]] = {
    "vit_base_patch16_224_miil": ("base", {"classes": 11221, "qkv_bias": False}),
    **{
        f"flexivit_{word}": (word, {"image_size": 240, "position_covers_prefix": False})
        for word in ("small", "base", "large")
    },
}


def usual() -> list[str]:
    """The names of the plain models at their usual sizes: short ones first, then timm's."""
    short = [f"{v}/{p}" for v in VARIANTS for p in PATCHES]
    plain = [
        f"vit_{word}_patch{p}_{size}"
        for word in _PLAIN
        for p in PATCHES
        for size in (224, 384)
        if size % p == 0
    ]
    deit = [f"deit_{w}_patch16_{s}" for w in ("tiny", "small", "base") for s in (224, 384)]
    deit += [f"deit3_{w}_patch16_{s}" for w in ("small", "base", "large") for s in (224, 384)]
    dinov2 = [
        f"vit_{w}_patch14_{r}dinov2" for w in ("small", "base", "large") for r in ("", "reg4_")
    ]
    clip = ["vit_base_patch32_clip_224", "vit_base_patch16_clip_224", "vit_large_patch14_clip_224"]
    return short + plain + deit + dinov2 + clip


def timm_names() -> list[str]:
    """Every name of timm's that is known, as timm writes it."""
    sized = [f"{stem}_{size}" for stem, (_, sizes) in TIMM.items() for size in sizes]
    sized += [f"{stem}_{size}" for stem, row in family_names.ROWS.items() for size in row[3]]
    bare = (stem for stem, (_, sizes) in TIMM.items() if not sizes)
    return sorted([*sized, *bare, *_WHOLE, *ROTARY])


def fields_of(name: str) -> Fields | None:
    """The fields of ViTConfig that a name stands for; None: it is not known."""
    return _short(name) or _timm(name)


def _of_sizes(sizes: tuple[int, int, int, int], patch: int) -> Fields:
    fields = dict(zip(("width", "depth", "heads", "mlp_width"), sizes, strict=True))
    return {**fields, "patch_size": patch}


def _short(name: str) -> Fields | None:
    variant, _, patch = name.removeprefix("ViT-").partition("/")
    if variant not in VARIANTS or patch not in map(str, PATCHES):
        return None
    return _of_sizes(VARIANTS[variant], int(patch))


def _timm(name: str) -> Fields | None:
    name = name.removeprefix("timm/").partition(".")[0]  # of "timm/name.pretrained_tag"
    if name in ROTARY:
        return dict(ROTARY[name])
    if name in _WHOLE:
        word, changes = _WHOLE[name]
        return _of_sizes(TIMM_WORDS[word], 16) | changes
    stem, _, last = name.rpartition("_")
    size = int(last) if last.isascii() and last.isdigit() and len(last) < 10 else 0
    if stem in family_names.ROWS and size:
        word, p, changes, _ = family_names.ROWS[stem]
        fields = _of_sizes(TIMM_WORDS[word], p) | changes | {"image_size": size}
        return fields | _ODD.get(name, {})
    row = _row(stem if size else name)
    if row is None:
        return None
    _, word, patch = (stem if size else name).split("_")[:3]
    fields = _of_sizes(TIMM_WORDS[word], int(patch.removeprefix("patch"))) | row
    if size:
        fields["image_size"] = size
    fields |= _ODD.get(name, {})
    whole = fields.get("image_size", 224) % fields["patch_size"] == 0
    return fields if whole or fields.get("crop") else None


def _row(stem: str) -> Fields | None:
    """What a name without its size changes: a row, or a plain, DeiT or CLIP model of any size."""
    if stem in TIMM:
        return TIMM[stem][0]
    kind, _, rest = stem.partition("_")
    word, _, rest = rest.partition("_")
    patch, _, family = rest.partition("_")
    known = word in _PLAIN and patch in {f"patch{p}" for p in PATCHES}
    return _ANY_SIZE.get((kind, family)) if known else None
