"""The blocks of timm's live models and their rotary positions, as fields of ViTConfig."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

_ACTIVATIONS = {"GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "silu"}
_BLOCKS = {
    "Block": "before",
    "EvaBlock": "before",
    "ResPostBlock": "after",
    "EvaBlockPostNorm": "after",
}
_ATTENTIONS = ("Attention", "EvaAttention", "AttentionRope")
_MLPS = {"Mlp": "plain", "GluMlp": "swiglu", "SwiGLU": "swiglu_split"}


def absent(module: nn.Module | None) -> bool:
    """Whether there is nothing in a norm's place."""
    return module is None or isinstance(module, nn.Identity)


def refuse(message: str) -> NoReturn:
    raise ValueError(f"timm.config_of: {message}")


def norms_of(block: Any) -> list[Any]:
    """All norms of a block, and what stands in the place of one."""
    attn, mlp = block.attn, block.mlp
    inner = (getattr(attn, "norm", None), getattr(mlp, "norm", None))
    return [block.norm1, block.norm2, attn.q_norm, attn.k_norm, *inner]


def fields_of(block: Any, name: str) -> dict[str, Any]:
    """What a block says of the configuration; a ValueError names what is unsupported."""
    kind = type(block).__name__
    if kind not in _BLOCKS:
        refuse(f"{name} has a {kind}, expected a plain Block")
    if type(block.attn).__name__ not in _ATTENTIONS:
        refuse(f"{name} has a {type(block.attn).__name__}, expected a plain Attention")
    scales = [getattr(block, f"gamma_{i}", getattr(_part(block, f"ls{i}"), "gamma", None))
              for i in (1, 2)]  # fmt: skip
    if (scales[0] is None) != (scales[1] is None):
        refuse(f"{name} has one LayerScale, expected two or none")
    initial = getattr(_part(block, "ls1"), "init_values", getattr(block, "init_values", None))
    scaled = None if scales[0] is None else float(1e-5 if initial is None else initial)
    return {
        "norm_place": _BLOCKS[kind],
        "layer_scale": scaled,
        **_attention(block.attn, f"{name}.attn"),
        **_mlp(block.mlp, f"{name}.mlp"),
    }


def _part(module: Any, name: str) -> Any:
    return getattr(module, name, None)


def _attention(attn: Any, name: str) -> dict[str, Any]:
    if _part(attn, "gate") is not None:
        refuse(f"{name} has a gate, which is not supported")
    groups = _part(attn, "num_kv_heads")
    if groups not in (None, attn.num_heads):
        refuse(f"{name} shares keys and values among heads, which is not supported")
    _check_linear(attn.proj, f"{name}.proj")
    fields = {
        "heads": attn.num_heads,
        "qk_norm": not absent(attn.q_norm),
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
    act = type(mlp.act).__name__
    if act == "GELU":
        act = "gelu" if getattr(mlp.act, "approximate", "none") == "none" else "gelu_tanh"
    elif act not in _ACTIVATIONS:
        refuse(f"{name}.act is {act}, expected GELU (exact or tanh), QuickGELU or SiLU")
    act = _ACTIVATIONS.get(act, act)
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


def own_name(name: str) -> str:
    """vitkern's name of a parameter of timm's: the same, but for EVA's LayerScale."""
    return name.replace(".gamma_1", ".ls1.gamma").replace(".gamma_2", ".ls2.gamma")
