"""The blocks of a ViT: how attention, MLP and norms follow each other.

Each has timm's names, a plain forward that calls every module (the reference path), and `fused`:
the same as vitkern's operators, and PyTorch where there is none. Both take their dropout masks from
the same seeds: they drop the same elements. `build` makes the one that a configuration names.

bias: (H, S, S) of the scores. rotation: a table of Rope. dtype: matrices are cast to it, if given.
offsets: of the images whose rows are x (1, S, D), which do not see each other; without relative
positions and drop-path, which are an image's, and with rotation of all rows.
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
    Dropout,
    DropPath,
    LayerScale,
    Mlp,
    attention_weights,
    cast,
    layernorm,
    linear,
    make_norm,
    norm_linear,
    site,
    turned,
)  # fmt: skip

Maybe = Tensor | None


def build(c: ViTConfig, index: int, **made: Any) -> nn.Module:
    """Block `index` of a configuration."""
    kinds: dict[str, Any] = {"post_norm": PostNormBlock, "parallel": ParallelBlock}
    kinds |= {"twin": TwinBlock}
    return kinds.get(c.block, Block)(c, index, **made)


def _scale(c: ViTConfig, **made: Any) -> nn.Module:
    return nn.Identity() if c.layer_scale is None else LayerScale(c.width, c.layer_scale, **made)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `seeds` (3,): attention, projection, MLP."""

    def __init__(self, c: ViTConfig, index: int, **made: Any) -> None:
        super().__init__()
        self.norm1 = make_norm(c, c.width, **made)
        self.attn = Attention(c, **made)
        self.ls1 = _scale(c, **made)
        self.drop_path1 = DropPath(c.drop_path_of(index))
        self.norm2 = make_norm(c, c.width, **made)
        self.mlp = Mlp(c, **made)
        self.ls2 = _scale(c, **made)
        self.drop_path2 = DropPath(c.drop_path_of(index))

    def forward(
        self, x: Tensor, bias: Maybe = None, seeds: Maybe = None, rotation: Maybe = None
    ) -> Tensor:
        projection, mlp = site(seeds, 1), site(seeds, 2)
        y = self.ls1(self.attn(self.norm1(x), bias, seeds, rotation))
        x = x + self.drop_path1(y, projection)
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x), mlp)), mlp)

    def fused(
        self, x: Tensor, bias: Maybe, seeds: Maybe, dtype: torch.dtype | None,
        offsets: Maybe = None, rotation: Maybe = None, rows: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Four operators, or more. rows: only so many of each image's come out, the first ones."""
        y = attend(self.attn, self.norm1, x, bias, site(seeds, 0), dtype, offsets, rotation)
        if rows is not None:
            x, y = x[:, :rows], y[:, :rows]
        x = project(self.attn, y, x, self.ls1, self.drop_path1, site(seeds, 1), dtype)
        return add_mlp(self.norm2, self.mlp, self.ls2, self.drop_path2, x, x, site(seeds, 2), dtype)

    @property
    def leaves_rows(self) -> bool:
        """Whether `fused` may leave rows out: not where a mask is drawn for the elements of all."""
        return not (self.attn.proj_drop.rate or self.mlp.drop1.rate)

    def queries_and_keys(self, x: Tensor, rotation: Maybe = None) -> tuple[Tensor, Tensor]:
        """Of rows that enter the block, each (B, H, S, E)."""
        return self.attn.of_heads(self.norm1(x), rotation)[:2]


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

    def forward(
        self, x: Tensor, bias: Maybe = None, seeds: Maybe = None, rotation: Maybe = None
    ) -> Tensor:
        projection, mlp = site(seeds, 1), site(seeds, 2)
        x = x + self.drop_path1(self.norm1(self.attn(x, bias, seeds, rotation)), projection)
        return x + self.drop_path2(self.norm2(self.mlp(x, mlp)), mlp)

    def fused(
        self, x: Tensor, bias: Maybe, seeds: Maybe, dtype: torch.dtype | None,
        offsets: Maybe = None, rotation: Maybe = None,
    ) -> Tensor:  # fmt: skip
        attn, mlp, second, third = self.attn, self.mlp, site(seeds, 1), site(seeds, 2)
        y = attend(attn, nn.Identity(), x, bias, site(seeds, 0), dtype, offsets, rotation)
        y = linear(layernorm(attn.norm, y), cast(attn.proj.weight, dtype), attn.proj.bias)
        y = attn.proj_drop(y.to(x.dtype), second)
        x = x + self.drop_path1(layernorm(self.norm1, y), second)
        y = hidden_rows(nn.Identity(), mlp, x, third, dtype)
        y = mlp.drop2(linear(y, cast(mlp.fc2.weight, dtype), mlp.fc2.bias).to(x.dtype), third)
        return x + self.drop_path2(layernorm(self.norm2, y), third)

    def queries_and_keys(self, x: Tensor, rotation: Maybe = None) -> tuple[Tensor, Tensor]:
        return self.attn.of_heads(x, rotation)[:2]


class ParallelBlock(nn.Module):
    """x + scale * (attention(norm(x)) + mlp(norm(x))), both of one projection (ViT-22B).

    The rows of `in_proj` are the MLP's first, then queries, keys and values. Without qkv_bias the
    MLP has a bias of its own.
    """

    mlp_bias: nn.Parameter | None

    def __init__(self, c: ViTConfig, index: int, **made: Any) -> None:
        super().__init__()
        D, E, self.hidden, self.heads = c.width, c.head_dim, c.hidden_rows, c.heads
        self.rope, self.rope_half, self.kind = c.rope, c.rope_half, c.mlp
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
        self.mlp_out_proj = nn.Linear(c.mlp_width, D, **made)
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

    def forward(
        self, x: Tensor, bias: Maybe = None, seeds: Maybe = None, rotation: Maybe = None
    ) -> Tensor:
        hidden, qkv = self._parts(self.in_proj(self.in_norm(x)))
        if self.mlp_bias is not None:
            hidden = hidden + self.mlp_bias.to(hidden.dtype)
        q, k, v = self._of_heads(qkv, rotation)
        mask = None if bias is None else bias.to(v.dtype)
        if self.attn_drop.rate:
            y = self.attn_drop(attention_weights(q, k, mask), site(seeds, 0)).to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = self.attn_out_proj(y.transpose(1, 2).reshape(x.shape))
        gate, value = hidden.chunk(2, -1) if self.kind != "plain" else (hidden, None)
        hidden = self.mlp_act(gate) if value is None else self.mlp_act(gate) * value
        hidden = self.mlp_drop(hidden, site(seeds, 2))
        return x + self.drop_path(self.ls(y + self.mlp_out_proj(hidden)), site(seeds, 1))

    def fused(
        self, x: Tensor, bias: Maybe, seeds: Maybe, dtype: torch.dtype | None,
        offsets: Maybe = None, rotation: Maybe = None,
    ) -> Tensor:  # fmt: skip
        weight = cast(self.in_proj.weight, dtype)
        hidden, qkv = self._parts(norm_linear(self.in_norm, x, weight, self.bias()))
        y = attend_rows(self, qkv, bias, site(seeds, 0), offsets, rotation)
        hidden = self.mlp_act(hidden) if self.kind == "plain" else ops.swiglu(hidden)
        hidden = self.mlp_drop(hidden, site(seeds, 2))
        # One seed for both: a sample's branches are dropped together.
        rest: dict[str, Any] = dict(drop_path_p=self.drop_path.rate, seed=site(seeds, 1))
        for rows, layer in ((y, self.attn_out_proj), (hidden, self.mlp_out_proj)):
            weight, gamma = cast(layer.weight, dtype), getattr(self.ls, "gamma", None)
            x = ops.linear_residual(rows, weight, layer.bias, x, gamma, **rest)
        return x

    def _parts(self, projected: Tensor) -> tuple[Tensor, ...]:
        """The MLP's rows, and those of queries, keys and values."""
        return projected.split((self.hidden, projected.shape[-1] - self.hidden), -1)

    def _of_heads(self, qkv: Tensor, rotation: Maybe) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        q, k = (turned(self, t, rotation) for t in (self.q_norm(q), self.k_norm(k)))
        return q.to(v.dtype), k.to(v.dtype), v  # (B, H, S, E)

    def queries_and_keys(self, x: Tensor, rotation: Maybe = None) -> tuple[Tensor, Tensor]:
        return self._of_heads(self._parts(self.in_proj(self.in_norm(x)))[1], rotation)[:2]


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

    def forward(
        self, x: Tensor, bias: Maybe = None, seeds: Maybe = None, rotation: Maybe = None
    ) -> Tensor:
        branches: list[Any] = [*self.attns]
        own = [_seeds_of(seeds, i) for i in range(2)]
        x = x + sum(
            b.drop_path(b.ls(b.attn(b.norm(x), bias, s, rotation)), site(s, 1))
            for b, s in zip(branches, own, strict=True)
        )
        branches = [*self.ffns]
        return x + sum(
            b.drop_path(b.ls(b.mlp(b.norm(x), site(s, 2))), site(s, 2))
            for b, s in zip(branches, own, strict=True)
        )

    def fused(
        self, x: Tensor, bias: Maybe, seeds: Maybe, dtype: torch.dtype | None,
        offsets: Maybe = None, rotation: Maybe = None,
    ) -> Tensor:  # fmt: skip
        y, own = x, [_seeds_of(seeds, i) for i in range(2)]
        branches: list[Any] = [*self.attns]
        for b, s in zip(branches, own, strict=True):
            rows = attend(b.attn, b.norm, x, bias, site(s, 0), dtype, offsets, rotation)
            y = project(b.attn, rows, y, b.ls, b.drop_path, site(s, 1), dtype)
        x, branches = y, [*self.ffns]
        for b, s in zip(branches, own, strict=True):
            y = add_mlp(b.norm, b.mlp, b.ls, b.drop_path, x, y, site(s, 2), dtype)
        return y


def _seeds_of(seeds: Tensor | None, branch: int) -> Tensor | None:
    return None if seeds is None else seeds + branch


# ---- the branches as operators ----


def attend(
    attn: Attention, norm: nn.Module, x: Tensor, bias: Maybe, seed: Maybe,
    dtype: torch.dtype | None, offsets: Maybe, rotation: Maybe,
) -> Tensor:  # fmt: skip
    """Attention to norm(x) before its projection: (B, S, D)."""
    qkv = norm_linear(norm, x, cast(attn.qkv_weight(), dtype), attn.qkv_bias())
    return attend_rows(attn, qkv, bias, seed, offsets, rotation)


def attend_rows(
    attn: Any, qkv: Tensor, bias: Maybe, seed: Maybe, offsets: Maybe, rotation: Maybe
) -> Tensor:
    """The same of rows of queries, keys and values (B, S, 3 D).

    attn: what has heads, q_norm, k_norm, rope_half and attn_drop.
    """
    qkv = qkv.unflatten(-1, (3, attn.heads, -1))
    if not isinstance(attn.q_norm, nn.Identity):
        q, k, v = qkv.unbind(2)  # (B, S, H, E)
        qkv = torch.stack([layernorm(attn.q_norm, q), layernorm(attn.k_norm, k), v], 2)
    if rotation is not None:
        qkv = ops.rotary(qkv, rotation, half=attn.rope_half)
    bias = bias[None] if bias is not None and bias.ndim == 3 else bias
    dropped = attn.attn_drop.rate
    return ops.attention(qkv, bias, dropout_p=dropped, seed=seed, offsets=offsets).flatten(2)


def project(
    attn: Attention, rows: Tensor, residual: Tensor, scale: nn.Module, path: DropPath, seed: Maybe,
    dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """residual + scale * attention's projection of its rows."""
    return ops.linear_residual(
        layernorm(attn.norm, rows), cast(attn.proj.weight, dtype), attn.proj.bias, residual,
        getattr(scale, "gamma", None), dropout_p=attn.proj_drop.rate, drop_path_p=path.rate,
        seed=seed,
    )  # fmt: skip


def hidden_rows(
    norm: nn.Module, mlp: Mlp, x: Tensor, seed: Maybe, dtype: torch.dtype | None
) -> Tensor:
    """What an MLP's second layer takes, of norm(x): (B, S, F)."""
    plain = mlp.kind == "plain"
    act = mlp.act.name if plain else "none"
    hidden = norm_linear(norm, x, cast(mlp.fc1_weight(), dtype), mlp.fc1_bias(), act)
    return layernorm(mlp.norm, mlp.drop1(hidden if plain else ops.swiglu(hidden), seed))


def add_mlp(
    norm: nn.Module, mlp: Mlp, scale: nn.Module, path: DropPath, x: Tensor, residual: Tensor,
    seed: Maybe, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """residual + scale * mlp(norm(x)): one operator for the usual MLP of x, its own residual."""
    gamma, down = getattr(scale, "gamma", None), cast(mlp.fc2.weight, dtype)
    rates: dict[str, Any] = dict(dropout_p=mlp.drop1.rate, drop_path_p=path.rate, seed=seed)
    usual = mlp.kind == "plain" and isinstance(mlp.norm, nn.Identity)
    if usual and residual is x and isinstance(norm, nn.LayerNorm):
        return ops.mlp(
            x, norm.weight, norm.bias, cast(mlp.fc1.weight, dtype), mlp.fc1.bias, down,
            mlp.fc2.bias, gamma, activation=mlp.act.name, eps=norm.eps, **rates,
        )  # fmt: skip
    hidden = hidden_rows(norm, mlp, x, seed, dtype)
    return ops.linear_residual(hidden, down, mlp.fc2.bias, residual, gamma, **rates)
