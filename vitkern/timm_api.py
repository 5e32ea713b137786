"""timm's methods of the module, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import layers, positions, timm_cfg, timm_keywords
from .config import ViTConfig
from .timm_keywords import POOLS


class TimmApi(nn.Module):
    """What code written for timm asks of a Vision Transformer; `vitkern.ViT` is the module."""

    config: ViTConfig
    if TYPE_CHECKING:  # what ViT has
        grad_checkpointing: bool
        blocks: nn.Sequential
        norm: nn.Module
        fc_norm: nn.Module
        head: nn.Module
        head_dist: nn.Module
        attn_pool: nn.Module | None
        distilled_training: bool
        patch_embed: layers.PatchEmbed
        pos_embed: nn.Parameter | None
        pos_embed_y: nn.Parameter | None
        pos_embed_x: nn.Parameter | None
        pretrained_name: str
        _pretrained_cfg: dict[str, Any] | None

        @property
        def patch_embed_weight(self) -> Tensor: ...
        def forward_blocks(
            self, image: Tensor, take: Sequence[int], stop: int, norm: bool = False,
            mask: Tensor | None = None,
        ) -> tuple[Tensor, list[Tensor]]: ...  # fmt: skip
        def make_head(self, **made: Any) -> None: ...
        def grid_of(self, image: Tensor) -> positions.Grid: ...
        def note_kinds(self) -> None: ...
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

    @property
    def num_reg_tokens(self) -> int:
        return self.config.registers

    @property
    def has_class_token(self) -> bool:
        return self.config.class_token

    @property
    def no_embed_class(self) -> bool:
        return not self.config.position_covers_prefix

    @property
    def in_chans(self) -> int:
        return self.config.channels

    @property
    def dynamic_img_size(self) -> bool:
        return self.config.dynamic_image_size

    @property
    def global_pool(self) -> str:
        return next(timms for timms, ours in POOLS.items() if ours == self.config.pool)

    # ---- what timm's tools read ----

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """How images are prepared for the model, in timm's words: size, mean, std, crop.

        What an accelerated timm model had, else what timm says of the name that it was built by
        (where timm is loaded) and its own sizes.
        """
        own = self._pretrained_cfg
        return timm_cfg.described(self.config, self.pretrained_name) if own is None else own

    @pretrained_cfg.setter
    def pretrained_cfg(self, value: dict[str, Any] | None) -> None:
        self._pretrained_cfg = value

    default_cfg = pretrained_cfg  # timm's older name

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Where `features_only` wrappers find features: a row for each block."""
        size = dict(num_chs=self.config.width, reduction=self.config.patch_pixels)
        return [dict(module=f"blocks.{i}", **size) for i in range(len(self.blocks))]

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
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """(final rows, [rows after the chosen blocks]); the list alone with `intermediates_only`.

        indices: the last n blocks if an int, all if None, else block numbers (negative: from the
        end).
        return_prefix_tokens: each item is a pair (patches, prefix rows).
        norm: apply the final norm to each. stop_early: run no block after the last one asked for.
        output_fmt: "NCHW" (B, D, y, x) or "NLC" (B, N, D).
        output_dict: the same by name: image_features, image_intermediates, and
        image_intermediates_prefix for the prefix rows.
        attn_mask: (S, S), or more axes that fit (B, H, S, S): True where a row (query) may look, or
        floats to add to the scores. is_causal: a row sees none after it. Both run in plain PyTorch.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(
                f"forward_intermediates: output_fmt must be NCHW or NLC, not {output_fmt!r}"
            )
        take = _block_numbers(indices, len(self.blocks))
        stop = max(take) + 1 if stop_early else len(self.blocks)
        mask = self.attention_mask(image, attn_mask, is_causal)
        x, kept = self.forward_blocks(image, take, stop, norm, mask)
        T = self.config.prefix_tokens
        patches: list[Any] = [y[:, T:] for y in kept]
        if output_fmt == "NCHW":
            down, across = self.grid_of(image)
            patches = [y.transpose(1, 2).reshape(y.shape[0], -1, down, across) for y in patches]
        prefixes = [y[:, :T] for y in kept] if return_prefix_tokens and T else []
        if output_dict:
            named: dict[str, Any] = {"image_intermediates": patches}
            if prefixes:
                named["image_intermediates_prefix"] = prefixes
            return named if intermediates_only else {**named, "image_features": self.norm(x)}
        if prefixes:
            patches = list(zip(patches, prefixes, strict=True))
        return patches if intermediates_only else (self.norm(x), patches)

    def get_intermediate_layers(
        self,
        image: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        attn_mask: Tensor | None = None,
    ) -> list:
        """DINO's interface to `forward_intermediates`."""
        fmt = "NCHW" if reshape else "NLC"
        return self.forward_intermediates(
            image, n, return_prefix_tokens, norm, output_fmt=fmt, intermediates_only=True,
            attn_mask=attn_mask,
        )  # fmt: skip

    def attention_mask(
        self, image: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor | None:
        """What a mask adds to the scores, (B?, H?, S, S); None without one."""
        if isinstance(image, torch.fx.Proxy):
            raise TypeError(
                "ViT: torch.fx cannot trace it; timm.utils.AttentionExtract and features take"
                ' method="hook", and torch.export traces'
            )
        if attn_mask is None and not is_causal:
            return None
        (down, across), like = self.grid_of(image), self.patch_embed_weight
        S = self.config.prefix_tokens + down * across
        if is_causal:  # in timm, too, it takes precedence
            return torch.full((S, S), -torch.inf, dtype=like.dtype, device=like.device).triu(1)
        if not isinstance(attn_mask, Tensor) or attn_mask.shape[-2:] != (S, S):
            shape = tuple(getattr(attn_mask, "shape", ()))
            raise ValueError(f"ViT: attn_mask must end in two axes of {S} rows, not {shape}")
        if attn_mask.dtype == torch.bool:
            return torch.zeros_like(attn_mask, dtype=like.dtype).masked_fill(~attn_mask, -torch.inf)
        return attn_mask.to(like.dtype)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop the blocks after the last one of `indices`, and what follows; their numbers."""
        take = _block_numbers(indices, len(self.blocks))
        self.check_weights("dropping blocks")
        last = max(take)
        self.blocks = nn.Sequential(*list(self.blocks)[: last + 1])
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
        places = {"before_pool": self.norm, "after_pool": self.fc_norm}
        left = [place for place, norm in places.items() if isinstance(norm, nn.LayerNorm)]
        c = self.config
        self.config = c.replace(
            depth=last + 1, drop_path=c.drop_path_of(last), final_norm=left[0] if left else "none"
        )
        if prune_head:
            self.reset_classifier(0, "")
        else:
            self.note_kinds()
        return take

    # ---- training ----

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimizer should not decay."""
        learned = ("relative_position_bias_table", "rope.freqs")
        tables = {n for n, _ in self.named_parameters() if n.endswith(learned)}
        return {n for n in positions.ROWS if getattr(self, n) is not None} | tables

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that sort parameters by depth, for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|dist_token|reg_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward instead of keeping what it saves."""
        self.grad_checkpointing = enable

    # ---- another head, another size ----

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """The head; both of head="distilled"."""
        return (self.head, self.head_dist) if self.config.head == "distilled" else self.head

    def set_distilled_training(self, enable: bool = True) -> None:
        """Whether a forward in training mode gives both heads' logits, not their average."""
        self.distilled_training = enable

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head (0 classes: none), zero as the paper fine-tunes; optionally another pool.

        global_pool: timm's name of a pool ("avg") or ViTConfig's ("mean").
        """
        pool = self.config.pool if global_pool is None else POOLS.get(global_pool, global_pool)
        classes = num_classes
        head = self.config.head if classes or self.config.head != "token_norm" else "linear"
        if head == "distilled" and pool != "token":
            raise ValueError('ViT.reset_classifier: head="distilled" reads tokens: pool="token"')
        if pool == "map" and self.attn_pool is None:
            raise ValueError("ViT.reset_classifier: attention pooling cannot be added to a model")
        if pool != "map":
            self.attn_pool = None
        self.config = self.config.replace(classes=classes, pool=pool, head=head)
        weight = self.patch_embed_weight
        self.make_head(device=weight.device, dtype=weight.dtype)
        for one in (self.head, self.head_dist):
            if isinstance(one, nn.Linear) and weight.device.type != "meta":
                nn.init.zeros_(one.weight)
                nn.init.zeros_(one.bias)

    @torch.no_grad()
    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        *,
        image_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Move to another image or patch size; learned positions are interpolated in 2-D.

        img_size, or image_size: pixels, one integer or (rows, columns).
        """
        if img_size is not None and image_size is not None:
            raise TypeError("ViT: img_size is timm's word for image_size; give one of the two")
        image_size = img_size if image_size is None else image_size
        old, sizes = self.config, {"image_size": image_size, "patch_size": patch_size}
        given = {name: size for name, size in sizes.items() if size is not None}
        c = old.replace(**timm_keywords.fields(given, old))
        if c.patch_size != old.patch_size:
            self.check_weights("another patch size")
            proj = self.patch_embed.proj
            proj.weight = _like(proj.weight, positions.resize_patch(proj.weight, c.patch_size))
            proj.kernel_size = proj.stride = (c.patch_size, c.patch_size)
        self.patch_embed.set_size(c)
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
