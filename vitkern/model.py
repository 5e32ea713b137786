"""The Vision Transformer: one module and its forward pass.

A forward takes one of three paths (dispatch.py says which, and why): a packed engine (engines/),
the fused operators (`fused_forward`, four a block or more: blocks.py), or every module in plain
PyTorch (`reference_forward`). timm's methods are in timm_api.py, those about a model in
model_tools.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import blocks, dispatch, layers, ops, packed, positions, precision, timm_keywords
from .config import ViTConfig
from .head import AttentionPool, classified, classifiers, pooled, rows_read
from .model_tools import ModelTools
from .relative import shared_by_blocks
from .rotary import Rope
from .timm_api import TimmApi
from .weight_memory import WeightMemory

Places = tuple[Tensor | None, Tensor | None]  # what a block adds to scores, and turns q and k by


class ViT(TimmApi, WeightMemory, ModelTools):
    """A Vision Transformer with timm's state-dict names and methods.

    >>> model = ViT("B/16")                              # or "vit_base_patch16_224"
    >>> model = ViT("B/16", image_size=384, classes=10)  # any field of ViTConfig by name
    >>> model = ViT("B/16", img_size=384, num_classes=10)  # or by timm's keyword for it
    >>> model = ViT(ViTConfig(width=192, heads=3, mlp_width=768))

    Images are (B, C, Y, X) in the model's dtype, already normalised, or uint8 when the
    configuration has mean and std. NaN in an image comes out as NaN in that image's result and
    no other's.

    path: "auto", or "engine", "fused", "reference" to force one (an error when it is impossible).
    cuda_graphs: whether forwards of a shape that comes again are CUDA graphs on a GPU.
    """

    cuda_graphs: bool = True

    def __init__(
        self,
        config: ViTConfig | str = "B/16",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **changes: Any,
    ) -> None:
        super().__init__()
        if not isinstance(config, str | ViTConfig):
            raise TypeError(
                f"ViT: config must be a ViTConfig or a name, not {type(config).__name__}"
            )
        base = ViTConfig.named(config) if isinstance(config, str) else config
        c = base.replace(**timm_keywords.fields(changes, base))
        self.pretrained_name = config if isinstance(config, str) else ""
        self._pretrained_cfg = None
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        D = c.width
        self.config, self._path, self.grad_checkpointing = c, "auto", False
        self._precision: str | None = None
        self._engines = self._released = None

        def rows(name: str) -> nn.Parameter | None:
            count = positions.row_counts(c)[name]
            return nn.Parameter(torch.empty(1, count, D, **made)) if count else None

        def norm(wanted: bool) -> nn.Module:
            return layers.make_norm(c, D, **made) if wanted else nn.Identity()

        self.patch_embed = layers.PatchEmbed(c, **made)
        self.cls_token, self.reg_token = rows("cls_token"), rows("reg_token")
        self.dist_token, self.distilled_training = rows("dist_token"), False
        self.pos_embed = rows("pos_embed")
        self.pos_embed_y, self.pos_embed_x = rows("pos_embed_y"), rows("pos_embed_x")
        self.rope = None if c.rope == "none" else Rope(c, **made)
        self.pos_drop = layers.Dropout(c.dropout)
        self.norm_pre = norm(c.pre_norm)
        self.shared_rel_pos = shared_by_blocks(c, **made)
        self.blocks = nn.Sequential(*(blocks.build(c, i, **made) for i in range(c.depth)))
        self.norm = norm(c.final_norm == "before_pool")
        self.attn_pool = AttentionPool(c, **made) if c.pool == "map" else None
        self.fc_norm = norm(c.final_norm == "after_pool")
        size = self.head_hidden_size
        self.pre_logits = layers.PreLogits(D, size, **made) if c.head == "tanh" else nn.Identity()
        self.head_drop = layers.Dropout(c.head_dropout)
        self.make_head(**made)
        if torch.device(device or "cpu").type != "meta":
            layers.initialise(self)

    def make_head(self, **made: Any) -> None:
        """The classifier of the configuration, in the place of the one there was."""
        made_now = classifiers(self.config, self.head_hidden_size, **made)
        self.head, self.head_norm, self.head_dist = (part.train(self.training) for part in made_now)
        self.note_kinds()

    def note_kinds(self) -> None:
        """Every module is as it should be: note their classes, so that a replacement is seen."""
        self.kinds = {name: type(module) for name, module in self.named_modules() if name}
        self.repack()

    # ---- the forward pass ----

    def forward(
        self, image: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Logits (B, classes); (B, D) without a head, (B, S, ...) with pool="none".

        Of head="distilled" the average of both heads; in training mode, after
        `set_distilled_training()`, the pair of their logits.
        attn_mask, is_causal: as in `forward_intermediates`.
        """
        if attn_mask is not None or is_causal:
            rows = self.forward_features(image, attn_mask, is_causal)
            return self.outward(self.forward_head(rows))
        route = dispatch.choose(self, image, "logits")
        if route.engine is not None:
            return self.outward(route.engine.logits(image))
        if route.path == "fused":
            return self.outward(self.fused_forward(image, dispatch.compute_dtype(self)))
        return self.outward(self.reference_forward(image))

    def forward_features(
        self, image: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """All rows after the last block and the final norm: (B, S, D)."""
        if attn_mask is not None or is_causal:
            mask = self.attention_mask(image, attn_mask, is_causal)
            return self.norm(self.forward_blocks(image, (), len(self.blocks), mask=mask)[0])
        route = dispatch.choose(self, image, "tokens")
        if route.engine is not None:
            return route.engine.tokens(image)
        if route.path == "fused":
            return self.fused_forward(image, dispatch.compute_dtype(self), head=False)
        return self.reference_forward(image, head=False)

    def forward_packed(self, images: Sequence[Tensor], features: bool = False) -> Any:
        """Logits (n, classes) of n images (C, Y, X) of any sizes, in one call and without padding.

        Each has the bits of `model(image[None])`, whatever is in the list beside it. With
        `features`, or pool="none", a list of n tensors: (S, D) as `forward_features`, or (S, ...).
        """
        return packed.forward(self, images, features)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool and classify `forward_features`' rows; `pre_logits` stops before the classifier."""
        return classified(self, self.fc_norm(pooled(self, x)), None, pre_logits)

    def after_engine(self, x: Tensor) -> Tensor:
        """`forward_head` where no module is listened to: what an engine leaves to PyTorch."""
        return classified(self, self.fc_norm(pooled(self, x, fused=True)), None)

    @dispatch.at_precision
    def forward_blocks(
        self, image: Tensor, take: Sequence[int], stop: int, norm: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Rows (B, S, D) after the first `stop` blocks, and after each block of `take`, in order.

        norm: apply the final norm to those of `take`. mask (B?, H?, S, S): added to all scores.
        """
        route = dispatch.choose(self, image, "blocks" if mask is None else "masked")
        if route.engine is not None:
            return route.engine.blocks(image, take, stop, norm)
        fused = route.path == "fused"
        seeds = self._seeds(image.device)
        kept: dict[int, Tensor] = {}
        with self._reference_precision():
            dtype = dispatch.compute_dtype(self)
            x = self.fused_embed(image, seeds) if fused else self._embed(image, seeds)
            for i, places in enumerate(self._places(self.grid_of(image), stop, mask)):
                x = self._block(i, x, places, seeds, fused, dtype)
                if i in take:
                    kept[i] = self.norm(x) if norm else x
        return x, [kept[i] for i in sorted(kept)]

    # ---- the fused operators ----

    @dispatch.at_precision
    def fused_forward(
        self, image: Tensor, dtype: torch.dtype | None = None, head: bool = True
    ) -> Tensor:
        """Fused operators whatever `path` says, matrices cast to `dtype`; as `forward`, or without
        `head` as `forward_features`."""
        self.check_weights("the fused path")
        seeds = self._seeds(image.device)
        x = self.fused_embed(image, seeds)
        rows, last = rows_read(self) if head else None, len(self.blocks) - 1
        for i, places in enumerate(self._places(self.grid_of(image), len(self.blocks))):
            x = self._block(i, x, places, seeds, True, dtype, rows if i == last else None)
        return self.fused_head(x, seeds, dtype) if head else layers.layernorm(self.norm, x)

    @dispatch.at_precision
    def fused_embed(self, image: Tensor, seeds: Tensor | None) -> Tensor:
        proj = self.patch_embed.proj
        prefix, position = self.position_rows(*self.grid_of(image))
        image = self.feature_map(image)
        mean, std = self._pixel_stats(image)
        # Under autocast too in the model's own dtype: its result is the fp32 residual stream.
        x = ops.patch_embed(
            image, proj.weight, proj.bias, prefix, position, mean, std,
            dropout_p=self.pos_drop.rate, seed=layers.site(seeds, 0),
        )  # (B, S, D)  # fmt: skip
        return layers.layernorm(self.norm_pre, x)

    def fused_head(self, x: Tensor, seeds: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """Final norm, pooling, head; the norm works row by row, so a token is picked before it."""
        norm: nn.Module = self.norm
        if self.config.pool in ("mean", "map"):
            x, norm = layers.layernorm(norm, x), nn.Identity()
        x = pooled(self, x, fused=True)
        if isinstance(norm, nn.Identity):
            norm = self.fc_norm
        last, plain = self.head, isinstance(self.pre_logits, nn.Identity)
        plain = plain and self.config.head == "linear" and not self.head_drop.rate
        if plain and isinstance(last, nn.Linear) and isinstance(norm, nn.LayerNorm):
            weight = layers.cast(last.weight, dtype)
            return ops.norm_linear(x, norm.weight, norm.bias, weight, last.bias, eps=norm.eps)
        with self._reference_precision():
            return classified(self, layers.layernorm(norm, x), seeds)

    # ---- the same, module by module ----

    def reference_forward(self, image: Tensor, head: bool = True) -> Tensor:
        """The forward in plain PyTorch, whatever `path` says: every module is called."""
        self.check_weights("the reference path")
        seeds = self._seeds(image.device)
        with self._reference_precision():
            x = self._embed(image, seeds)
            for i, places in enumerate(self._places(self.grid_of(image), len(self.blocks))):
                x = self._block(i, x, places, seeds, False, None)
            x = self.norm(x)
            return classified(self, self.fc_norm(pooled(self, x)), seeds) if head else x

    def _embed(self, image: Tensor, seeds: Tensor | None) -> Tensor:
        # Under autocast, too, the residual stream has the model's dtype.
        x = self.patch_embed(self._normalised(image)).to(self.patch_embed_weight.dtype)  # (B, N, D)
        prefix, position = self.position_rows(*self.grid_of(image))
        if position is not None:
            x = x + position
        if prefix is not None:
            x = torch.cat([prefix.expand(x.shape[0], -1, -1), x.to(prefix.dtype)], 1)
        return self.norm_pre(self.pos_drop(x, layers.site(seeds, 0)))

    # ---- what the paths share ----

    def _block(
        self, i: int, x: Tensor, places: Places, seeds: Tensor | None, fused: bool,
        dtype: torch.dtype | None, rows: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Block `i`; its seeds are three: site 0 is the embedding's, the last one the head's."""
        block: Any = self.blocks[i]
        bias, turns = places
        own = None if seeds is None else seeds[1 + 3 * i : 4 + 3 * i]
        run: Callable[..., Tensor] = block
        given: tuple[Any, ...] = (x,)  # a foreign module in a block's place
        if fused:
            run, given = block.fused, (x, bias, own, dtype, None, turns)
            given += () if rows is None else (rows,)
        elif hasattr(block, "fused"):
            given = (x, bias, own, turns)
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(dispatch.at_precision(run, self), *given, use_reentrant=False)
        return run(*given)

    def position_rows(self, grid_y: int, grid_x: int) -> tuple[Tensor | None, Tensor | None]:
        """Prefix rows (T, D) with their positions added, and patch positions (N, D), for a grid."""
        rows = {name: getattr(self, name) for name in positions.ROWS}
        like = self.patch_embed_weight
        return positions.prefix_and_position(self.config, rows, (grid_y, grid_x), like)

    def attention_bias(self, block: int, grid_y: int, grid_x: int) -> Tensor | None:
        """What a block adds to its scores: (H, S, S), or None without relative positions."""
        if self.shared_rel_pos is not None:
            return self.shared_rel_pos((grid_y, grid_x))
        attn = getattr(self.blocks[block], "attn", None)
        return attn.relative_bias((grid_y, grid_x)) if isinstance(attn, layers.Attention) else None

    def _places(
        self, grid: positions.Grid, count: int, mask: Tensor | None = None
    ) -> Iterator[Places]:
        """`attention_bias` with a mask on top, and `rotation`, of one block after the other."""
        bias = None
        for i in range(count):
            if not i or self.shared_rel_pos is None:  # a shared one is made once
                bias = self.attention_bias(i, *grid)
                if mask is not None:
                    bias = mask if bias is None else mask + bias
            yield bias, self.rotation(i, grid)

    def rotation(self, block: int, grid: positions.Grid) -> Tensor | None:
        """The table of a block's rotary positions, (H or 1, S, E), or None without them."""
        rope = self.rope
        return None if rope is None else rope.table(block, grid, self.patch_embed_weight)

    def grid_of(self, image: Tensor) -> positions.Grid:
        """Patches down and across such an image."""
        p = self.config.patch_pixels
        return image.shape[2] // p, image.shape[3] // p

    def feature_map(self, image: Tensor) -> Tensor:
        """What patches are cut from: the image as it is, or the stem's map of its pixels."""
        if self.config.crop:
            (down, across), p = self.grid_of(image), self.config.patch_pixels
            image = image[:, :, : down * p, : across * p]
        if self.config.stem == "none":
            return image
        return self.patch_embed.feature_map(self._normalised(image))

    def _normalised(self, image: Tensor) -> Tensor:
        """Bytes as the floats that modules take."""
        mean, std = self._pixel_stats(image)
        if mean is None or std is None:
            return image
        return (image.to(mean.dtype) / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)

    def _pixel_stats(self, image: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """mean and std of the channels for a uint8 image; floats are taken as normalised."""
        if image.dtype != torch.uint8:
            return None, None
        made: dict[str, Any] = {"dtype": self.dtype, "device": image.device}
        return torch.tensor(self.config.mean, **made), torch.tensor(self.config.std, **made)

    def _seeds(self, device: torch.device) -> Tensor | None:
        """A seed per dropout site (embedding, three per block, head), drawn at once, or None."""
        if not self.training:
            return None
        if any(isinstance(m, layers.Dropout) and m.rate for m in self.modules()):
            return layers.draw_seeds(2 + 3 * len(self.blocks), device)
        return None

    def _reference_precision(self) -> contextlib.AbstractContextManager:
        dtype = dispatch.compute_dtype(self)
        if dtype is None or torch.is_autocast_enabled(self.device.type):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype)

    def outward(self, logits: Tensor) -> Tensor:
        """Logits in the dtype a Linear gives: autocast's where it is on, else the model's own."""
        if isinstance(logits, tuple):  # of two heads
            return tuple(map(self.outward, logits))
        if dispatch.autocast(logits):
            head = isinstance(self.head, nn.Linear)
            return logits.to(torch.get_autocast_dtype(logits.device.type)) if head else logits
        return logits if self._precision is None else logits.to(self.dtype)

    # ---- what it is ----

    @property
    def patch_embed_weight(self) -> Tensor:
        """The parameter whose dtype and device are the model's; if released, what has the same."""
        embed = self._modules["patch_embed"]  # not by attribute, which takes ten times as long
        proj = None if embed is None else embed._modules.get("proj")
        weight = None if proj is None else proj._parameters.get("weight")
        if weight is None:  # of a foreign embedding
            return next(self.parameters())
        return self._released.like if weight.is_meta and self._released else weight

    @property
    def has_own_embedding(self) -> bool:
        """Whether patch_embed is vitkern's module, which takes the configuration's images."""
        return isinstance(self._modules["patch_embed"], layers.PatchEmbed)

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.patch_embed_weight.device

    @property
    def path(self) -> str:
        """ "auto", or the path that every forward must take: "engine", "fused", "reference"."""
        return self._path

    @path.setter
    def path(self, value: str) -> None:
        if value not in dispatch.PATHS:
            raise ValueError(f"ViT.path must be one of {', '.join(dispatch.PATHS)}, not {value!r}")
        self._path = value

    @property
    def precision(self) -> str | None:
        """What matrices are multiplied in: "fp32", "tf32", "bf16", "int8", or None: its dtype (fp32
        on GPUs by torch's TF32 switches, which PyTorch's own and compiled parts follow always)."""
        return self._precision

    @precision.setter
    def precision(self, value: str | None) -> None:
        precision.check_choice("ViT.precision", value)
        self._precision = value
