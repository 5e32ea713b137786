"""The blocks of timm's live models and their rotary positions, as fields of ViTConfig."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

_ACTIVATIONS = {"GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "silu"}
_BLOCKS = {
    "Block": "pre_norm", "RelPosBlock": "pre_norm", "EvaBlock": "pre_norm",
    "ResPostBlock": "post_norm", "ResPostRelPosBlock": "post_norm", "EvaBlockPostNorm": "post_norm",
    "ParallelScalingBlock": "parallel", "ParallelThingsBlock": "twin",
}  # fmt: skip
_ATTENTIONS = ("Attention", "RelPosAttention", "EvaAttention", "AttentionRope")
_MLPS = {"Mlp": "plain", "GluMlp": "swiglu", "SwiGLU": "swiglu_split"}


def absent(module: nn.Module | None) -> bool:
    """Whether there is nothing in a norm's place."""
    return module is None or isinstance(module, nn.Identity)


def refuse(message: str) -> NoReturn:
    raise ValueError(f"timm.config_of: {message}")


def fields_of(block: Any, name: str) -> dict[str, Any]:
    """What a block says of the configuration; a ValueError names what is unsupported."""
    kind = type(block).__name__
    if kind not in _BLOCKS:
        refuse(f"{name} is a {kind}, expected one of {', '.join(_BLOCKS)}")
    if _BLOCKS[kind] == "parallel":
        return _parallel(block, name)
    if _BLOCKS[kind] == "twin":
        if len(block.attns) != 2:
            refuse(f"{name} has {len(block.attns)} parallel branches, expected 2")
        pairs = zip(block.attns, block.ffns, strict=True)
        one, two = [_branches(a.attn, f.mlp, (_gamma(a.ls), _gamma(f.ls)), f"{name} ({i})")
                    for i, (a, f) in enumerate(pairs)]  # fmt: skip
        if one != two:
            refuse(f"{name} has branches that differ: {one} and {two}")
        return {"block": "twin", **one, "layer_scale": _initial(block.attns[0].ls)}
    scales = [_part(block, f"gamma_{i}", _gamma(_part(block, f"ls{i}"))) for i in (1, 2)]
    found = {"block": _BLOCKS[kind], **_branches(block.attn, block.mlp, scales, name)}
    if _BLOCKS[kind] == "post_norm":
        first = _part(block, "init_values")
        return {**found, "layer_scale": float(first) if first else None}
    if scales[0] is None:
        return {**found, "layer_scale": None}
    return {**found, "layer_scale": _initial(_part(block, "ls1", block))}


def _branches(attn: Any, mlp: Any, scales: Sequence[Any], name: str) -> dict[str, Any]:
    """What attention and MLP of a block are."""
    if type(attn).__name__ not in _ATTENTIONS:
        refuse(f"{name}.attn is a {type(attn).__name__}, expected a plain Attention")
    if (scales[0] is None) != (scales[1] is None):
        refuse(f"{name} has one LayerScale, expected two or none")
    return {**_attention(attn, f"{name}.attn"), **_mlp(mlp, f"{name}.mlp")}


def _parallel(block: Any, name: str) -> dict[str, Any]:
    if block.attn_out_proj is None or block.attn_out_proj.bias is None:
        refuse(f"{name} has one projection for both branches, or no bias, which is not supported")
    return {
        "block": "parallel",
        "heads": block.num_heads,
        "mlp_width": block.mlp_out_proj.in_features,
        "qkv_bias": block.in_proj.bias is not None,
        "qk_norm": not absent(block.q_norm),
        "layer_scale": _initial(block.ls),
        "activation": _activation(block.mlp_act, name),
        "attention_dropout": block.attn_drop.p,
        "projection_dropout": block.mlp_drop.p,
    }


def _gamma(scale: Any) -> Any:
    return _part(scale, "gamma")


def _initial(scale: Any) -> float | None:
    """The value that a LayerScale began with; None where there is an Identity in its place."""
    if isinstance(scale, nn.Identity):
        return None
    first = _part(scale, "init_values")
    return 1e-5 if first is None else float(first)


def _part(module: Any, name: str, otherwise: Any = None) -> Any:
    return getattr(module, name, otherwise)


