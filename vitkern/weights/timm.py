"""timm's checkpoints: reads, checks and resizes them; the names are vitkern's own."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import positions
from ..config import ViTConfig
from . import files

if TYPE_CHECKING:
    from ..model import ViT


def load(
    model: ViT,
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    resize_positions: bool = False,
    strict: bool = True,
) -> Any:
    """Load a timm ViT/DeiT checkpoint (a file or a state dict) into a `vitkern.ViT`.

    resize_positions: interpolate learned positions of another image size to the model's, in 2-D.
    Files are read without running code from them (safetensors, or torch's weights_only).
    """
    state = files.unwrapped(source, "timm.load") if isinstance(source, Mapping) else read(source)
    found = classes(state, "timm.load")
    if found and model.config.classes and found != model.config.classes:
        raise ValueError(
            f"timm.load: the checkpoint has {found} classes, the model {model.config.classes};"
            f" build it with classes={found}, load, then call model.reset_classifier"
        )
    theirs = state.get("pos_embed")
    if resize_positions and theirs is not None and model.pos_embed is not None:
        state["pos_embed"] = _resized(theirs, model.config)
    return model.load_state_dict(state, strict=strict)


def classes(state: Mapping[str, Tensor], where: str) -> int:
    """How many classes a state dict's head names, 0 if it has none; `where` begins an error."""
    head = state.get("head.weight")
    if head is None:
        return 0
    if head.ndim != 2 or not head.numel():
        raise ValueError(
            f"{where}: head.weight has shape {tuple(head.shape)}, expected (classes, width)"
        )
    return head.shape[0]


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU; no code in the file is run (weights/files.py)."""
    return files.read(path, "timm.read")


def _resized(position: Tensor, c: ViTConfig) -> Tensor:
    T = c.prefix_tokens if c.position_covers_prefix else 0
    if position.ndim != 3 or position.shape[::2] != (1, c.width) or position.shape[1] <= T:
        raise ValueError(
            f"timm.load: pos_embed has shape {tuple(position.shape)}, expected"
            f" (1, {T} + positions, {c.width})"
        )
    side = math.isqrt(position.shape[1] - T)
    if side * side != position.shape[1] - T:
        raise ValueError(
            f"timm.load: {position.shape[1] - T} positions are not a square grid; build the model"
            f" at the checkpoint's image size, load, then call model.set_input_size"
        )
    rows = positions.resize(position[0, T:], (side, side), c.grid)
    return torch.cat([position[0, :T], rows])[None]
