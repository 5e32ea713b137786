"""The .npz files of google-research/vision_transformer and of big_vision.

Kernels are stored input first, attention's with an axis for the heads. GELU is JAX's default, the
tanh approximation. Positions that are not stored are big_vision's fixed ones, sines and cosines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...config import STEMS, ViTConfig
from .base import (
    Checkpoint,
    Layout,
    Rule,
    Shape,
    heads_of,
    place_fields,
    unlike,
)  # fmt: skip

STEM = "Transformer/encoderblock_"
ATTENTION = "MultiHeadDotProductAttention_0"
POSITIONS = "pos_embedding"
# Blocks of each stage of a hybrid's ResNet: its name in ViTConfig.
STEM_OF = {
    (): "r", (3, 4, 9): "r50", (3, 4, 6, 3): "r50_s32", (2, 2, 2, 2): "r26_s32",
}  # fmt: skip


class Jax(Layout):
    name, title = "jax", "JAX's .npz (vision_transformer, big_vision)"
    anchor, stem = "embedding/kernel", STEM
    marks = (r"Transformer/encoder_norm/scale",)
    elsewhere = r"(params/)?(opt|step|chrono|txt|t|b)(/|$)"
    # Layers were numbered together once, and positions stood inside the encoder.
    spellings = (
        (r"LayerNorm_2/", "LayerNorm_1/"),
        (r"MlpBlock_3/", "MlpBlock_0/"),
        (r"MultiHeadDotProductAttention_1/", f"{ATTENTION}/"),
        (r"Transformer/(posembed_input/)?pos_embedding", POSITIONS),
    )
    head = r"head/|pre_logits/|MAPHead_0/"

    def bare(self, checkpoint: Checkpoint, prefix: str) -> Checkpoint:
        """Also takes apart blocks that lie in one array each, (depth, ...)."""
        c = super().bare(checkpoint, prefix)
        stacked = "Transformer/encoderblock/"
        for name in [name for name in c.tensors if name.startswith(stacked)]:
            blocks = c.tensors.pop(name)
            for i, block in enumerate(blocks if blocks.ndim and len(blocks) < 4096 else ()):
                c.tensors[f"{STEM}{i}/{name.removeprefix(stacked)}"] = block
        return c

    def refusal(self, c: Checkpoint) -> str:
        depths = _depths(c)
        known = depths is None or depths in STEM_OF
        return "" if known else f"a ResNet of {depths} blocks as its stem"

    def head_refusal(self, c: Checkpoint) -> str:
        pooled = any(name.startswith("MAPHead_0/") for name in c.tensors)
        return "attention pooling (the MAP head)" if pooled else ""

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        patch = c.shape(self.anchor)
        if len(patch) != 4 or patch[0] != patch[1]:
            raise ValueError(f"{self.anchor} has shape {patch}, expected (p, p, channels, width)")
        p, _, C, D = patch
        depths = _depths(c)
        stem = "none" if depths is None else STEM_OF[depths]
        if depths is not None:
            C = c.size("conv_root/kernel", 2, 3)
        depth, query = c.count(STEM), c.shape(f"{STEM}0/{ATTENTION}/query/kernel")
        mlp, token = c.shape(f"{STEM}0/MlpBlock_0/Dense_0/kernel"), "cls" in c.tensors
        rows, size = c.shape(POSITIONS), c.said.get("image_size", 224)
        prefix = 0
        if len(rows) == 3:
            side = p * STEMS[stem].stride
            prefix, size = place_fields(c, rows[1], (1, 0) if token else (0,), side)
        hidden, head = c.shape("pre_logits/kernel"), c.shape("head/kernel")
        return {
            "image_size": size,
            "patch_size": p,
            "stem": stem,
            "channels": C,
            "width": D,
            "depth": depth,
            "heads": query[1] if len(query) == 3 else heads_of(D, depth),
            "mlp_width": mlp[1] if len(mlp) == 2 else 4 * D,
            "class_token": token,
            "pool": "token" if token else "none" if self.head_refusal(c) else "mean",
            "position_covers_prefix": bool(prefix),
            "activation": "gelu_tanh",
            "classes": head[1] if len(head) == 2 else 0,
            "head": "tanh" if hidden else "linear",
            "representation_size": hidden[1] if len(hidden) == 2 else None,
            "mean": (0.5,) * C,
            "std": (0.5,) * C,
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        block = f"{STEM}{{i}}"
        return [
            Rule("cls_token", ("cls",)),
            Rule("pos_embed", (POSITIONS,)),
            Rule("pos_embed", (), _waves(config)),
            Rule("patch_embed.proj.weight", (self.anchor,), _convolution,
                 lambda t: [t.permute(2, 3, 1, 0)]),
            Rule("patch_embed.proj.bias", ("embedding/bias",)),
            *_norm("blocks.{i}.norm1", f"{block}/LayerNorm_0"),
            *_attention(config, f"{block}/{ATTENTION}"),
            *_norm("blocks.{i}.norm2", f"{block}/LayerNorm_1"),
            *_dense("blocks.{i}.mlp.fc1", f"{block}/MlpBlock_0/Dense_0"),
            *_dense("blocks.{i}.mlp.fc2", f"{block}/MlpBlock_0/Dense_1"),
            *_norm("norm", "Transformer/encoder_norm"),
            *_dense("pre_logits.fc", "pre_logits"),
            *_dense("head", "head"),
            *_resnet(config),
        ]  # fmt: skip

    def export_refusal(self, config: ViTConfig) -> str:
        pool = "token" if config.class_token else "mean"
        return unlike(
            config, registers=0, pool=pool, position="learned", qkv_bias=True, layer_scale=None,
            qk_norm=False, pre_norm=False, final_norm="before_pool", norm_eps=1e-6,
            activation="gelu_tanh", head=("linear", "tanh"),
        )  # fmt: skip


def _depths(c: Checkpoint) -> tuple[int, ...] | None:
    """Blocks of each stage of a hybrid's ResNet; None where there is none."""
    if "conv_root/kernel" not in c.tensors:
        return None
    units = re.compile(r"block([0-9])/unit([0-9]{1,2})/")
    found: dict[int, int] = {}
    for stage, unit in (m.groups() for name in c.tensors if (m := units.match(name))):
        found[int(stage)] = max(found.get(int(stage), 0), int(unit))
    return tuple(found[stage] for stage in sorted(found))


