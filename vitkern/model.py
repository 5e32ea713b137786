"""The Vision Transformer: one module, one forward pass through the fused operators.

A block is norm_linear -> attention -> linear_residual -> mlp. `layers.py` has the same model module
by module (the reference path), `engine.py` as one native call; `paths.py` says which runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import dispatch as paths
from . import layers, ops, positions
from .config import ViTConfig
from .interface import Interface


class ViT(Interface):
    """A Vision Transformer with timm's state-dict names and methods.

    >>> model = ViT("B/16")                              # or "vit_base_patch16_224"
    >>> model = ViT("B/16", image_size=384, classes=10)  # any field of ViTConfig by name
    >>> model = ViT(ViTConfig(width=192, heads=3, mlp_width=768))

    Images are (B, C, Y, X) in the model's dtype, already normalised, or uint8 when the
    configuration has mean and std. NaN in an image comes out as NaN in that image's result and
    no other's.

    path: "auto", or "engine", "fused", "reference" to force one (an error when it is impossible).
    """

    def __init__(
        self,
        config: ViTConfig | str = "B/16",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **changes: Any,
    ) -> None:
        super().__init__()
        if isinstance(config, str):
            c = ViTConfig.named(config, **changes)
        elif isinstance(config, ViTConfig):
            c = config.replace(**changes)
        else:
            raise TypeError(
                f"ViT: config must be a ViTConfig or a name, not {type(config).__name__}"
            )
        made = {"device": device, "dtype": dtype}
        D, T = c.width, c.prefix_tokens

        def rows(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(1, count, D, **made)) if count else None

        self.config = c
        self._path, self._precision, self.grad_checkpointing = "auto", None, False
        self._engines: dict[str, Any] = {}
        self._watcher: paths.Watch | None = None

        self.patch_embed = layers.PatchEmbed(c, **made)
        self.cls_token = rows(int(c.class_token))
        self.reg_token = rows(c.registers)
        learned = c.patches + (T if c.position_covers_prefix else 0)
        self.pos_embed = rows(learned if c.position == "learned" else 0)
        self.pos_embed_y = rows(c.grid[0] if c.position == "learned_2d" else 0)
        self.pos_embed_x = rows(c.grid[1] if c.position == "learned_2d" else 0)
        self.pos_drop = layers.Dropout(c.dropout)
        self.norm_pre = nn.LayerNorm(D, c.norm_eps, **made) if c.pre_norm else nn.Identity()
        self.blocks = nn.Sequential(*(layers.Block(c, i, **made) for i in range(c.depth)))

        def norm(place: str) -> nn.Module:
            return nn.LayerNorm(D, c.norm_eps, **made) if c.final_norm == place else nn.Identity()

        self.norm, self.fc_norm = norm("before_pool"), norm("after_pool")
        size = (c.representation_size or D) if c.head == "tanh" else D
        self.pre_logits = layers.PreLogits(D, size, **made) if c.head == "tanh" else nn.Identity()
        self.head_drop = layers.Dropout(c.head_dropout)
        self.head = nn.Linear(size, c.classes, **made) if c.classes else nn.Identity()
        self.head_norm = (
            nn.LayerNorm(c.classes, **made) if c.head == "token_norm" else nn.Identity()
        )
        if torch.device(device or "cpu").type != "meta":
            layers.initialise(self)
        self._remember_modules()

    # ---- the forward pass ----

    def forward(self, image: Tensor) -> Tensor:
        """Logits (B, classes); (B, D) without a head, (B, S, ...) with pool="none"."""
        path = self._choose(image, "logits")
        if path == "engine":
            return self._outward(self._engine().logits(image))
        seeds = self._seeds(image.device)
        if path == "reference":
            with self._reference_precision():
                x = self.norm(self._blocks(self._embed(image, seeds), image, seeds))
                y = self._head(x, seeds)
            return self._outward(y)
        x = self._fused_blocks(self._fused_embed(image, seeds), image, seeds)
        return self._outward(self._fused_head(x, seeds))

    def forward_features(self, image: Tensor) -> Tensor:
        """All rows after the last block and the final norm: (B, S, D)."""
        path = self._choose(image, "tokens")
        if path == "engine":
            return self._engine().tokens(image)
        seeds = self._seeds(image.device)
        if path == "reference":
            with self._reference_precision():
                return self.norm(self._blocks(self._embed(image, seeds), image, seeds))
        return self._normed(self._fused_blocks(self._fused_embed(image, seeds), image, seeds))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool and classify `forward_features`' rows; `pre_logits` stops before the classifier."""
        return self._head(x, None, pre_logits)

    def _fused_embed(self, image: Tensor, seeds: Tensor | None) -> Tensor:
        proj = self.patch_embed.proj
        prefix, position = self.position_rows(*self._grid(image))
        mean, std = self._pixel_stats(image)
        # Under autocast too in the model's own dtype: its result is the fp32 residual stream.
        x = ops.patch_embed(
            image, proj.weight, proj.bias, prefix, position, mean, std,
            dropout_p=self.pos_drop.rate, seed=_site(seeds, 0),
        )  # (B, S, D)  # fmt: skip
        if isinstance(self.norm_pre, nn.Identity):
            return x
        return ops.layernorm(x, self.norm_pre.weight, self.norm_pre.bias, eps=self.norm_pre.eps)

    def _fused_blocks(self, x: Tensor, image: Tensor, seeds: Tensor | None) -> Tensor:
        for i in range(len(self.blocks)):
            x = self._one_block(i, x, image, seeds, fused=True)
        return x

    def _fused_head(self, x: Tensor, seeds: Tensor | None) -> Tensor:
        """Final norm, pooling, head; the norm works row by row, so a token is picked before it."""
        norm, pool, dtype = self.norm, self.config.pool, paths.compute_dtype(self)
        if pool == "token":
            x = x[:, 0]
        if pool == "mean":
            x = self._normed(x)[:, self.config.prefix_tokens :].mean(1)
            norm = nn.Identity()
        if isinstance(norm, nn.Identity):
            norm = self.fc_norm
        linear = isinstance(self.head, nn.Linear) and isinstance(self.pre_logits, nn.Identity)
        plain = linear and self.config.head == "linear" and not self.head_drop.rate
        if plain and not isinstance(norm, nn.Identity):
            weight = _cast(self.head.weight, dtype)
            return ops.norm_linear(x, norm.weight, norm.bias, weight, self.head.bias, eps=norm.eps)
        if not isinstance(norm, nn.Identity):
            x = ops.layernorm(x, norm.weight, norm.bias, eps=norm.eps)
        with self._reference_precision():
            return self._classify(x, seeds)

    # ---- the same, module by module ----

    def _embed(self, image: Tensor, seeds: Tensor | None) -> Tensor:
        mean, std = self._pixel_stats(image)
        if mean is not None:
            image = (image.to(mean.dtype) / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
        # Under autocast, too, the residual stream has the model's dtype.
        x = self.patch_embed(image).to(self.patch_embed_weight.dtype)  # (B, N, D)
        prefix, position = self.position_rows(*self._grid(image))
        if position is not None:
            x = x + position
        if prefix is not None:
            x = torch.cat([prefix.expand(x.shape[0], -1, -1), x.to(prefix.dtype)], 1)
        return self.norm_pre(self.pos_drop(x, _site(seeds, 0)))

    def _blocks(self, x: Tensor, image: Tensor, seeds: Tensor | None) -> Tensor:
        for i in range(len(self.blocks)):
            x = self._one_block(i, x, image, seeds, fused=False)
        return x

    def _head(self, x: Tensor, seeds: Tensor | None, pre_logits: bool = False) -> Tensor:
        if self.config.pool == "token":
            x = x[:, 0]
        elif self.config.pool == "mean":
            x = x[:, self.config.prefix_tokens :].mean(1)
        return self._classify(self.fc_norm(x), seeds, pre_logits)

    def _classify(self, x: Tensor, seeds: Tensor | None, pre_logits: bool = False) -> Tensor:
        """Everything after pooling and norm. The token_norm head is defined over all rows and then
        takes the class token's; as it works row by row, taking that row first is the same."""
        seed = None if seeds is None else seeds[-1:]
        x = self.pre_logits(x)
        if self.config.head != "token_norm":
            x = self.head_drop(x, seed)
            return x if pre_logits else self.head(x)
        if pre_logits:
            return x
        return self.head_norm(self.head_drop(F.gelu(self.head(x)), seed))

    # ---- positions ----

    def position_rows(self, grid_y: int, grid_x: int) -> tuple[Tensor | None, Tensor | None]:
        """Prefix rows (T, D) with their positions added, and patch positions (N, D), for a grid."""
        c, grid = self.config, (grid_y, grid_x)
        T, like = c.prefix_tokens, self.patch_embed_weight
        counts = {"cls_token": int(c.class_token), "reg_token": c.registers}
        tokens = [self._rows(name, count) for name, count in counts.items() if count]
        prefix, position, ahead = torch.cat(tokens) if tokens else None, None, None
        if c.position == "learned":
            rows = self._rows("pos_embed", c.patches + (T if c.position_covers_prefix else 0))
            if c.position_covers_prefix:
                ahead, rows = rows[:T], rows[T:]
            position = positions.resize(rows, c.grid, grid)
        elif c.position == "learned_2d":
            down = self._rows("pos_embed_y", c.grid[0])
            across = self._rows("pos_embed_x", c.grid[1])
            position = positions.rows_and_columns(down, across, grid)
        elif c.position == "sincos_1d":
            covered = T if c.position_covers_prefix else 0
            rows = positions.sincos_1d(covered + grid_y * grid_x, c.width, like)
            ahead, position = rows[:covered] if covered else None, rows[covered:]
        elif c.position == "sincos_2d":
            position = positions.sincos_2d(grid, c.width, like)
        if prefix is not None and ahead is not None:
            prefix = prefix + ahead
        return prefix, position

    def _rows(self, name: str, count: int) -> Tensor:
        """A parameter (1, count, D) as rows; a ValueError where it was replaced by another."""
        value, wanted = getattr(self, name), (1, count, self.config.width)
        if value is None or value.shape != wanted:
            found = "None" if value is None else f"of shape {tuple(value.shape)}"
            raise ValueError(
                f"ViT: {name} is {found}, the configuration makes {wanted}; set_input_size changes"
                f" the image size, and with it the positions"
            )
        return value[0]

    def attention_bias(self, block: int, grid_y: int, grid_x: int) -> Tensor | None:
        """What a block adds to its scores: (H, S, S), or None without relative positions."""
        attn = getattr(self.blocks[block], "attn", None)
        return attn.relative_bias((grid_y, grid_x)) if isinstance(attn, layers.Attention) else None

    def _one_block(
        self, i: int, x: Tensor, image: Tensor, seeds: Tensor | None, fused: bool
    ) -> Tensor:
        block, grid, seeds = self.blocks[i], self._grid(image), _block_seeds(seeds, i)
        if fused:
            return self._run(fused_block, block, x, grid, seeds, paths.compute_dtype(self))
        return self._run(_module_block, block, x, self.attention_bias(i, *grid), seeds)

    def _run(self, function: Any, *args: Any) -> Tensor:
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False)
        return function(*args)

    def _reference_precision(self) -> contextlib.AbstractContextManager:
        dtype = paths.compute_dtype(self)
        if dtype is None or torch.is_autocast_enabled(self.device.type):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype)

    def _normed(self, x: Tensor) -> Tensor:
        if isinstance(self.norm, nn.Identity):
            return x
        return ops.layernorm(x, self.norm.weight, self.norm.bias, eps=self.norm.eps)


