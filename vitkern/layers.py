"""The modules of a ViT, with timm's names; their plain forward is the reference path.

There every module is called, so hooks fire and replaced modules are honoured. What blocks are made
of these modules, and the same as operators: blocks.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops, philox, positions, relative, stem
from .config import ViTConfig
from .ops.rotary import rotate


def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Seeds of `count` dropout sites: (count,) int64, from torch's generator."""
    return torch.randint(2**62, (count,), dtype=torch.int64, device=device)


def site(seeds: Tensor | None, index: int) -> Tensor | None:
    """The seed of one site, (1,), or None where nothing is dropped."""
    return None if seeds is None else seeds[index : index + 1]


def _hooked(module: nn.Module) -> bool:
    """Whether somebody wants what goes into or comes out of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def cast(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight if dtype is None else weight.to(dtype)


def make_norm(c: ViTConfig, size: int, **made: Any) -> nn.Module:
    """The configuration's norm of rows of `size`."""
    return (nn.RMSNorm if c.norm == "rmsnorm" else nn.LayerNorm)(size, c.norm_eps, **made)


def layernorm(norm: nn.Module, x: Tensor) -> Tensor:
    """A LayerNorm as one operator; another norm as it is, an Identity too."""
    if not isinstance(norm, nn.LayerNorm):
        return norm(x).to(x.dtype)
    return ops.layernorm(x, norm.weight, norm.bias, eps=norm.eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias in weight's dtype, where no operator of vitkern's has it."""
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


def norm_linear(
    norm: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none"
) -> Tensor:
    """activation(norm(x) weight^T + bias): one operator if the norm is a LayerNorm."""
    if not isinstance(norm, nn.LayerNorm):
        return ops.activation(activation)(linear(norm(x), weight, bias))
    return ops.norm_linear(
        x, norm.weight, norm.bias, weight, bias, activation=activation, eps=norm.eps
    )


class Dropout(nn.Module):
    """Dropout whose mask is a pure function of (seed, stream, element index)."""

    def __init__(self, p: float, stream: int = philox.ELEMENTS) -> None:
        super().__init__()
        self.p, self.stream = p, stream

    @property
    def rate(self) -> float:
        return self.p if self.training else 0.0

    def forward(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        if not self.rate:
            return x
        seed = draw_seeds(1, x.device) if seed is None else seed
        return philox.dropout(x, self.p, seed, self.stream)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class DropPath(Dropout):
    """Stochastic depth: drops the whole branch of a sample."""

    def forward(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        if not self.rate:
            return x
        seed = draw_seeds(1, x.device) if seed is None else seed
        return philox.drop_path(x, self.p, seed)


class Activation(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return ops.activation(self.name)(x)

    def extra_repr(self) -> str:
        return self.name


class LayerScale(nn.Module):
    def __init__(self, width: int, init: float, **made: Any) -> None:
        super().__init__()
        self.init = init
        self.gamma = nn.Parameter(torch.empty(width, **made))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PatchEmbed(nn.Module):
    """Image (B, C, Y, X) to patch rows (B, N, D); through a stem (`backbone`), if there is one.

    Its sizes are for code written for timm: nothing here depends on them.
    """

    def __init__(self, c: ViTConfig, **made: Any) -> None:
        super().__init__()
        self.set_size(c)
        if c.stem != "none":
            self.backbone = stem.build(c, **made)
        self.proj = nn.Conv2d(
            c.map_channels, c.width, c.patch_size, c.patch_size, bias=not c.pre_norm, **made
        )

    def set_size(self, c: ViTConfig) -> None:
        self.patch_size, self.grid_size = (c.patch_size, c.patch_size), c.grid
        self.img_size, self.num_patches = c.pixels, c.patches

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(self.feature_map(image)).flatten(2).transpose(1, 2)

    def feature_map(self, image: Tensor) -> Tensor:
        """What patches are cut from: the image itself without a stem."""
        backbone = self._modules.get("backbone")
        return image if backbone is None else backbone(image)


class Attention(nn.Module):
    def __init__(self, c: ViTConfig, **made: Any) -> None:
        super().__init__()
        D, E = c.width, c.head_dim
        self.heads, self.grid, self.prefix = c.heads, c.grid, c.prefix_tokens
        self.rope, self.rope_half, self.separate = c.rope, c.rope_half, c.separate_qkv
        if c.separate_qkv:
            self.q_proj = nn.Linear(D, D, bias=c.qkv_bias, **made)
            self.k_proj = nn.Linear(D, D, bias=c.qkv_bias and c.key_bias, **made)
            self.v_proj = nn.Linear(D, D, bias=c.qkv_bias, **made)
        else:
            self.qkv = nn.Linear(D, 3 * D, bias=c.qkv_bias and c.key_bias, **made)
        self.q_bias = self.v_bias = None
        if c.qkv_bias and not c.key_bias and not c.separate_qkv:
            self.q_bias = nn.Parameter(torch.empty(D, **made))
            self.v_bias = nn.Parameter(torch.empty(D, **made))
        self.q_norm = make_norm(c, E, **made) if c.qk_norm else nn.Identity()
        self.k_norm = make_norm(c, E, **made) if c.qk_norm else nn.Identity()
        self.attn_drop = Dropout(c.attention_dropout)
        self.norm = make_norm(c, D, **made) if c.attention_norm else nn.Identity()
        self.proj = nn.Linear(D, D, **made)
        self.proj_drop = Dropout(c.projection_dropout)
        self.relative_position_bias_table = None
        if c.position == "relative":
            entries = positions.relative_entries(c.grid, c.prefix_tokens)
            self.relative_position_bias_table = nn.Parameter(torch.empty(entries, c.heads, **made))
        self.rel_pos = None
        if c.position == "relative_mlp":
            self.rel_pos = relative.RelativeMlp(c.relative_width, c.heads, self.prefix, **made)

    def initialise(self) -> None:
        if self.relative_position_bias_table is not None:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def qkv_weight(self) -> Tensor:
        """Of queries, keys and values, one under the other: (3 D, D)."""
        if not self.separate:
            return self.qkv.weight
        return torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])

    def qkv_bias(self) -> Tensor | None:
        """(3 D,), with zeros for keys that have none; None without a bias."""
        if not self.separate and self.q_bias is None:
            return self.qkv.bias
        parts = [self.q_bias, None, self.v_bias]
        if self.separate:
            parts = [self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]
        if parts[0] is None or parts[2] is None:
            return None
        key = torch.zeros_like(parts[0]) if parts[1] is None else parts[1]
        return torch.cat([parts[0], key, parts[2]])

    def relative_bias(self, grid: positions.Grid) -> Tensor | None:
        """(H, S, S) for an image of this grid, or None without relative positions of its own."""
        table = self.relative_position_bias_table
        if self.rel_pos is not None:
            return self.rel_pos(grid)
        if table is None:
            return None
        return positions.relative_bias(table, self.heads, self.grid, grid, self.prefix)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, seeds: Tensor | None = None,
        rotation: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if bias is None:
            bias = self.relative_bias(self.grid)
        q, k, v = self.of_heads(x, rotation)
        bias = None if bias is None else bias.to(v.dtype)
        if not self.attn_drop.rate and not _hooked(self.attn_drop):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            y = self.attn_drop(attention_weights(q, k, bias), site(seeds, 0)).to(v.dtype) @ v
        y = self.proj(self.norm(y.transpose(1, 2).reshape(x.shape)))
        return self.proj_drop(y, site(seeds, 1))

    def of_heads(self, x: Tensor, rotation: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of rows x (B, S, D), each (B, H, S, E); rotation: a table of Rope."""
        B, S, D = x.shape
        qkv = self._projected(x).view(B, S, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        q, k = (turned(self, t, rotation) for t in (self.q_norm(q), self.k_norm(k)))
        return q.to(v.dtype), k.to(v.dtype), v

    def _projected(self, x: Tensor) -> Tensor:
        """q, k and v of rows x, one beside the other: (B, S, 3 D)."""
        if self.separate:
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        y = self.qkv(x)
        bias = None if self.q_bias is None else self.qkv_bias()
        return y if bias is None else y + bias.to(y.dtype)


def turned(attn: Any, x: Tensor, rotation: Tensor | None) -> Tensor:
    """Queries or keys (B, H, S, E) by their rotary positions, if there are any.

    attn: what has rope and rope_half. rotation: a table of Rope.
    """
    if attn.rope == "none":
        return x
    if rotation is None:
        raise ValueError(
            f"{type(attn).__name__}: a model with rotary positions needs their table for each call:"
            " pass rotation=model.rope.table(block, grid, x)"
        )
    return rotate(x, rotation, attn.rope_half)


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """What each query gives to each key: (B, H, queries, keys)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return (scores if bias is None else scores + bias).softmax(-1)


class Mlp(nn.Module):
    def __init__(self, c: ViTConfig, **made: Any) -> None:
        super().__init__()
        self.kind = c.mlp
        if c.mlp == "swiglu_split":
            self.fc1_g = nn.Linear(c.width, c.mlp_width, **made)
            self.fc1_x = nn.Linear(c.width, c.mlp_width, **made)
        else:
            self.fc1 = nn.Linear(c.width, c.hidden_rows, **made)
        self.act = Activation(c.activation)
        self.drop1 = Dropout(c.projection_dropout, philox.HIDDEN)
        self.norm = make_norm(c, c.mlp_width, **made) if c.mlp_norm else nn.Identity()
        self.fc2 = nn.Linear(c.mlp_width, c.width, **made)
        self.drop2 = Dropout(c.projection_dropout)

    def forward(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        if self.kind == "plain":
            hidden = self.act(self.fc1(x))
        else:
            split = self.kind == "swiglu_split"
            gate, value = (self.fc1_g(x), self.fc1_x(x)) if split else self.fc1(x).chunk(2, -1)
            hidden = self.act(gate) * value
        return self.drop2(self.fc2(self.norm(self.drop1(hidden, seed))), seed)

    def fc1_weight(self) -> Tensor:
        """Of the hidden rows; of all gates, then of the values they are for, where there are."""
        if self.kind != "swiglu_split":
            return self.fc1.weight
        return torch.cat([self.fc1_g.weight, self.fc1_x.weight])

    def fc1_bias(self) -> Tensor | None:
        if self.kind != "swiglu_split":
            return self.fc1.bias
        gate, value = self.fc1_g.bias, self.fc1_x.bias
        if gate is None and value is None:
            return None
        like = self.fc1_g.weight[:, 0]
        return torch.cat([torch.zeros_like(like) if b is None else b for b in (gate, value)])


class PreLogits(nn.Module):
    """The paper's pre-training head: a Linear and tanh before the classifier."""

    def __init__(self, width: int, size: int, **made: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(width, size, **made)
        self.act = Activation("tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """timm's initial weights: truncated normal (0.02) matrices and positions, zero biases."""
    for name, parameter in model.named_parameters(recurse=False):
        if name in ("cls_token", "dist_token", "reg_token"):
            nn.init.normal_(parameter, std=1e-6)
        else:
            nn.init.trunc_normal_(parameter, std=0.02)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.Conv2d):
            module.reset_parameters()
        elif isinstance(module, LayerScale):
            nn.init.constant_(module.gamma, module.init)
        elif callable(own := getattr(module, "initialise", None)):
            own()
