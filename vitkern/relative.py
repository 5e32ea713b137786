"""Relative positions that an MLP makes: biases of attention out of offsets' logarithms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from . import positions
from .config import ViTConfig
from .precision import without_autocast

_DROPPED = 0.125  # of the hidden columns while training, as timm


class _Mlp(nn.Module):
    """Linear, ReLU, Linear, with timm's names."""

    def __init__(self, hidden: int, heads: int, **made: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, hidden, **made)
        self.drop1 = nn.Dropout(_DROPPED)
        self.fc2 = nn.Linear(hidden, heads, **made)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop1(self.fc1(x).relu()))


class RelativeMlp(nn.Module):
    """Biases (H, S, S) for any grid; pairs with a prefix token have none."""

    def __init__(self, hidden: int, heads: int, prefix: int, **made: Any) -> None:
        super().__init__()
        self.prefix = prefix
        self.mlp = _Mlp(hidden, heads, **made)

    def forward(self, grid: positions.Grid) -> Tensor:
        weight = self.mlp.fc1.weight
        with without_autocast(weight):  # as the parameters: it is small
            table = self.mlp(positions.log_offsets(grid, weight))  # (offsets, H)
        index = positions.relative_index(grid, 0, table.device)
        T = self.prefix
        return nn.functional.pad(table[index].permute(2, 0, 1), (T, 0, T, 0))


def shared_by_blocks(c: ViTConfig, **made: Any) -> RelativeMlp | None:
    """The one that all blocks of a configuration share, if they do."""
    if c.position != "shared_relative_mlp":
        return None
    return RelativeMlp(c.relative_width, c.heads, c.prefix_tokens, **made)