def fused_block(
    block: layers.Block,
    x: Tensor,
    grid: positions.Grid,
    seeds: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One block, (B, S, D) -> (B, S, D), as four operators; matrices cast to `dtype` if given."""
    attn, mlp = block.attn, block.mlp
    B, S, D = x.shape
    qkv = ops.norm_linear(
        x, block.norm1.weight, block.norm1.bias, _cast(attn.qkv.weight, dtype), attn.qkv.bias,
        eps=block.norm1.eps,
    ).view(B, S, 3, attn.heads, D // attn.heads)  # fmt: skip
    if not isinstance(attn.q_norm, nn.Identity):
        q, k, v = qkv.unbind(2)  # (B, S, H, E)
        q = ops.layernorm(q, attn.q_norm.weight, attn.q_norm.bias, eps=attn.q_norm.eps)
        k = ops.layernorm(k, attn.k_norm.weight, attn.k_norm.bias, eps=attn.k_norm.eps)
        qkv = torch.stack([q, k, v], 2)
    bias = attn.relative_bias(grid)  # (H, S, S) or None
    y = ops.attention(
        qkv, None if bias is None else bias[None],
        dropout_p=attn.attn_drop.rate, seed=_site(seeds, 0),
    )  # (B, S, H, E)  # fmt: skip
    x = ops.linear_residual(
        y.flatten(2), _cast(attn.proj.weight, dtype), attn.proj.bias, x,
        getattr(block.ls1, "gamma", None),
        dropout_p=attn.proj_drop.rate, drop_path_p=block.drop_path1.rate, seed=_site(seeds, 1),
    )  # fmt: skip
    return ops.mlp(
        x, block.norm2.weight, block.norm2.bias, _cast(mlp.fc1.weight, dtype), mlp.fc1.bias,
        _cast(mlp.fc2.weight, dtype), mlp.fc2.bias, getattr(block.ls2, "gamma", None),
        activation=mlp.act.name, eps=block.norm2.eps,
        dropout_p=mlp.drop1.rate, drop_path_p=block.drop_path2.rate, seed=_site(seeds, 2),
    )  # fmt: skip


def _module_block(block: nn.Module, x: Tensor, bias: Tensor | None, seeds: Tensor | None) -> Tensor:
    return block(x, bias, seeds) if isinstance(block, layers.Block) else block(x)


def _cast(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight if dtype is None else weight.to(dtype)


def _site(seeds: Tensor | None, index: int) -> Tensor | None:
    return None if seeds is None else seeds[index : index + 1]


def _block_seeds(seeds: Tensor | None, block: int) -> Tensor | None:
    """Seeds of one block's three sites; site 0 is the embedding's, the last one the head's."""
    return None if seeds is None else seeds[1 + 3 * block : 4 + 3 * block]
