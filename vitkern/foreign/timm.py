"""timm's live models: what their configuration is, or why vitkern cannot express it.

timm itself is never imported: its models are recognised by what they have.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..config import ViTConfig
from .timm_blocks import absent, fields_of, norms_of, refuse, rope_fields

_KINDS = ("VisionTransformer", "Eva")
_POOLS = {"token": "token", "avg": "mean", "": "none"}


def config_of(model: nn.Module) -> ViTConfig:
    """The configuration of a timm VisionTransformer or Eva; a ValueError says why not."""
    return _config(model)


def _config(model: Any) -> ViTConfig:
    """`config_of` of what a foreign class has: its attributes are looked for, not declared."""
    kind = type(model).__name__
    if kind not in _KINDS or not hasattr(model, "blocks"):
        refuse(f"a {kind} is not a timm VisionTransformer")
    if getattr(model, "attn_pool", None) is not None:
        refuse("attention pooling (map, prr) is not supported")
    if not len(model.blocks):
        refuse("the model has no blocks")
    if type(model.head) not in (nn.Linear, nn.Identity):
        refuse(f"the head is a {type(model.head).__name__}, expected a Linear or none")
    proj, blocks = _patch_projection(model), _blocks(model)
    class_token = model.cls_token is not None
    registers = int(model.num_prefix_tokens) - class_token
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
        **rope_fields(model),
        **_pixels(model, proj.in_channels),
    )


def _patch_projection(model: Any) -> nn.Conv2d:
    embed = model.patch_embed
    proj = getattr(embed, "proj", None)
    if type(embed).__name__ != "PatchEmbed" or type(proj) is not nn.Conv2d:
        refuse(f"patch_embed is a {type(embed).__name__}, expected a plain patch projection")
    if len({*proj.kernel_size, *proj.stride}) != 1:
        refuse(f"patches {proj.kernel_size}, stride {proj.stride} are not square and adjacent")
    if not absent(embed.norm) or getattr(embed, "dynamic_img_pad", False):
        refuse("a norm inside patch_embed and dynamic_img_pad are not supported")
    if not absent(model.patch_drop):
        refuse("patch dropout is not supported")
    if (proj.bias is None) != (not absent(model.norm_pre)):
        refuse("the patch projection has a bias exactly when there is no norm_pre")
    return proj


def _pool(model: Any, prefix: bool) -> str:
    if model.global_pool not in _POOLS:
        refuse(f"global_pool={model.global_pool!r} is not supported: token, avg or none")
    if model.global_pool == "avg" and prefix and getattr(model, "pool_include_prefix", False):
        refuse("mean pooling over class and register tokens is not supported")
    return _POOLS[model.global_pool]


def _norms(model: Any) -> dict[str, Any]:
    places = [n for n in ("norm", "fc_norm") if not absent(getattr(model, n))]
    if len(places) > 1:
        refuse("norm and fc_norm together are not supported")
    names = {"norm": "before_pool", "fc_norm": "after_pool"}
    return {
        "final_norm": names[places[0]] if places else "none",
        "pre_norm": not absent(model.norm_pre),
        "norm_eps": _eps(model),
    }


def _eps(model: Any) -> float:
    norms = [model.norm, model.fc_norm, model.norm_pre]
    for block in model.blocks:
        norms += norms_of(block)
    found = set()
    for norm in norms:
        if absent(norm):
            continue
        if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None:
            refuse(f"a {type(norm).__name__} without the usual weight and bias is not supported")
        found.add(norm.eps)
    if len(found) != 1:
        refuse(f"norms with different eps {sorted(found)} are not supported")
    return found.pop()


def _blocks(model: Any) -> dict[str, Any]:
    found = [fields_of(block, f"blocks.{i}") for i, block in enumerate(model.blocks)]
    for i, fields in enumerate(found):
        if fields != found[0]:
            refuse(f"blocks.{i} differs from blocks.0: {fields} and {found[0]}")
    return found[0]


def _pixels(model: Any, channels: int) -> dict[str, Any]:
    known = getattr(model, "pretrained_cfg", None) or {}
    stats = {n: known.get(n) for n in ("mean", "std")}
    return stats if all(v and len(v) == channels for v in stats.values()) else {}
