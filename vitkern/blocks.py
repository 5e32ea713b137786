"""The blocks that are not `layers.Block`: norms after the branches, branches side by side.

Each has timm's names, a plain forward that calls every module (the reference path), and `fused`,
where vitkern's operators compute what they can and PyTorch the rest. `build` makes the one that a
configuration names.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops, philox
from .config import ViTConfig
from .layers import (
    Activation,
    Attention,
    Block,
    Dropout,
    DropPath,
    LayerScale,
    Mlp,
    attend,
    attention_weights,
    cast,
    fused_mlp,
    layernorm,
    linear,
    make_norm,
    norm_linear,
    site,
)  # fmt: skip


def build(c: ViTConfig, index: int, **made: Any) -> nn.Module:
    """Block `index` of a configuration."""
    kinds: dict[str, Any] = {"post_norm": PostNormBlock, "parallel": ParallelBlock}
    kinds |= {"twin": TwinBlock}
    return kinds.get(c.block, Block)(c, index, **made)


def _scale(c: ViTConfig, **made: Any) -> nn.Module:
    return nn.Identity() if c.layer_scale is None else LayerScale(c.width, c.layer_scale, **made)


class PostNormBlock(nn.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)): timm's ResPostBlock, Swin V2's order."""

    def __init__(self, c: ViTConfig, index: int, **made: Any) -> None:
        super().__init__()
        self.first_scale = c.layer_scale
        self.attn = Attention(c, **made)
        self.norm1 = make_norm(c, c.width, **made)
        self.drop_path1 = DropPath(c.drop_path_of(index))
        self.mlp = Mlp(c, **made)
        self.norm2 = make_norm(c, c.width, **made)
        self.drop_path2 = DropPath(c.drop_path_of(index))

    def initialise(self) -> None:
        norms: list[Any] = [self.norm1, self.norm2]
        for norm in norms:
            if self.first_scale is not None:
                nn.init.constant_(norm.weight, self.first_scale)

    def forward(self, x: Tensor, bias: Tensor | None = None, seeds: Tensor | None = None) -> Tensor:
        projection, mlp = site(seeds, 1), site(seeds, 2)
        x = x + self.drop_path1(self.norm1(self.attn(x, bias, seeds)), projection)
        return x + self.drop_path2(self.norm2(self.mlp(x, mlp)), mlp)

    def fused(
        self, x: Tensor, bias: Tensor | None, seeds: Tensor | None, dtype: torch.dtype | None,
        offsets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        attn, mlp, second, third = self.attn, self.mlp, site(seeds, 1), site(seeds, 2)
        y = linear(x, cast(attn.qkv.weight, dtype), attn.bias())
        y = attend(attn, y, bias, site(seeds, 0), offsets)
        y = linear(y, cast(attn.proj.weight, dtype), attn.proj.bias).to(x.dtype)
        x = x + self.drop_path1(layernorm(self.norm1, attn.proj_drop(y, second)), second)
        y = mlp.act(linear(x, cast(mlp.fc1.weight, dtype), mlp.fc1.bias))
        y = linear(mlp.drop1(y, third), cast(mlp.fc2.weight, dtype), mlp.fc2.bias).to(x.dtype)
        return x + self.drop_path2(layernorm(self.norm2, mlp.drop2(y, third)), third)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attn.of_heads(x)[:2]


class ParallelBlock(nn.Module):
    """x + scale * (attention(norm(x)) + mlp(norm(x))), both of one projection (ViT-22B).

    The rows of `in_proj` are the MLP's first, then queries, keys and values. Without qkv_bias the
    MLP has a bias of its own.
    """

    mlp_bias: nn.Parameter | None

    def __init__(self, c: ViTConfig, index: int, **made: Any) -> None:
        super().__init__()
        D, E, self.hidden, self.heads = c.width, c.head_dim, c.mlp_width, c.heads
        self.in_norm = make_norm(c, D, **made)
        self.in_proj = nn.Linear(D, self.hidden + 3 * D, bias=c.qkv_bias, **made)
        own = None if c.qkv_bias else nn.Parameter(torch.empty(self.hidden, **made))
        self.register_parameter("mlp_bias", own)
        self.q_norm = make_norm(c, E, **made) if c.qk_norm else nn.Identity()
        self.k_norm = make_norm(c, E, **made) if c.qk_norm else nn.Identity()
        self.attn_drop = Dropout(c.attention_dropout)
        self.mlp_drop = Dropout(c.projection_dropout, philox.HIDDEN)
        self.mlp_act = Activation(c.activation)
        self.attn_out_proj = nn.Linear(D, D, **made)
        self.mlp_out_proj = nn.Linear(self.hidden, D, **made)
        self.ls = _scale(c, **made)
        self.drop_path = DropPath(c.drop_path_of(index))

    def initialise(self) -> None:
        if self.mlp_bias is not None:
            nn.init.zeros_(self.mlp_bias)

    def bias(self) -> Tensor | None:
        """Of all rows of in_proj, or None."""
        if self.mlp_bias is None:
            return self.in_proj.bias
        return F.pad(self.mlp_bias, (0, self.in_proj.out_features - self.hidden))

    def forward(self, x: Tensor, bias: Tensor | None = None, seeds: Tensor | None = None) -> Tensor:
        projected = self.in_proj(self.in_norm(x))
        hidden, qkv = projected.split((self.hidden, projected.shape[-1] - self.hidden), -1)
        if self.mlp_bias is not None:
            hidden = hidden + self.mlp_bias.to(hidden.dtype)
        q, k, v = self._of_heads(qkv)
        mask = None if bias is None else bias.to(v.dtype)
        if self.attn_drop.rate:
            y = self.attn_drop(attention_weights(q, k, mask), site(seeds, 0)).to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = self.attn_out_proj(y.transpose(1, 2).reshape(x.shape))
        hidden = self.mlp_drop(self.mlp_act(hidden), site(seeds, 2))
        return x + self.drop_path(self.ls(y + self.mlp_out_proj(hidden)), site(seeds, 1))

    def fused(
        self, x: Tensor, bias: Tensor | None, seeds: Tensor | None, dtype: torch.dtype | None,
        offsets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        projected = norm_linear(self.in_norm, x, cast(self.in_proj.weight, dtype), self.bias())
        hidden, qkv = projected.split((self.hidden, projected.shape[-1] - self.hidden), -1)
        y = attend(self, qkv, bias, site(seeds, 0), offsets)
        hidden = self.mlp_drop(self.mlp_act(hidden), site(seeds, 2))
        # One seed for both: a sample's branches are dropped together.
        rest: dict[str, Any] = dict(drop_path_p=self.drop_path.rate, seed=site(seeds, 1))
        for rows, layer in ((y, self.attn_out_proj), (hidden, self.mlp_out_proj)):
            weight, gamma = cast(layer.weight, dtype), getattr(self.ls, "gamma", None)
            x = ops.linear_residual(rows, weight, layer.bias, x, gamma, **rest)
        return x

    def _of_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v  # (B, H, S, E)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._of_heads(self.in_proj(self.in_norm(x))[..., self.hidden :])[:2]


class TwinBlock(nn.Module):
    """x + the sum of two attentions of x, then x + the sum of two MLPs: timm's "18x2" models."""

    def __init__(self, c: ViTConfig, index: int, **made: Any) -> None:
        super().__init__()

        def branch(name: str, kind: Any) -> nn.Sequential:
            path = DropPath(c.drop_path_of(index))
            norm = make_norm(c, c.width, **made)
            parts = {"norm": norm, name: kind(c, **made), "ls": _scale(c, **made)}
            return nn.Sequential(OrderedDict(**parts, drop_path=path))

        self.attns = nn.ModuleList(branch("attn", Attention) for _ in range(2))
        self.ffns = nn.ModuleList(branch("mlp", Mlp) for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor | None = None, seeds: Tensor | None = None) -> Tensor:
        branches: list[Any] = [*self.attns]
        own = [_seeds_of(seeds, i) for i in range(2)]
        x = x + sum(
            b.drop_path(b.ls(b.attn(b.norm(x), bias, s)), site(s, 1))
            for b, s in zip(branches, own, strict=True)
        )
        branches = [*self.ffns]
        return x + sum(
            b.drop_path(b.ls(b.mlp(b.norm(x), site(s, 2))), site(s, 2))
            for b, s in zip(branches, own, strict=True)
        )

    def fused(
        self, x: Tensor, bias: Tensor | None, seeds: Tensor | None, dtype: torch.dtype | None,
        offsets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        y, own = x, [_seeds_of(seeds, i) for i in range(2)]
        branches: list[Any] = [*self.attns]
        for b, s in zip(branches, own, strict=True):
            qkv = norm_linear(b.norm, x, cast(b.attn.qkv.weight, dtype), b.attn.bias())
            rows = attend(b.attn, qkv, bias, site(s, 0), offsets)
            y = ops.linear_residual(
                rows, cast(b.attn.proj.weight, dtype), b.attn.proj.bias, y,
                getattr(b.ls, "gamma", None), dropout_p=b.attn.proj_drop.rate,
                drop_path_p=b.drop_path.rate, seed=site(s, 1),
            )  # fmt: skip
        x, branches = y, [*self.ffns]
        for b, s in zip(branches, own, strict=True):
            y = fused_mlp(b.norm, b.mlp, b.ls, b.drop_path, x, y, site(s, 2), dtype)
        return y


def _seeds_of(seeds: Tensor | None, branch: int) -> Tensor | None:
    return None if seeds is None else seeds + branch
