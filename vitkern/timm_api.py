"""timm's methods of the module, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import layers, positions
from .config import ViTConfig

_TIMM_POOLS = {"avg": "mean", "": "none"}


class TimmApi(nn.Module):
    """What code written for timm asks of a Vision Transformer; `vitkern.ViT` is the module."""

    config: ViTConfig
    if TYPE_CHECKING:  # what ViT has
        grad_checkpointing: bool
        blocks: nn.Sequential
        norm: nn.Module
        head: nn.Module
        patch_embed: layers.PatchEmbed
        pos_embed: nn.Parameter | None
        pos_embed_y: nn.Parameter | None
        pos_embed_x: nn.Parameter | None

        @property
        def patch_embed_weight(self) -> Tensor: ...
        def forward_blocks(
            self, image: Tensor, take: Sequence[int], stop: int, norm: bool = False
        ) -> tuple[Tensor, list[Tensor]]: ...
        def make_head(self, **made: Any) -> None: ...
        def repack(self) -> None: ...
        def check_weights(self, what: str) -> None: ...

    # ---- sizes ----

    @property
    def num_classes(self) -> int:
        return self.config.classes

    @property
    def embed_dim(self) -> int:
        return self.config.width

    @property
    def num_features(self) -> int:
        return self.config.width

    @property
    def head_hidden_size(self) -> int:
        c = self.config
        return (c.representation_size or c.width) if c.head == "tanh" else c.width

    @property
    def num_prefix_tokens(self) -> int:
        return self.config.prefix_tokens

    # ---- features ----

    def forward_intermediates(
        self,
        image: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """(final rows, [rows after the chosen blocks]); the list alone with `intermediates_only`.

        indices: the last n blocks if an int, all if None, else block numbers (negative: from the
        end).
        return_prefix_tokens: each item is a pair (patches, prefix rows).
        norm: apply the final norm to each. stop_early: run no block after the last one asked for.
        output_fmt: "NCHW" (B, D, y, x) or "NLC" (B, N, D).
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(
                f"forward_intermediates: output_fmt must be NCHW or NLC, not {output_fmt!r}"
            )
        take = _block_numbers(indices, len(self.blocks))
        stop = max(take) + 1 if stop_early else len(self.blocks)
        x, kept = self.forward_blocks(image, take, stop, norm)
        T, p = self.config.prefix_tokens, self.config.patch_pixels
        patches: list[Any] = [y[:, T:] for y in kept]
        if output_fmt == "NCHW":
            down, across = image.shape[2] // p, image.shape[3] // p
            patches = [y.mT.reshape(y.shape[0], -1, down, across) for y in patches]
        if return_prefix_tokens and T:
            patches = list(zip(patches, [y[:, :T] for y in kept], strict=True))
        return patches if intermediates_only else (self.norm(x), patches)

    def get_intermediate_layers(
        self,
        image: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list:
        """DINO's interface to `forward_intermediates`."""
        fmt = "NCHW" if reshape else "NLC"
        return self.forward_intermediates(
            image, n, return_prefix_tokens, norm, output_fmt=fmt, intermediates_only=True
        )

    # ---- training ----

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimizer should not decay."""
        tables = {n for n, _ in self.named_parameters() if "relative_position_bias_table" in n}
        return {n for n in positions.ROWS if getattr(self, n) is not None} | tables

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that sort parameters by depth, for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|reg_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward instead of keeping what it saves."""
        self.grad_checkpointing = enable

    # ---- another head, another size ----

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, classes: int, pool: str | None = None) -> None:
        """A new head (0 classes: none), zero as the paper fine-tunes; optionally another pool."""
        pool = self.config.pool if pool is None else _TIMM_POOLS.get(pool, pool)
        head = self.config.head if classes or self.config.head != "token_norm" else "linear"
        self.config = self.config.replace(classes=classes, pool=pool, head=head)
        weight = self.patch_embed_weight
        self.make_head(device=weight.device, dtype=weight.dtype)
        if isinstance(self.head, nn.Linear) and weight.device.type != "meta":
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    @torch.no_grad()
    def set_input_size(
        self, image_size: int | tuple[int, int] | None = None, patch_size: int | None = None
    ) -> None:
        """Move to another image or patch size; learned positions are interpolated in 2-D."""
        old = self.config
        c = old.replace(
            image_size=old.image_size if image_size is None else image_size,
            patch_size=old.patch_size if patch_size is None else patch_size,
        )
        if c.patch_size != old.patch_size:
            self.check_weights("another patch size")
            proj = self.patch_embed.proj
            proj.weight = _like(proj.weight, positions.resize_patch(proj.weight, c.patch_size))
            proj.kernel_size = proj.stride = (c.patch_size, c.patch_size)
        T = old.prefix_tokens if old.position_covers_prefix else 0
        if self.pos_embed is not None and c.grid != old.grid:
            rows = self.pos_embed[0]
            moved = torch.cat([rows[:T], positions.resize(rows[T:], old.grid, c.grid)])
            self.pos_embed = _like(self.pos_embed, moved[None])
        if self.pos_embed_y is not None and self.pos_embed_x is not None and c.grid != old.grid:
            y = positions.resize(self.pos_embed_y[0], (old.grid[0], 1), (c.grid[0], 1))
            x = positions.resize(self.pos_embed_x[0], (1, old.grid[1]), (1, c.grid[1]))
            self.pos_embed_y = _like(self.pos_embed_y, y[None])
            self.pos_embed_x = _like(self.pos_embed_x, x[None])
        for attn in (m for m in self.modules() if isinstance(m, layers.Attention)):
            table = attn.relative_position_bias_table
            if table is not None and c.grid != old.grid:
                moved = positions.resize_relative(table, old.grid, c.grid, old.prefix_tokens)
                attn.relative_position_bias_table = _like(table, moved)
            attn.grid = c.grid
        self.config = c
        self.repack()


def _block_numbers(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    if indices is None:
        return list(range(depth))
    if isinstance(indices, int):
        if not 0 < indices <= depth:
            raise ValueError(
                f"forward_intermediates: last {indices} blocks of {depth} do not exist"
            )
        return list(range(depth - indices, depth))
    for i in indices:
        if not -depth <= i < depth:
            raise ValueError(f"forward_intermediates: block {i} does not exist, there are {depth}")
    return [i % depth for i in indices]


def _like(old: Tensor, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.contiguous(), requires_grad=old.requires_grad)
