"""timm's live models: what their configuration is, or why vitkern cannot express it.

timm itself is never imported: its models are recognised by what they have.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ..config import ViTConfig
from .timm_blocks import absent, fields_of, refuse, rope_fields

_POOLS = {"token": "token", "avg": "mean", "map": "map", "": "none"}
_KINDS = (
    "VisionTransformer", "VisionTransformerDistilled", "VisionTransformerRelPos", "Beit", "Eva",
)  # fmt: skip
_NORMS = {"LayerNorm": "layernorm", "RmsNorm": "rmsnorm"}
# Names of timm's that are not vitkern's. "{i}": a tensor that all blocks share.
_RENAMED = (
    (r"(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),
    (r"rel_pos_bias\.(relative_position_bias_table)$", r"blocks.{i}.attn.\1"),
    (r"(blocks\.\d+\.attn)\.rel_pos\.(relative_position_bias_table)$", r"\1.\2"),
    (r"patch_embed\.backbone\.2\.conv\.(weight|bias)$", r"patch_embed.proj.\1"),
    (r"shared_rel_pos\.(relative_position_bias_table)$", r"blocks.{i}.attn.\1"),
)


def config_of(model: nn.Module) -> ViTConfig:
    """The configuration of a timm VisionTransformer or Eva; a ValueError says why not."""
    return _config(model)


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a timm model by vitkern's names; tied ones count twice."""
    found: dict[str, nn.Parameter] = {}
    depth = len(getattr(model, "blocks", ()))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for pattern, ours in _RENAMED:
            name = re.sub(pattern, ours, name)
        names = [name.replace("{i}", str(i)) for i in range(depth)] if "{i}" in name else [name]
        found |= dict.fromkeys(names, parameter)
    return found


def _config(model: Any) -> ViTConfig:
    """`config_of` of what a foreign class has: its attributes are looked for, not declared."""
    kind = type(model).__name__
    if kind not in _KINDS or not hasattr(model, "blocks"):
        refuse(f"a {kind} is not a timm VisionTransformer")
    if not len(model.blocks):
        refuse("the model has no blocks")
    if type(model.head) not in (nn.Linear, nn.Identity):
        refuse(f"the head is a {type(model.head).__name__}, expected a Linear or none")
    proj, blocks = _patch_projection(model), _blocks(model)
    class_token, distilled = model.cls_token is not None, kind == "VisionTransformerDistilled"
    registers = int(model.num_prefix_tokens) - class_token - distilled
    size, stem = tuple(model.patch_embed.img_size), _stem(model.patch_embed) or "none"
    channels = proj.in_channels if stem == "none" else model.patch_embed.in_chans
    return ViTConfig(
        image_size=size,
        crop=stem == "none" and any(s % proj.kernel_size[0] for s in size),
        stem=stem,
        patch_size=proj.kernel_size[0],
        channels=channels,
        width=model.embed_dim,
        depth=len(model.blocks),
        classes=model.head.out_features if isinstance(model.head, nn.Linear) else 0,
        class_token=class_token,
        registers=registers,
        **_pool(model, class_token or registers > 0, blocks),
        position_covers_prefix=not getattr(model, "no_embed_class", False),
        dynamic_image_size=bool(getattr(model, "dynamic_img_size", False)),
        head="distilled" if distilled else "linear",
        dropout=model.pos_drop.p if hasattr(model, "pos_drop") else 0.0,
        head_dropout=model.head_drop.p,
        drop_path=_drop_path(model.blocks[-1]),
        **_position(model),
        **_norms(model),
        **blocks,
        **rope_fields(model),
        **_pixels(model, channels),
    )


def _patch_projection(model: Any) -> nn.Conv2d:
    embed = model.patch_embed
    proj = getattr(embed, "proj", None)
    if _stem(embed) == "mci":
        return embed.backbone[2].conv
    known = type(embed).__name__ == "PatchEmbed" or _stem(embed)
    if not known or type(proj) is not nn.Conv2d:
        refuse(f"patch_embed is a {type(embed).__name__}, expected a plain patch projection")
    if len({*proj.kernel_size, *proj.stride}) != 1:
        refuse(f"patches {proj.kernel_size}, stride {proj.stride} are not square and adjacent")
    if not absent(getattr(embed, "norm", None)) or getattr(embed, "dynamic_img_pad", False):
        refuse("a norm inside patch_embed and dynamic_img_pad are not supported")
    if not absent(getattr(model, "patch_drop", None)):
        refuse("patch dropout is not supported")
    if (proj.bias is None) != (not absent(getattr(model, "norm_pre", None))):
        refuse("the patch projection has a bias exactly when there is no norm_pre")
    return proj


