"""Where a patch is: learned, fixed and relative positions, and how they move to another grid."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import ViTConfig

Grid = tuple[int, int]  # patches down, patches across

# The parameters of a model, each (1, rows, D) or absent, that make up prefix and position rows.
ROWS = ("cls_token", "dist_token", "reg_token", "pos_embed", "pos_embed_y", "pos_embed_x")
# How rows move to another grid: as timm, or as the ViT paper's code, corner to corner.
INTERPOLATIONS = ("bicubic", "bilinear")


def row_counts(c: ViTConfig) -> dict[str, int]:
    """How many rows each of ROWS has; 0 where the configuration has no such parameter."""
    learned = c.patches + (c.prefix_tokens if c.position_covers_prefix else 0)
    axes = c.grid if c.position == "learned_2d" else (0, 0)
    tokens = (int(c.class_token), int(c.head == "distilled"), c.registers)
    counts = (*tokens, learned if c.position == "learned" else 0)
    return dict(zip(ROWS, (*counts, *axes), strict=True))


def prefix_and_position(
    c: ViTConfig, parameters: Mapping[str, Tensor | None], grid: Grid, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Prefix rows (T, D) with their positions added, and patch positions (N, D), for a grid.

    parameters: those of ROWS; a ValueError where one is not as the configuration makes it.
    """
    rows = {
        name: _checked(name, parameters[name], count, c.width)
        for name, count in row_counts(c).items()
        if count
    }
    tokens = [rows[name] for name in ROWS[:3] if name in rows]
    prefix = torch.cat(tokens) if tokens else None
    covered = c.prefix_tokens if c.position_covers_prefix else 0
    ahead, position = None, None
    if c.position == "learned":
        ahead, position = rows["pos_embed"][:covered], rows["pos_embed"][covered:]
        position = resize(position, c.grid, grid)
    elif c.position == "learned_2d":
        position = rows_and_columns(rows["pos_embed_y"], rows["pos_embed_x"], grid)
    elif c.position == "sincos_1d":
        both = sincos_1d(covered + grid[0] * grid[1], c.width, like)
        ahead, position = both[:covered], both[covered:]
    elif c.position == "sincos_2d":
        position = sincos_2d(grid, c.width, like)
    if prefix is not None and ahead is not None and covered:
        prefix = prefix + ahead
    return prefix, position


def _checked(name: str, value: Tensor | None, count: int, width: int) -> Tensor:
    """A parameter (1, count, D) as rows; a ValueError where it was replaced by another."""
    if value is None or value.shape != (1, count, width):
        found = "None" if value is None else f"of shape {tuple(value.shape)}"
        raise ValueError(
            f"ViT: {name} is {found}, the configuration makes {(1, count, width)}; set_input_size"
            f" changes the image size, and with it the positions"
        )
    return value[0]


def refuse_another_size(theirs: object, ours: Tensor | None) -> None:
    """A RuntimeError where a state dict's positions (1, rows, D) are another image size's."""
    if isinstance(theirs, Tensor) and ours is not None and theirs.ndim == ours.ndim:
        if theirs.shape != ours.shape and theirs.shape[-1] == ours.shape[-1]:
            raise RuntimeError(
                f"ViT.load_state_dict: pos_embed has {theirs.shape[1]} positions, the model"
                f" {ours.shape[1]}: the checkpoint is of another image size. Build the model at"
                f" that size, load, then call model.set_input_size; or use"
                f" vitkern.weights.timm.load(model, state, resize_positions=True)"
            )


def resize(position: Tensor, old: Grid, new: Grid, interpolation: str = "bicubic") -> Tensor:
    """Rows (N, D) of a grid moved to another grid: bicubic with antialiasing, as timm does.

    "bilinear": as the ViT paper's code does, corners to corners and without antialiasing.
    """
    if old == new:
        return position
    dtype, D = position.dtype, position.shape[-1]
    if dtype in (torch.bfloat16, torch.float16):  # interpolating in 16 bits would lose half of them
        position = position.float()
    # Contiguous: torch 2.13 interpolates a channels-last image wrongly when a side is 1.
    image = position.reshape(1, *old, D).permute(0, 3, 1, 2).contiguous()  # (1, D, y, x)
    if interpolation == "bilinear":
        image = F.interpolate(image, size=new, mode="bilinear", align_corners=True)
    else:
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


def relative_bias(table: Tensor, heads: int, old: Grid, new: Grid, prefix: int) -> Tensor:
    """The bias of the scores, (H, S, S), from a table (entries, H) made for the grid `old`."""
    entries = relative_entries(old, prefix)
    if table.shape != (entries, heads):
        raise ValueError(
            f"ViT: a table of relative positions has shape {tuple(table.shape)}, the configuration"
            f" makes ({entries}, {heads})"
        )
    table = resize_relative(table, old, new, prefix)
    index = relative_index(new, prefix, table.device)
    return table[index].permute(2, 0, 1).contiguous()


def log_offsets(grid: Grid, like: Tensor) -> Tensor:
    """sign(d) log(1 + |d|) of every offset (dy, dx) in a grid, in a table's order: (entries, 2)."""
    rows, columns = (torch.arange(1 - n, n, device=like.device) for n in grid)
    pairs = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1).float()
    return (pairs.sign() * (1 + pairs.abs()).log()).to(like.dtype)


def resize_relative(
    table: Tensor, old: Grid, new: Grid, prefix: int, interpolation: str = "bicubic"
) -> Tensor:
    """A relative-bias table interpolated to the offsets of another grid."""
    if old == new:
        return table
    offsets = relative_entries(old, 0)
    before, after = ((2 * down - 1, 2 * across - 1) for down, across in (old, new))
    spread = resize(table[:offsets], before, after, interpolation)
    return torch.cat([spread, table[offsets:]]) if prefix else spread


def moved(
    state: Mapping[str, Tensor], old: ViTConfig, new: ViTConfig, interpolation: str = "bicubic"
) -> dict[str, Tensor]:
    """A state dict with everything that depends on the grid moved to another image size."""
    state = dict(state)
    if old.grid == new.grid:
        return state
    T = old.prefix_tokens if old.position_covers_prefix else 0
    axes = {"pos_embed_y": 0, "pos_embed_x": 1}
    for name, value in state.items():
        if name == "pos_embed":
            rows = resize(value[0, T:], old.grid, new.grid, interpolation)
            state[name] = torch.cat([value[0, :T], rows])[None]
        elif name in axes:
            n, m = old.grid[axes[name]], new.grid[axes[name]]
            state[name] = resize(value[0], (n, 1), (m, 1), interpolation)[None]
        elif name.endswith("relative_position_bias_table"):
            prefix = old.prefix_tokens
            state[name] = resize_relative(value, old.grid, new.grid, prefix, interpolation)
    return state


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
