"""All of the model that is not its arithmetic: timm's methods, changes of size and head, state."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import dispatch as paths
from . import images, layers, positions
from .config import ViTConfig

_TIMM_POOLS = {"avg": "mean", "": "none"}
_PACKING = threading.Lock()  # two threads must not pack the same weights at once


class Interface(nn.Module):
    config: ViTConfig

    # ---- what it is ----

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
    def patch_embed_weight(self) -> Tensor:
        """The parameter whose dtype and device are the model's."""
        proj = getattr(self.patch_embed, "proj", None)
        weight = getattr(proj, "weight", None)
        return weight if isinstance(weight, Tensor) else next(self.parameters())  # a foreign one

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
        if value not in paths.PATHS:
            raise ValueError(f"ViT.path must be one of {', '.join(paths.PATHS)}, not {value!r}")
        self._path = value

    @property
    def precision(self) -> str | None:
        """What matrices are multiplied in: "fp32", "tf32", "bf16", or None: its dtype."""
        return self._precision

    @precision.setter
    def precision(self, value: str | None) -> None:
        if value is not None and value not in paths.PRECISIONS:
            names = ", ".join(paths.PRECISIONS)
            raise ValueError(f"ViT.precision must be {names} or None, not {value!r}")
        self._precision = value

    def explain(self, image: Tensor | None = None) -> str:
        """Which path the next forward takes (of this image, if given) and why, in a few lines."""
        if image is not None:
            self._check(image)
        return paths.explain(self, image)

    def summary(self, image_size: int | tuple[int, int] | None = None, *, show: bool = True) -> Any:
        """Print and return a table of layers, shapes, parameters and multiply-adds."""
        from . import summary

        table = summary.summarise(self, image_size)
        if show:
            print(table.text)
        return table

    # ---- timm's interface ----

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
        take = self._take(indices)
        stop = max(take) + 1 if stop_early else len(self.blocks)
        x, kept = self._keep_blocks(image, set(take), stop, norm)
        T, (down, across) = self.config.prefix_tokens, self._grid(image)
        patches, prefix = [y[:, T:] for y in kept], [y[:, :T] for y in kept]
        if output_fmt == "NCHW":
            patches = [y.mT.reshape(y.shape[0], -1, down, across) for y in patches]
        if return_prefix_tokens and T:
            patches = list(zip(patches, prefix, strict=True))
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

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimizer should not decay."""
        names = {"pos_embed", "pos_embed_x", "pos_embed_y", "cls_token", "reg_token"}
        tables = {n for n, _ in self.named_parameters() if "relative_position_bias_table" in n}
        return {n for n in names if getattr(self, n) is not None} | tables

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that sort parameters by depth, for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|reg_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward instead of keeping what it saves."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    # ---- changes ----

    def reset_classifier(self, classes: int, pool: str | None = None) -> None:
        """A new head (0 classes: none), zero as the paper fine-tunes; optionally another pool."""
        pool = self.config.pool if pool is None else _TIMM_POOLS.get(pool, pool)
        head = self.config.head if classes or self.config.head != "token_norm" else "linear"
        self.config = self.config.replace(classes=classes, pool=pool, head=head)
        weight = self.patch_embed_weight
        made = {"device": weight.device, "dtype": weight.dtype}
        self.head = nn.Linear(self.head_hidden_size, classes, **made) if classes else nn.Identity()
        self.head_norm = nn.LayerNorm(classes, **made) if head == "token_norm" else nn.Identity()
        if classes and weight.device.type != "meta":
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        self.head.train(self.training)
        self.head_norm.train(self.training)
        self._remember_modules()

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
            proj = self.patch_embed.proj
            proj.weight = _like(proj.weight, positions.resize_patch(proj.weight, c.patch_size))
            proj.kernel_size = proj.stride = (c.patch_size, c.patch_size)
        T = old.prefix_tokens if old.position_covers_prefix else 0
        if self.pos_embed is not None and c.grid != old.grid:
            rows = self.pos_embed[0]
            moved = torch.cat([rows[:T], positions.resize(rows[T:], old.grid, c.grid)])
            self.pos_embed = _like(self.pos_embed, moved[None])
        if self.pos_embed_y is not None and c.grid != old.grid:
            y, x = self.pos_embed_y[0], self.pos_embed_x[0]
            y = positions.resize(y, (old.grid[0], 1), (c.grid[0], 1))
            x = positions.resize(x, (1, old.grid[1]), (1, c.grid[1]))
            self.pos_embed_y, self.pos_embed_x = (
                _like(self.pos_embed_y, y[None]),
                _like(self.pos_embed_x, x[None]),
            )
        for attn in (m for m in self.modules() if isinstance(m, layers.Attention)):
            table = attn.relative_position_bias_table
            if table is not None and c.grid != old.grid:
                moved = positions.resize_relative(table, old.grid, c.grid, old.prefix_tokens)
                attn.relative_position_bias_table = _like(table, moved)
            attn.grid = c.grid
        self.config = c
        self._forget()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As nn.Module's, with timm's names; another image size's positions are refused by name."""
        theirs = state_dict.get("pos_embed") if isinstance(state_dict, Mapping) else None
        ours = self.pos_embed
        if isinstance(theirs, Tensor) and ours is not None and theirs.ndim == ours.ndim:
            if theirs.shape != ours.shape and theirs.shape[-1] == ours.shape[-1]:
                raise RuntimeError(
                    f"ViT.load_state_dict: pos_embed has {theirs.shape[1]} positions, the model"
                    f" {ours.shape[1]}: the checkpoint is of another image size. Build the model at"
                    f" that size, load, then call model.set_input_size; or use"
                    f" vitkern.weights.timm.load(model, state, resize_positions=True)"
                )
        self._forget()
        return super().load_state_dict(state_dict, strict, assign)

    # ---- what the forward pass asks ----

    def _check(self, image: Tensor) -> None:
        if isinstance(self.patch_embed, layers.PatchEmbed):
            images.check(self.config, image, self.patch_embed_weight, self._autocast())

    def _choose(self, image: Tensor, want: str) -> str:
        self._check(image)
        return paths.choose(self, image, want)[0]

    def _grid(self, image: Tensor) -> positions.Grid:
        p = self.config.patch_size
        return image.shape[2] // p, image.shape[3] // p

    def _pixel_stats(self, image: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """mean and std of the channels for a uint8 image; floats are taken as normalised."""
        if image.dtype != torch.uint8:
            return None, None
        made = {"dtype": self.dtype, "device": image.device}
        return torch.tensor(self.config.mean, **made), torch.tensor(self.config.std, **made)

    def _seeds(self, device: torch.device) -> Tensor | None:
        """A seed per dropout site (embedding, three per block, head), drawn at once, or None."""
        if not self.training:
            return None
        sites = 2 + 3 * len(self.blocks)
        if any(isinstance(m, layers.Dropout) and m.rate for m in self.modules()):
            return layers.draw_seeds(sites, device)
        return None

    def _engine(self) -> Any:
        """The packed engine of the current precision, of the weights as they are."""
        from .engines.base import current, just_seen

        if self.device.type == "cuda":
            from .engines.gpu import GpuEngine as Engine
        else:
            from .engines.cpu import Engine
        precision = paths.precision_of(self)
        with _PACKING:
            engine = self._engines.get(precision)
            if engine is not None and not just_seen(engine):  # paths.choose looked at another
                engine = current(self, precision)
            if engine is None:
                engine = self._engines[precision] = Engine(self, precision)
        return engine

    def _outward(self, logits: Tensor) -> Tensor:
        """Logits in the dtype a Linear gives: autocast's where it is on, else the model's own."""
        if self._autocast():
            head = isinstance(self.head, nn.Linear)
            return logits.to(torch.get_autocast_dtype(self.device.type)) if head else logits
        return logits if self._precision is None else logits.to(self.dtype)

    def _autocast(self) -> bool:
        device = self.device.type
        return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)

    def _keep_blocks(
        self, image: Tensor, take: set[int], stop: int, norm: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the first `stop` blocks and keep the results of those in `take`."""
        fused = self._choose(image, "blocks") == "fused"
        seeds, kept = self._seeds(image.device), []
        with self._reference_precision():
            x = self._fused_embed(image, seeds) if fused else self._embed(image, seeds)
            for i in range(stop):
                x = self._one_block(i, x, image, seeds, fused)
                if i in take:
                    kept.append(self.norm(x) if norm else x)
        return x, kept

    def _take(self, indices: int | Sequence[int] | None) -> list[int]:
        depth = len(self.blocks)
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
                raise ValueError(
                    f"forward_intermediates: block {i} does not exist, there are {depth}"
                )
        return [i % depth for i in indices]

    # ---- state ----

    def _remember_modules(self) -> None:
        """Note which module stands where, so that a later replacement is seen."""
        self._kinds = {name: type(module) for name, module in self.named_modules() if name}
        self._forget()

    def _watch(self) -> paths.Watch:
        watcher = self._watcher
        if watcher is None or not watcher.current():
            if watcher is not None:
                self._engines = {}  # they hold the weights of the modules that were replaced
            watcher = self._watcher = paths.Watch(self, self._kinds)
        return watcher

    def repack(self) -> None:
        """Drop the packed weights; needed after writes through `parameter.data` that nothing shows.

        On the CPU those to a part of a parameter, on a GPU all of them.
        """
        self._forget()

    def _forget(self) -> None:
        self._engines, self._watcher = {}, None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._forget()
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> Any:
        if mode:
            self._engines = {}  # training will change the weights; do not hold two copies meanwhile
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engines": {}, "_watcher": None}


def _like(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.contiguous(), requires_grad=old.requires_grad)
