"""Rotary positions: by which angles the queries and keys of a patch are turned.

A table (P, S, E) has for each of S rows the cosines of E/2 angles, then their sines; P is 1 where
all heads turn alike, else H. Class and register tokens have the angle 0. Angles are those of timm:

  axial   place * temperature^(-i / (E/4)), E/4 angles by y and as many by x (EVA-02, RoPE-ViT, PE)
  dinov3  2 pi * place / temperature^(i / (E/4)) with places in -1..1 from edge to edge
  mixed   x * freqs[0] + y * freqs[1], learned for every block, head and pair of channels
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from .config import ViTConfig

Grid = tuple[int, int]  # patches down, patches across

_GRIDS_KEPT = 16  # tables of image sizes that a model remembers


class Rope(nn.Module):
    """The tables of a model; with "mixed", `freqs` (2, depth, H, E/2) are its parameters."""

    def __init__(self, c: ViTConfig, **made: Any) -> None:
        super().__init__()
        self.config = c
        self.freqs: nn.Parameter | None = None
        if c.rope == "mixed":
            self.freqs = nn.Parameter(torch.empty(2, c.depth, c.heads, c.head_dim // 2, **made))
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def initialise(self) -> None:
        if self.freqs is not None:
            self.freqs.copy_(_initial_frequencies(self.config, self.freqs))

    def extra_repr(self) -> str:
        return f"{self.config.rope}, temperature={self.config.rope_temperature:g}"

    def table(self, block: int, grid: Grid, like: Tensor) -> Tensor:
        """Of a block for a grid of patches: (P, S, E), in like's dtype, fp32 at least."""
        c = self.config
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if self.freqs is not None:
            y, x = _places(c, grid, like.device, dtype)
            first, second = (x, y) if c.rope_x_first else (y, x)
            freqs = self.freqs[:, block].to(dtype)  # (2, H, E/2)
            angles = first[:, None] * freqs[0, :, None] + second[:, None] * freqs[1, :, None]
            return _with_prefix(angles, c.prefix_tokens)
        if torch.compiler.is_compiling():
            return _with_prefix(_angles(c, grid, like.device)[None], c.prefix_tokens).to(dtype)
        key = (grid, like.device, dtype)
        if key in self._known:
            return self._known[key]
        with torch.inference_mode(False), torch.no_grad():
            table = _with_prefix(_angles(c, grid, like.device)[None], c.prefix_tokens).to(dtype)
        if not _python_dispatch._len_torch_dispatch_stack():
            if len(self._known) >= _GRIDS_KEPT:
                self._known.clear()
            self._known[key] = table
        return table


def _places(
    c: ViTConfig, grid: Grid, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """y and x of every patch, (N,) each, in patches."""
    down, across = (
        torch.arange(n, device=device, dtype=dtype) + c.rope_offset for n in grid
    )  # fmt: skip
    if c.rope_grid is not None:
        down, across = down / grid[0] * c.rope_grid[0], across / grid[1] * c.rope_grid[1]
    return down.repeat_interleave(grid[1]), across.repeat(grid[0])


def _angles(c: ViTConfig, grid: Grid, device: torch.device) -> Tensor:
    """(N, E/2) of "axial" and "dinov3"; in float64 where the device has it."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    y, x = _places(c, grid, device, wide)
    bands = c.head_dim // 4
    rates = c.rope_temperature ** (-torch.arange(bands, device=device, dtype=wide) / bands)
    if c.rope == "dinov3":
        y, x = ((t + 0.5) / n * 2 - 1 for t, n in zip((y, x), grid, strict=True))
        rates = rates * (2 * math.pi)
    first, second = (x, y) if c.rope_x_first else (y, x)
    return torch.cat([first[:, None] * rates, second[:, None] * rates], 1)


def _with_prefix(angles: Tensor, prefix: int) -> Tensor:
    """Angles (P, N, E/2) as a table (P, prefix + N, E)."""
    angles = nn.functional.pad(angles, (0, 0, prefix, 0))
    return torch.cat([angles.cos(), angles.sin()], -1)


def _initial_frequencies(c: ViTConfig, like: Tensor) -> Tensor:
    """timm's initial `freqs`: the axial ones, turned by a random angle for every block and head."""
    E = c.head_dim
    steps = torch.arange(0, E, 4, device=like.device, dtype=torch.float32) / E
    size = c.rope_temperature**-steps  # (E/4)
    turn = torch.rand(c.depth, c.heads, 1, device=like.device) * (2 * math.pi)
    first, second = turn, turn + math.pi / 2
    return torch.stack(
        [
            torch.cat([size * first.cos(), size * second.cos()], -1),
            torch.cat([size * first.sin(), size * second.sin()], -1),
        ]
    ).to(like.dtype)
