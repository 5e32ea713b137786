"""Where a patch is: learned, fixed and relative positions, and how they move to another grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]  # patches down, patches across


def resize(position: Tensor, old: Grid, new: Grid) -> Tensor:
    """Rows (N, D) of a grid moved to another grid: bicubic with antialiasing, as timm does."""
    if old == new:
        return position
    dtype, D = position.dtype, position.shape[-1]
    if dtype in (torch.bfloat16, torch.float16):  # interpolating in 16 bits would lose half of them
        position = position.float()
    # Contiguous: torch 2.13 interpolates a channels-last image wrongly when a side is 1.
    image = position.reshape(1, *old, D).permute(0, 3, 1, 2).contiguous()  # (1, D, y, x)
    image = F.interpolate(image, size=new, mode="bicubic", antialias=True)
    return image.permute(0, 2, 3, 1).reshape(-1, D).to(dtype)


def rows_and_columns(rows: Tensor, columns: Tensor, new: Grid) -> Tensor:
    """Learned 2-D positions (y*x, D): one vector per row plus one per column of patches."""
    rows = resize(rows, (len(rows), 1), (new[0], 1))
    columns = resize(columns, (1, len(columns)), (1, new[1]))
    return (rows[:, None] + columns[None]).flatten(0, 1)


def sincos_1d(count: int, D: int, like: Tensor) -> Tensor:
    """Fixed positions (count, D) of "Attention Is All You Need": sin and cos interleaved."""
    angles = _angles(torch.arange(count, device=like.device), D // 2, like)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(like.dtype)


def sincos_2d(grid: Grid, D: int, like: Tensor) -> Tensor:
    """Fixed positions (y*x, D) of MoCo v3 and MAE: sin x, cos x, sin y, cos y, D/4 waves each."""
    rows, columns = (torch.arange(n, device=like.device) for n in grid)
    y = _angles(rows, D // 4, like)[:, None].expand(*grid, -1)
    x = _angles(columns, D // 4, like)[None].expand(*grid, -1)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], -1).flatten(0, 1).to(like.dtype)


def _angles(place: Tensor, frequencies: int, like: Tensor) -> Tensor:
    """place * 10000^(-i / frequencies): (places, frequencies); float64 where the device has it."""
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    i = torch.arange(frequencies, device=like.device, dtype=wide)
    return place.to(wide)[:, None] * 10000.0 ** (-i / frequencies)


def relative_entries(grid: Grid, prefix: int) -> int:
    """Rows of a relative-bias table: one per offset, and three for pairs with a prefix token."""
    return (2 * grid[0] - 1) * (2 * grid[1] - 1) + (3 if prefix else 0)


def relative_index(grid: Grid, prefix: int, device: torch.device) -> Tensor:
    """Which table row serves query s and key t: (S, S), numbered as BEiT numbers them.

    The last three rows serve prefix -> patch, patch -> prefix and prefix -> prefix.
    """
    down, across = grid
    place = torch.arange(down * across, device=device)
    y, x = place // across, place % across
    dy = y[:, None] - y[None] + down - 1
    dx = x[:, None] - x[None] + across - 1
    index = dy * (2 * across - 1) + dx  # (N, N)
    if not prefix:
        return index
    offsets = (2 * down - 1) * (2 * across - 1)
    to_patch = torch.full((prefix, down * across), offsets, device=device)
    from_patch = torch.full((down * across, prefix), offsets + 1, device=device)
    inside = torch.full((prefix, prefix), offsets + 2, device=device)
    return torch.cat([torch.cat([inside, to_patch], 1), torch.cat([from_patch, index], 1)], 0)


def relative_bias(table: Tensor, old: Grid, new: Grid, prefix: int) -> Tensor:
    """The bias of the scores, (H, S, S), from a table (entries, H) made for the grid `old`."""
    entries = relative_entries(old, prefix)
    if table.ndim != 2 or table.shape[0] != entries:
        raise ValueError(
            f"ViT: a table of relative positions has shape {tuple(table.shape)}, the configuration"
            f" makes ({entries}, heads)"
        )
    table = resize_relative(table, old, new, prefix)
    index = relative_index(new, prefix, table.device)
    return table[index].permute(2, 0, 1).contiguous()


def resize_relative(table: Tensor, old: Grid, new: Grid, prefix: int) -> Tensor:
    """A relative-bias table interpolated to the offsets of another grid."""
    if old == new:
        return table
    offsets = relative_entries(old, 0)
    spread = resize(
        table[:offsets], *((2 * down - 1, 2 * across - 1) for down, across in (old, new))
    )
    return torch.cat([spread, table[offsets:]]) if prefix else spread


def resize_patch(weight: Tensor, size: int) -> Tensor:
    """A patch projection (D, C, p, p) for another patch size, by FlexiViT's pseudo-inverse resize.

    On an image resized with the patch, the new weights come as close to the old result as they can.
    """
    old = weight.shape[-1]
    if old == size:
        return weight
    pixels = torch.eye(old * old, dtype=torch.float64, device=weight.device).view(-1, 1, old, old)
    up = F.interpolate(pixels, size=(size, size), mode="bicubic", antialias=True).flatten(1)
    new = weight.double().flatten(2) @ torch.linalg.pinv(up).mT  # (D, C, old^2) @ (old^2, new^2)
    return new.view(*weight.shape[:2], size, size).to(weight.dtype)
