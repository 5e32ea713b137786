"""The modules of a ViT, with timm's names; their plain forward is the reference path.

There every module is called, so hooks fire and replaced modules are honoured. `Block.fused` is the
same block as four operators. Both take their dropout masks from the same seeds: they drop the same
elements.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops, philox, positions, relative, stem
from .config import ViTConfig


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
        self.qkv = nn.Linear(D, 3 * D, bias=c.qkv_bias and c.key_bias, **made)
        self.q_bias = self.v_bias = None
        if not c.key_bias:
            self.q_bias = nn.Parameter(torch.empty(D, **made))
            self.v_bias = nn.Parameter(torch.empty(D, **made))
        self.q_norm = make_norm(c, E, **made) if c.qk_norm else nn.Identity()
        self.k_norm = make_norm(c, E, **made) if c.qk_norm else nn.Identity()
        self.attn_drop = Dropout(c.attention_dropout)
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

    def bias(self) -> Tensor | None:
        """Of queries, keys and values, (3 D,), or None; keys' may be zero."""
        if self.q_bias is None or self.v_bias is None:
            return self.qkv.bias
        return torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])

    def relative_bias(self, grid: positions.Grid) -> Tensor | None:
        """(H, S, S) for an image of this grid, or None without relative positions of its own."""
        table = self.relative_position_bias_table
        if self.rel_pos is not None:
            return self.rel_pos(grid)
        if table is None:
            return None
        return positions.relative_bias(table, self.heads, self.grid, grid, self.prefix)

    def forward(self, x: Tensor, bias: Tensor | None = None, seeds: Tensor | None = None) -> Tensor:
        if bias is None:
            bias = self.relative_bias(self.grid)
        q, k, v = self.of_heads(x)
        bias = None if bias is None else bias.to(v.dtype)
        if not self.attn_drop.rate and not _hooked(self.attn_drop):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            y = self.attn_drop(attention_weights(q, k, bias), site(seeds, 0)).to(v.dtype) @ v
        y = self.proj(y.transpose(1, 2).reshape(x.shape))
        return self.proj_drop(y, site(seeds, 1))

    def of_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of rows x (B, S, D), each (B, H, S, E)."""
        B, S, D = x.shape
        qkv = self.qkv(x)
        if self.q_bias is not None and (bias := self.bias()) is not None:
            qkv = qkv + bias.to(qkv.dtype)
        qkv = qkv.view(B, S, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        return self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """What each query gives to each key: (B, H, queries, keys)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return (scores if bias is None else scores + bias).softmax(-1)


class Mlp(nn.Module):
    def __init__(self, c: ViTConfig, **made: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(c.width, c.mlp_width, **made)
        self.act = Activation(c.activation)
        self.drop1 = Dropout(c.projection_dropout, philox.HIDDEN)
        self.fc2 = nn.Linear(c.mlp_width, c.width, **made)
        self.drop2 = Dropout(c.projection_dropout)

    def forward(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)), seed)), seed)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `seeds` (3,): attention, projection, MLP."""

    def __init__(self, c: ViTConfig, index: int, **made: Any) -> None:
        super().__init__()

        def scale() -> nn.Module:
            if c.layer_scale is None:
                return nn.Identity()
            return LayerScale(c.width, c.layer_scale, **made)

        self.norm1 = make_norm(c, c.width, **made)
        self.attn = Attention(c, **made)
        self.ls1 = scale()
        self.drop_path1 = DropPath(c.drop_path_of(index))
        self.norm2 = make_norm(c, c.width, **made)
        self.mlp = Mlp(c, **made)
        self.ls2 = scale()
        self.drop_path2 = DropPath(c.drop_path_of(index))

    def forward(self, x: Tensor, bias: Tensor | None = None, seeds: Tensor | None = None) -> Tensor:
        projection, mlp = site(seeds, 1), site(seeds, 2)
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), bias, seeds)), projection)
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x), mlp)), mlp)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows that enter the block, each (B, H, S, E)."""
        return self.attn.of_heads(self.norm1(x))[:2]

    def fused(
        self, x: Tensor, bias: Tensor | None, seeds: Tensor | None, dtype: torch.dtype | None,
        offsets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The same as four operators; matrices are cast to `dtype` if given. (B, S, D).

        bias: (H, S, S) of the scores. offsets: of the images whose rows are x (1, S, D), which do
        not see each other; without relative positions and drop-path, which are an image's.
        """
        attn, mlp = self.attn, self.mlp
        qkv = norm_linear(self.norm1, x, cast(attn.qkv.weight, dtype), attn.bias())
        y = attend(attn, qkv, bias, site(seeds, 0), offsets)
        x = ops.linear_residual(
            y, cast(attn.proj.weight, dtype), attn.proj.bias, x, getattr(self.ls1, "gamma", None),
            dropout_p=attn.proj_drop.rate, drop_path_p=self.drop_path1.rate, seed=site(seeds, 1),
        )  # fmt: skip
        return fused_mlp(self.norm2, mlp, self.ls2, self.drop_path2, x, x, site(seeds, 2), dtype)


def attend(
    attn: Any, qkv: Tensor, bias: Tensor | None, seed: Tensor | None, offsets: Tensor | None = None
) -> Tensor:
    """Attention's operator on rows of queries, keys and values (B, S, 3 D): (B, S, D).

    attn: what has heads, q_norm, k_norm and attn_drop.
    """
    qkv = qkv.unflatten(-1, (3, attn.heads, -1))
    if not isinstance(attn.q_norm, nn.Identity):
        q, k, v = qkv.unbind(2)  # (B, S, H, E)
        qkv = torch.stack([layernorm(attn.q_norm, q), layernorm(attn.k_norm, k), v], 2)
    bias = bias[None] if bias is not None and bias.ndim == 3 else bias
    dropped = attn.attn_drop.rate
    return ops.attention(qkv, bias, dropout_p=dropped, seed=seed, offsets=offsets).flatten(2)


def fused_mlp(
    norm: Any, mlp: Any, scale: nn.Module, path: Any, x: Tensor, residual: Tensor,
    seed: Tensor | None, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """residual + scale * mlp(norm(x)): one operator if the norm is a LayerNorm, the residual x."""
    fc1, fc2, gamma = mlp.fc1, mlp.fc2, getattr(scale, "gamma", None)
    up, down = cast(fc1.weight, dtype), cast(fc2.weight, dtype)
    rates: dict[str, Any] = dict(dropout_p=mlp.drop1.rate, drop_path_p=path.rate, seed=seed)
    if residual is x and isinstance(norm, nn.LayerNorm):
        return ops.mlp(
            x, norm.weight, norm.bias, up, fc1.bias, down, fc2.bias, gamma,
            activation=mlp.act.name, eps=norm.eps, **rates,
        )  # fmt: skip
    hidden = mlp.drop1(norm_linear(norm, x, up, fc1.bias, mlp.act.name), seed)
    return ops.linear_residual(hidden, down, fc2.bias, residual, gamma, **rates)


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
