"""BEiT's tables of relative positions, whose rows vitkern numbers in the same way."""

from __future__ import annotations

import math
from typing import Any

from ...positions import relative_entries
from .base import Checkpoint, Rule

OURS = "blocks.{i}.attn.relative_position_bias_table"


def table_rule(theirs: str, shared: str) -> list[Rule]:
    """Each block's own table; where all blocks share one, each gets it."""
    return [Rule(OURS, (theirs,)), Rule(OURS, (shared,))]


def image_size_of(c: Checkpoint, entries: int, prefix: int, patch: int, said: Any) -> Any:
    """The image size that a table is of: (2y - 1)(2x - 1) offsets, and three with a class token."""
    for size in (said, c.said.get("image_size")):
        pair = (size, size) if isinstance(size, int) else size
        if isinstance(pair, (list, tuple)) and len(pair) == 2:
            if all(isinstance(n, int) and n >= patch for n in pair):
                grid = (pair[0] // patch, pair[1] // patch)
                if relative_entries(grid, prefix) == entries:
                    return tuple(pair) if pair[0] != pair[1] else pair[0]
    side = (math.isqrt(max(entries - (3 if prefix else 0), 0)) + 1) // 2
    if not side or relative_entries((side, side), prefix) != entries:
        raise ValueError(
            f"a table of {entries} relative positions is of no square grid: say which"
            f" image_size=(rows, columns) it is of"
        )
    return side * patch