def _resnet(config: ViTConfig) -> list[Rule]:
    """The stem: root and stages, whose norms may be stored as (1, 1, 1, C)."""
    depths = next((d for d, stem in STEM_OF.items() if stem == config.stem), None)
    if depths is None:
        return []
    at = "patch_embed.backbone."
    places = {f"{at}{'stem.' if depths else ''}": ("conv_root", "gn_root", "conv", "norm")}
    layers = [(prefix, *names) for prefix, names in places.items()]
    for i, depth in enumerate(depths):
        for j in range(depth):
            ours, theirs = f"{at}stages.{i}.blocks.{j}.", f"block{i + 1}/unit{j + 1}/"
            for n in ("1", "2", "3"):
                layers.append((ours, f"{theirs}conv{n}", f"{theirs}gn{n}", f"conv{n}", f"norm{n}"))
            if not j:
                shortcut = (f"{theirs}conv_proj", f"{theirs}gn_proj", "conv", "norm")
                layers.append((f"{ours}downsample.", *shortcut))
    rules = []
    for prefix, conv, norm, our_conv, our_norm in layers:
        rules.append(Rule(f"{prefix}{our_conv}.weight", (f"{conv}/kernel",), _convolution,
                          lambda t: [t.permute(2, 3, 1, 0)]))  # fmt: skip
        for ours, part in (("weight", "scale"), ("bias", "bias")):
            name = f"{prefix}{our_norm}.{ours}"
            rules.append(Rule(name, (f"{norm}/{part}",), lambda p, shape: p[0].reshape(shape)))
    return rules


def _convolution(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    return parts[0].permute(3, 2, 0, 1)


def _norm(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.weight", (f"{theirs}/scale",)), Rule(f"{ours}.bias", (f"{theirs}/bias",))]


def _dense(ours: str, theirs: str) -> list[Rule]:
    return [
        Rule(f"{ours}.weight", (f"{theirs}/kernel",), lambda p, shape: p[0].t(), lambda t: [t.t()]),
        Rule(f"{ours}.bias", (f"{theirs}/bias",)),
    ]


def _attention(config: ViTConfig, theirs: str) -> list[Rule]:
    D, H, E = config.width, config.heads, config.head_dim

    def joined(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        return torch.cat([part.reshape(D, D).t() for part in parts])  # (D, H, E) each

    def parted(ours: Tensor) -> Sequence[Tensor]:
        return [part.t().reshape(D, H, E) for part in ours.chunk(3)]

    names = [f"{theirs}/{part}" for part in ("query", "key", "value")]
    return [
        Rule("blocks.{i}.attn.qkv.weight", tuple(f"{n}/kernel" for n in names), joined, parted),
        Rule("blocks.{i}.attn.qkv.bias", tuple(f"{n}/bias" for n in names),
             lambda parts, shape: torch.cat([part.flatten() for part in parts]),
             lambda t: [part.view(H, E) for part in t.chunk(3)]),
        Rule("blocks.{i}.attn.proj.weight", (f"{theirs}/out/kernel",),
             lambda parts, shape: parts[0].reshape(D, D).t(), lambda t: [t.t().reshape(H, E, D)]),
        Rule("blocks.{i}.attn.proj.bias", (f"{theirs}/out/bias",)),
    ]  # fmt: skip


def _waves(config: ViTConfig) -> Any:
    """big_vision's fixed positions: as MoCo v3's, but with the last wave at 1/10000 exactly."""

    def join(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        down, across = config.grid
        if config.width % 4 or config.width < 8:
            raise ValueError(f"fixed positions need a width that 4 divides, not {config.width}")
        quarter = config.width // 4
        waves = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
        y = torch.arange(down)[:, None].expand(down, across).reshape(-1, 1) * waves
        x = torch.arange(across)[None].expand(down, across).reshape(-1, 1) * waves
        return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], 1)[None].float()

    return join
