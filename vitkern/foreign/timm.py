"""timm's live models: what their configuration is, or why vitkern cannot express it.

timm itself is never imported: its models are recognised by what they have.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from ..config import ViTConfig

_ACTIVATIONS = {"GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
_POOLS = {"token": "token", "avg": "mean", "": "none"}


def config_of(model: nn.Module) -> ViTConfig:
    """The configuration of a timm VisionTransformer; a ValueError names what is unsupported."""
    return _config(model)


def _config(model: Any) -> ViTConfig:
    """`config_of` of what a foreign class has: its attributes are looked for, not declared."""
    kind = type(model).__name__
    if kind != "VisionTransformer" or not hasattr(model, "blocks"):
        _refuse(f"a {kind} is not a timm VisionTransformer")
    if getattr(model, "rope", None) is not None:
        _refuse("rotary positions are not supported")
    if getattr(model, "attn_pool", None) is not None:
        _refuse("attention pooling (map, prr) is not supported")
    if not len(model.blocks):
        _refuse("the model has no blocks")
    if type(model.head) not in (nn.Linear, nn.Identity):
        _refuse(f"the head is a {type(model.head).__name__}, expected a Linear or none")
    proj, blocks = _patch_projection(model), _blocks(model)
    class_token, registers = model.cls_token is not None, int(model.num_reg_tokens)
    return ViTConfig(
        image_size=tuple(model.patch_embed.img_size),
        patch_size=proj.kernel_size[0],
        channels=proj.in_channels,
        width=model.embed_dim,
        depth=len(model.blocks),
        classes=model.head.out_features if isinstance(model.head, nn.Linear) else 0,
        class_token=class_token,
        registers=registers,
        pool=_pool(model, class_token or registers > 0),
        position="none" if model.pos_embed is None else "learned",
        position_covers_prefix=not model.no_embed_class,
        dynamic_image_size=bool(model.dynamic_img_size),
        dropout=model.pos_drop.p,
        head_dropout=model.head_drop.p,
        drop_path=float(getattr(model.blocks[-1].drop_path1, "drop_prob", 0.0)),
        **_norms(model),
        **blocks,
        **_pixels(model, proj.in_channels),
    )


def _patch_projection(model: Any) -> nn.Conv2d:
    embed = model.patch_embed
    proj = getattr(embed, "proj", None)
    if type(embed).__name__ != "PatchEmbed" or type(proj) is not nn.Conv2d:
        _refuse(f"patch_embed is a {type(embed).__name__}, expected a plain patch projection")
    if len({*proj.kernel_size, *proj.stride}) != 1:
        _refuse(f"patches {proj.kernel_size}, stride {proj.stride} are not square and adjacent")
    if not _absent(embed.norm) or getattr(embed, "dynamic_img_pad", False):
        _refuse("a norm inside patch_embed and dynamic_img_pad are not supported")
    if not _absent(model.patch_drop):
        _refuse("patch dropout is not supported")
    if (proj.bias is None) != (not _absent(model.norm_pre)):
        _refuse("the patch projection has a bias exactly when there is no norm_pre")
    return proj


def _pool(model: Any, prefix: bool) -> str:
    if model.global_pool not in _POOLS:
        _refuse(f"global_pool={model.global_pool!r} is not supported: token, avg or none")
    if model.global_pool == "avg" and prefix and getattr(model, "pool_include_prefix", False):
        _refuse("mean pooling over class and register tokens is not supported")
    return _POOLS[model.global_pool]


def _norms(model: Any) -> dict[str, Any]:
    places = [n for n in ("norm", "fc_norm") if not _absent(getattr(model, n))]
    if len(places) > 1:
        _refuse("norm and fc_norm together are not supported")
    names = {"norm": "before_pool", "fc_norm": "after_pool"}
    return {
        "final_norm": names[places[0]] if places else "none",
        "pre_norm": not _absent(model.norm_pre),
        "norm_eps": _eps(model),
    }


def _eps(model: Any) -> float:
    norms = [model.norm, model.fc_norm, model.norm_pre]
    for block in model.blocks:
        norms += [block.norm1, block.norm2, block.attn.q_norm, block.attn.k_norm]
    found = set()
    for norm in norms:
        if _absent(norm):
            continue
        if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None:
            _refuse(f"a {type(norm).__name__} without the usual weight and bias is not supported")
        found.add(norm.eps)
    if len(found) != 1:
        _refuse(f"norms with different eps {sorted(found)} are not supported")
    return found.pop()


def _blocks(model: Any) -> dict[str, Any]:
    found = [_block(block, f"blocks.{i}") for i, block in enumerate(model.blocks)]
    for i, fields in enumerate(found):
        if fields != found[0]:
            _refuse(f"blocks.{i} differs from blocks.0: {fields} and {found[0]}")
    return found[0]


def _block(block: Any, name: str) -> dict[str, Any]:
    for part, wanted in (("", "Block"), ("attn", "Attention"), ("mlp", "Mlp")):
        found = type(getattr(block, part) if part else block).__name__
        if found != wanted:
            _refuse(f"{name} has a {found}, expected a plain {wanted}")
    attn, mlp = block.attn, block.mlp
    if not _absent(getattr(attn, "norm", None)) or getattr(attn, "gate", None) is not None:
        _refuse(f"{name}.attn has a norm or gate after attention, which is not supported")
    if not _absent(getattr(mlp, "norm", None)):
        _refuse(f"{name}.mlp has a norm inside, which is not supported")
    linears = {"attn.qkv": attn.qkv, "attn.proj": attn.proj, "mlp.fc1": mlp.fc1, "mlp.fc2": mlp.fc2}
    for part, linear in linears.items():
        if type(linear) is not nn.Linear:
            _refuse(f"{name}.{part} is a {type(linear).__name__}, expected nn.Linear")
        if part != "attn.qkv" and linear.bias is None:
            _refuse(f"{name}.{part} without a bias is not supported")
    act = type(mlp.act).__name__
    if act == "GELU":
        act = "gelu" if getattr(mlp.act, "approximate", "none") == "none" else "gelu_tanh"
    elif act not in _ACTIVATIONS:
        _refuse(f"{name}.mlp.act is {act}, expected GELU (exact or tanh) or QuickGELU")
    gamma = getattr(block.ls1, "gamma", None)
    if (gamma is None) != (getattr(block.ls2, "gamma", None) is None):
        _refuse(f"{name} has one LayerScale, expected two or none")
    return {
        "heads": attn.num_heads,
        "mlp_width": mlp.fc1.out_features,
        "qkv_bias": attn.qkv.bias is not None,
        "qk_norm": not _absent(attn.q_norm),
        "layer_scale": None if gamma is None else float(getattr(block.ls1, "init_values", 1e-5)),
        "activation": _ACTIVATIONS.get(act, act),
        "attention_dropout": attn.attn_drop.p,
        "projection_dropout": attn.proj_drop.p,
    }


def _pixels(model: Any, channels: int) -> dict[str, Any]:
    known = getattr(model, "pretrained_cfg", None) or {}
    stats = {n: known.get(n) for n in ("mean", "std")}
    return stats if all(v and len(v) == channels for v in stats.values()) else {}


def _absent(module: nn.Module | None) -> bool:
    return module is None or isinstance(module, nn.Identity)


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"timm.config_of: {message}")