def _stem(embed: Any) -> str:
    """The stem of vitkern's that a hybrid embedding begins with; "" if it has none of these."""
    backbone: Any = getattr(embed, "backbone", None)
    kind = type(backbone).__name__
    if type(embed).__name__ != "HybridEmbed":
        return ""
    if kind == "ResNetV2" and type(backbone.stem.conv).__name__ == "StdConv2dSame":
        depths = tuple(len(stage.blocks) for stage in backbone.stages)
        return {(3, 4, 9): "r50", (3, 4, 6, 3): "r50_s32", (2, 2, 2, 2): "r26_s32"}.get(depths, "")
    if kind == "Sequential" and type(backbone[0]).__name__ == "StdConv2dSame":
        return "r"
    if kind == "FeatureListNet" and hasattr(backbone, "layer3") and len(backbone.conv1) == 7:
        stages = [n for n in ("layer1", "layer2", "layer3", "layer4") if hasattr(backbone, n)]
        depths = tuple(len(getattr(backbone, n)) for n in stages)
        names = {(2, 2, 2, 2): "resnet26d", (3, 4, 6, 3): "resnet50d", (3, 4, 6): "resnet50d_s16"}
        return names.get(depths, "")
    if kind == "ConvStem" and isinstance(embed.proj, nn.Identity):
        shapes = [(conv.conv.kernel_size, conv.conv.out_channels) for conv in backbone]
        return "mci" if shapes[:2] == [((4, 4), 192), ((2, 2), 192)] and len(shapes) == 3 else ""
    return ""


def _position(model: Any) -> dict[str, Any]:
    first = model.blocks[0]
    shared = getattr(model, "shared_rel_pos", None) or getattr(model, "rel_pos_bias", None)
    own = getattr(getattr(first, "attn", None), "rel_pos", None)
    table = getattr(getattr(first, "attn", None), "relative_position_bias_table", None)
    absolute = getattr(model, "pos_embed", None) is not None
    if shared is None and own is None and table is None:
        return {"position": "learned" if absolute else "none"}
    if absolute or (shared is not None and (own is not None or table is not None)):
        refuse("positions of two kinds, absolute and relative or shared and not, together")
    relative: Any = own if shared is None else shared
    if type(relative).__name__ != "RelPosMlp":
        return {"position": "relative"}
    if relative.mode != "cr":
        refuse(f"relative positions in mode {relative.mode!r} are not supported")
    kind = "relative_mlp" if shared is None else "shared_relative_mlp"
    return {"position": kind, "relative_width": relative.mlp.fc1.out_features}


def _drop_path(block: Any) -> float:
    paths = [m for name, m in block.named_modules() if name.rpartition(".")[2].startswith("drop_")]
    return max((float(getattr(path, "drop_prob", 0.0)) for path in paths), default=0.0)


def _pool(model: Any, prefix: bool, blocks: dict[str, Any]) -> dict[str, Any]:
    if model.global_pool not in _POOLS:
        refuse(f"global_pool={model.global_pool!r} is not supported: token, avg, map or none")
    if model.global_pool == "map":
        pool = model.attn_pool
        plain = type(pool).__name__ == "AttentionPoolLatent" and pool.pool == "token"
        plain = plain and pool.pos_embed is None and pool.latent_len == 1 and absent(pool.q_norm)
        if not plain or not all(isinstance(one, nn.Linear) for one in (pool.q, pool.proj)):
            refuse("attention pooling is that of SigLIP and PE alone: one query, projected")
        own = {"heads": pool.num_heads, "mlp_width": pool.mlp.fc1.out_features}
        differs = {f"pool_{name}": value for name, value in own.items() if value != blocks[name]}
        # timm's Eva has every row pooled, its VisionTransformer the patches.
        whole = getattr(model, "pool_include_prefix", type(model).__name__ == "Eva")
        return {"pool": "map", **differs, "pool_prefix": bool(whole and prefix)}
    if model.global_pool == "avg" and prefix and getattr(model, "pool_include_prefix", False):
        refuse("mean pooling over class and register tokens is not supported")
    return {"pool": _POOLS[model.global_pool]}


def _norms(model: Any) -> dict[str, Any]:
    places = [n for n in ("norm", "fc_norm") if not absent(getattr(model, n))]
    pre = getattr(model, "norm_pre", None)
    if len(places) > 1:
        refuse("norm and fc_norm together are not supported")
    names = {"norm": "before_pool", "fc_norm": "after_pool"}
    return {
        "final_norm": names[places[0]] if places else "none",
        "pre_norm": not absent(pre),
        **_norm_kind(model),
    }


def _norm_kind(model: Any) -> dict[str, Any]:
    """Of every norm: they are of one kind, with one eps."""
    found: set[tuple[str, float]] = set()
    for name, norm in model.named_modules():
        if "norm" not in name.rpartition(".")[2] or absent(norm) or name.startswith("patch_embed"):
            continue
        kind = "LayerNorm" if isinstance(norm, nn.LayerNorm) else type(norm).__name__
        if kind not in _NORMS or norm.weight is None or getattr(norm, "bias", 0) is None:
            refuse(f"a {type(norm).__name__} without the usual weight and bias is not supported")
        found.add((_NORMS[kind], norm.eps))
    if len(found) != 1:
        refuse(f"norms of different kinds or eps {sorted(found)} are not supported")
    kind, eps = found.pop()
    return {"norm": kind, "norm_eps": eps}


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