def _attention(attn: Any, name: str) -> dict[str, Any]:
    if _part(attn, "gate") is not None:
        refuse(f"{name} has a gate, which is not supported")
    groups = _part(attn, "num_kv_heads")
    if groups not in (None, attn.num_heads):
        refuse(f"{name} shares keys and values among heads, which is not supported")
    _check_linear(attn.proj, f"{name}.proj")
    fields = {
        "heads": attn.num_heads,
        "qk_norm": not absent(_part(attn, "q_norm")),
        "attention_norm": not absent(_part(attn, "norm")),
        "attention_dropout": attn.attn_drop.p,
        "projection_dropout": attn.proj_drop.p,
    }
    width = attn.proj.in_features
    if width != attn.proj.out_features or width % attn.num_heads:
        refuse(f"{name} has heads of another width than the rows, which is not supported")
    if attn.qkv is not None:
        _check_linear(attn.qkv, f"{name}.qkv", bias=None)
        no_key = _part(attn, "q_bias") is not None
        biased = no_key or attn.qkv.bias is not None
        return {**fields, "qkv_bias": biased, "key_bias": not no_key, "separate_qkv": False}
    biases = []
    for part in ("q_proj", "k_proj", "v_proj"):
        _check_linear(getattr(attn, part), f"{name}.{part}", bias=None)
        biases.append(getattr(attn, part).bias is not None)
    if biases[0] != biases[2]:
        refuse(f"{name} has a bias of queries or of values alone, which is not supported")
    key_bias = biases[1] or not biases[0]
    return {**fields, "qkv_bias": biases[0], "key_bias": key_bias, "separate_qkv": True}


def _mlp(mlp: Any, name: str) -> dict[str, Any]:
    kind = _MLPS.get(type(mlp).__name__)
    if kind is None:
        refuse(f"{name} is a {type(mlp).__name__}, expected {', '.join(_MLPS)}")
    act = _activation(mlp.act, name)
    if kind != "plain" and (act != "silu" or _part(mlp, "gate_last")):
        refuse(f"{name} is gated otherwise than by silu(first half), which is not supported")
    first = ("fc1_g", "fc1_x") if kind == "swiglu_split" else ("fc1",)
    for part in (*first, "fc2"):
        _check_linear(getattr(mlp, part), f"{name}.{part}")
    return {
        "mlp": kind,
        "mlp_width": mlp.fc2.in_features,
        "mlp_norm": not absent(_part(mlp, "norm")),
        "activation": act,
    }


def _activation(module: nn.Module, name: str) -> str:
    act = type(module).__name__
    if act == "GELU":
        return "gelu" if getattr(module, "approximate", "none") == "none" else "gelu_tanh"
    if act not in _ACTIVATIONS:
        refuse(f"{name} has the activation {act}, expected GELU, its tanh form, QuickGELU or SiLU")
    return _ACTIVATIONS[act]


def _check_linear(linear: Any, name: str, bias: bool | None = True) -> None:
    if type(linear) is not nn.Linear:
        refuse(f"{name} is a {type(linear).__name__}, expected nn.Linear")
    if bias and linear.bias is None:
        refuse(f"{name} without a bias is not supported")


def rope_fields(model: Any) -> dict[str, Any]:
    """Those of a model's rotary positions; {} without them."""
    rope = getattr(model, "rope", None)
    if rope is None:
        return {}
    kind = type(rope).__name__.removeprefix("RotaryEmbedding")
    if kind not in ("Cat", "Mixed", "DinoV3"):
        refuse(f"{type(rope).__name__} is not supported")
    for i, block in enumerate(model.blocks):
        if block.attn.num_prefix_tokens != model.num_prefix_tokens:
            refuse(f"blocks.{i}.attn turns other rows than those of the patches")
    half = bool(getattr(model.blocks[0].attn, "rotate_half", False))
    if half != bool(getattr(rope, "rotate_half", False)):
        refuse("rotary positions of two layouts (rotate_half) are not supported")
    fields: dict[str, Any] = {"rope_temperature": float(rope.temperature), "rope_half": half}
    if kind == "DinoV3":
        if rope.aug_active:
            refuse("rotary positions that are changed at random in training are not supported")
        if rope.normalize_coords != "separate" or rope.min_period or rope.max_period:
            refuse("DINOv3's rotary positions with other places or periods are not supported")
        return {**fields, "rope": "dinov3", "rope_offset": float(rope.grid_offset)}
    fields["rope_x_first"] = rope.grid_indexing == "xy"
    if kind == "Mixed":
        return {**fields, "rope": "mixed"}
    if rope.in_pixels:
        refuse("rotary positions in pixels are not supported")
    grid = rope.ref_feat_shape
    fields["rope_grid"] = None if grid is None else tuple(grid)
    return {**fields, "rope": "axial", "rope_offset": float(rope.grid_offset)}
