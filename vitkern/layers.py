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

from . import ops, philox, positions, rotary, stem
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


def layernorm(norm: nn.Module, x: Tensor) -> Tensor:
    """A LayerNorm as one operator; nothing where there is an Identity in its place."""
    if not isinstance(norm, nn.LayerNorm):
        return x
    return ops.layernorm(x, norm.weight, norm.bias, eps=norm.eps)


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
        self.q_norm = nn.LayerNorm(E, c.norm_eps, **made) if c.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(E, c.norm_eps, **made) if c.qk_norm else nn.Identity()
        self.attn_drop = Dropout(c.attention_dropout)
        self.norm = nn.LayerNorm(D, c.norm_eps, **made) if c.attention_norm else nn.Identity()
        self.proj = nn.Linear(D, D, **made)
        self.proj_drop = Dropout(c.projection_dropout)
        self.relative_position_bias_table = None
        if c.position == "relative":
            entries = positions.relative_entries(c.grid, c.prefix_tokens)
            self.relative_position_bias_table = nn.Parameter(torch.empty(entries, c.heads, **made))

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
        """(H, S, S) for an image of this grid, or None without relative positions."""
        table = self.relative_position_bias_table
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
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope != "none":
            if rotation is None:
                raise ValueError(
                    "Attention: a model with rotary positions needs their table for each call:"
                    " pass rotation=model.rope.table(block, grid, x)"
                )
            q, k = (rotate(t, rotation, self.rope_half) for t in (q, k))
        return q.to(v.dtype), k.to(v.dtype), v

    def _projected(self, x: Tensor) -> Tensor:
        """q, k and v of rows x, one beside the other: (B, S, 3 D)."""
        if self.separate:
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        y = self.qkv(x)
        bias = None if self.q_bias is None else self.qkv_bias()
        return y if bias is None else y + bias.to(y.dtype)


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
        self.norm = nn.LayerNorm(c.mlp_width, c.norm_eps, **made) if c.mlp_norm else nn.Identity()
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


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `seeds` (3,): attention, projection, MLP."""

    def __init__(self, c: ViTConfig, index: int, **made: Any) -> None:
        super().__init__()

        def scale() -> nn.Module:
            if c.layer_scale is None:
                return nn.Identity()
            return LayerScale(c.width, c.layer_scale, **made)

        self.norm_place = c.norm_place
        self.norm1 = nn.LayerNorm(c.width, c.norm_eps, **made)
        self.attn = Attention(c, **made)
        self.ls1 = scale()
        self.drop_path1 = DropPath(c.drop_path_of(index))
        self.norm2 = nn.LayerNorm(c.width, c.norm_eps, **made)
        self.mlp = Mlp(c, **made)
        self.ls2 = scale()
        self.drop_path2 = DropPath(c.drop_path_of(index))

    def forward(
        self, x: Tensor, bias: Tensor | None = None, seeds: Tensor | None = None,
        rotation: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        projection, mlp = site(seeds, 1), site(seeds, 2)
        if self.norm_place == "after":
            y = self.norm1(self.attn(x, bias, seeds, rotation))
            x = x + self.drop_path1(y, projection)
            return x + self.drop_path2(self.norm2(self.mlp(x, mlp)), mlp)
        y = self.ls1(self.attn(self.norm1(x), bias, seeds, rotation))
        x = x + self.drop_path1(y, projection)
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x), mlp)), mlp)

    def fused(
        self, x: Tensor, grid: positions.Grid, seeds: Tensor | None, dtype: torch.dtype | None,
        offsets: Tensor | None = None, rotation: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The same as four operators or more; matrices are cast to `dtype` if given. (B, S, D).

        offsets: of the images whose rows are x (1, S, D), which do not see each other; without
        relative positions and drop-path, which are an image's. rotation (P, S, E): of all rows.
        """
        attn = self.attn
        B, S, D = x.shape
        qkv = ops.norm_linear(
            x, self.norm1.weight, self.norm1.bias, cast(attn.qkv_weight(), dtype), attn.qkv_bias(),
            eps=self.norm1.eps,
        ).view(B, S, 3, attn.heads, D // attn.heads)  # fmt: skip
        if not isinstance(attn.q_norm, nn.Identity):
            q, k, v = qkv.unbind(2)  # (B, S, H, E)
            qkv = torch.stack([layernorm(attn.q_norm, q), layernorm(attn.k_norm, k), v], 2)
        if rotation is not None:
            qkv = ops.rotary(qkv, rotation, half=attn.rope_half)
        bias = attn.relative_bias(grid)  # (H, S, S) or None
        y = ops.attention(
            qkv, None if bias is None else bias[None],
            dropout_p=attn.attn_drop.rate, seed=site(seeds, 0), offsets=offsets,
        )  # (B, S, H, E)  # fmt: skip
        x = ops.linear_residual(
            layernorm(attn.norm, y.flatten(2)), cast(attn.proj.weight, dtype), attn.proj.bias, x,
            getattr(self.ls1, "gamma", None),
            dropout_p=attn.proj_drop.rate, drop_path_p=self.drop_path1.rate, seed=site(seeds, 1),
        )  # fmt: skip
        return self._fused_mlp(x, seeds, dtype)

    def _fused_mlp(self, x: Tensor, seeds: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        mlp, seed = self.mlp, site(seeds, 2)
        if mlp.kind != "plain" or not isinstance(mlp.norm, nn.Identity):
            hidden = ops.norm_linear(
                x, self.norm2.weight, self.norm2.bias, cast(mlp.fc1_weight(), dtype),
                mlp.fc1_bias(), eps=self.norm2.eps,
                activation=mlp.act.name if mlp.kind == "plain" else "none",
            )  # fmt: skip
            if mlp.kind != "plain":
                hidden = ops.swiglu(hidden)
            return ops.linear_residual(
                layernorm(mlp.norm, mlp.drop1(hidden, seed)), cast(mlp.fc2.weight, dtype),
                mlp.fc2.bias, x, getattr(self.ls2, "gamma", None),
                dropout_p=mlp.drop2.rate, drop_path_p=self.drop_path2.rate, seed=seed,
            )  # fmt: skip
        return ops.mlp(
            x, self.norm2.weight, self.norm2.bias, cast(mlp.fc1.weight, dtype), mlp.fc1.bias,
            cast(mlp.fc2.weight, dtype), mlp.fc2.bias, getattr(self.ls2, "gamma", None),
            activation=mlp.act.name, eps=self.norm2.eps,
            dropout_p=mlp.drop1.rate, drop_path_p=self.drop_path2.rate, seed=seed,
        )  # fmt: skip


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
        if name in ("cls_token", "reg_token"):
            nn.init.normal_(parameter, std=1e-6)
        else:
            nn.init.trunc_normal_(parameter, std=0.02)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.Conv2d):
            module.reset_parameters()
        elif isinstance(module, LayerScale):
            nn.init.constant_(module.gamma, module.init)
        elif isinstance(module, Attention):
            if module.relative_position_bias_table is not None:
                nn.init.trunc_normal_(module.relative_position_bias_table, std=0.02)
            for bias in (module.q_bias, module.v_bias):
                if bias is not None:
                    nn.init.zeros_(bias)
        elif isinstance(module, rotary.Rope) and module.freqs is not None:
            module.freqs.copy_(rotary.initial_frequencies(module.config, module.freqs))
