"""timm's keywords of a Vision Transformer, as fields of ViTConfig."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

from .config import ACTIVATIONS, ViTConfig

# timm's word for a field that takes the same value.
RENAMED = {
    "img_size": "image_size",
    "in_chans": "channels",
    "num_classes": "classes",
    "embed_dim": "width",
    "num_heads": "heads",
    "reg_tokens": "registers",
    "attn_pool_num_heads": "pool_heads",
    "init_values": "layer_scale",
    "dynamic_img_size": "dynamic_image_size",
    "drop_rate": "head_dropout",
    "pos_drop_rate": "dropout",
    "proj_drop_rate": "projection_dropout",
    "attn_drop_rate": "attention_dropout",
    "drop_path_rate": "drop_path",
}
# Those whose value is written in another way, and the field that they set.
_REWRITTEN = {
    "global_pool": "pool",
    "mlp_ratio": "mlp_width",
    "no_embed_class": "position_covers_prefix",
    "pos_embed": "position",
    "fc_norm": "final_norm",
    "act_layer": "activation",
    "norm_layer": "norm_eps",
}
POOLS = {"token": "token", "avg": "mean", "map": "map", "": "none"}
_POSITIONS = {"learn": "learned", "none": "none", "": "none"}
# Options that vitkern has not: only what they are in a plain model is taken.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "scale_attn_norm": (False,),
    "scale_mlp_norm": (False,),
    "proj_bias": (True,),
    "pool_include_prefix": (False,),
    "dynamic_img_pad": (False,),
    "patch_drop_rate": (0.0,),
    "embed_norm_layer": (None,),
    "fix_init": (False,),
    "weight_init": ("", "reset", "skip"),
    "block_fn": ("Block",),
    "mlp_layer": ("Mlp",),
    "attn_layer": ("Attention", "", "attn"),
    "embed_layer": ("PatchEmbed",),
}


def fields(given: Mapping[str, Any], base: ViTConfig) -> dict[str, Any]:
    """Changes of `base` in ViTConfig's words, out of `given` in those or timm's.

    A keyword beside the field that it stands for is an error, as is an option that vitkern lacks.
    """
    for word in given:
        field = RENAMED.get(word) or _REWRITTEN.get(word)
        both_timms = field == "final_norm" and isinstance(given.get(field), bool)
        if field in given and not both_timms:
            raise TypeError(f"ViT: {word} is timm's word for {field}; give one of the two")
    changes: dict[str, Any] = {}
    for word, value in given.items():
        if word in _PLAIN:
            _check_plain(word, value)
        elif word not in _REWRITTEN and not (word == "final_norm" and isinstance(value, bool)):
            changes[RENAMED.get(word, word)] = value
    patch = changes.get("patch_size")
    if isinstance(patch, (tuple, list)) and len({*patch}) == 1:
        changes["patch_size"] = patch[0]
    _rewrite(given, base, changes)
    return changes


def _rewrite(given: Mapping[str, Any], base: ViTConfig, changes: dict[str, Any]) -> None:
    width = changes.get("width", base.width)
    if "mlp_ratio" in given:
        changes["mlp_width"] = int(width * given["mlp_ratio"])
    elif "embed_dim" in given and "mlp_width" not in given:  # timm keeps the ratio
        changes["mlp_width"] = int(width * (base.mlp_width / base.width))
    if "no_embed_class" in given:
        changes["position_covers_prefix"] = not given["no_embed_class"]
    if "pos_embed" in given:
        changes["position"] = _chosen("pos_embed", given["pos_embed"], _POSITIONS)
    if "global_pool" in given:
        changes["pool"] = _chosen("global_pool", given["global_pool"], POOLS)
    if {"global_pool", "fc_norm", "final_norm"} & given.keys() and "final_norm" not in changes:
        changes["final_norm"] = _final_norm(given, base, changes.get("pool", base.pool))
    if given.get("act_layer") is not None:
        changes["activation"] = _activation(given["act_layer"])
    if given.get("norm_layer") is not None:
        changes["norm_eps"] = _eps(given["norm_layer"])


def _final_norm(given: Mapping[str, Any], base: ViTConfig, pool: str) -> str:
    """Where timm puts the last norm: after pooling if that is a mean, unless fc_norm says else."""
    if not given.get("final_norm", base.final_norm != "none"):
        return "none"
    after = given.get("fc_norm")
    if after is None:
        usual = base.final_norm == ("after_pool" if base.pool == "mean" else "before_pool")
        chosen = "fc_norm" not in given and base.final_norm != "none" and not usual
        after = base.final_norm == "after_pool" if chosen else pool == "mean"
    return "after_pool" if after else "before_pool"


def _chosen(word: str, value: Any, known: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in known:
        choices = ", ".join(map(repr, known))
        _refuse(f"{word} must be one of {choices}, not {value!r:.80}")
    return known[value]


def _activation(layer: Any) -> str:
    """The activation that a timm name or a class of torch's or timm's stands for."""
    if isinstance(layer, str) and layer in ACTIVATIONS:
        return layer
    keywords: Mapping[str, Any] = {}
    if isinstance(layer, functools.partial):
        layer, keywords = layer.func, layer.keywords
    name = getattr(layer, "__name__", "")
    tanh = name == "GELUTanh" or keywords.get("approximate") == "tanh"
    if name in ("GELU", "GELUTanh") and not keywords.keys() - {"approximate"}:
        return "gelu_tanh" if tanh else "gelu"
    if name == "QuickGELU":
        return "quick_gelu"
    _refuse(f"act_layer must be a GELU (exact, tanh or quick), not {layer!r:.80}")


def _eps(layer: Any) -> float:
    """The eps of a LayerNorm, given as timm's name of it, as a class or as a partial of one."""
    keywords: Mapping[str, Any] = {}
    if isinstance(layer, functools.partial):
        layer, keywords = layer.func, layer.keywords
    name = str(layer if isinstance(layer, str) else getattr(layer, "__name__", layer)).lower()
    if name != "layernorm" or keywords.keys() - {"eps"}:
        _refuse(f"norm_layer must be a LayerNorm with weight and bias, not {layer!r:.80}")
    torchs = getattr(layer, "__module__", "").startswith("torch")
    return float(keywords.get("eps", 1e-5 if torchs else 1e-6))  # the defaults of torch and timm


def _check_plain(word: str, value: Any) -> None:
    kind = getattr(value, "__name__", value)
    if not any(kind is plain or kind == plain for plain in (*_PLAIN[word], None)):
        shown = " or ".join(repr(plain) for plain in _PLAIN[word])
        _refuse(f"{word}={value!r:.80} is not supported; it must be {shown}")


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"ViT: {message}")
