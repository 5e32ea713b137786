"""The table of a model: layers, output shapes, parameters, multiply-adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from . import stem
from .config import ViTConfig

if TYPE_CHECKING:
    from .model import ViT


class Row(NamedTuple):
    layer: str
    shape: tuple[int, ...]  # of the result for one image, without the batch axis
    parameters: int
    multiply_adds: int  # for one image; GEMMs only, attention's two included


@dataclass(frozen=True, repr=False)
class Summary:
    """Rows of the table, their sums, and the table as text."""

    rows: tuple[Row, ...]
    parameters: int
    multiply_adds: int
    text: str = field(default="")

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<{self.parameters:,} parameters, {self.multiply_adds / 1e9:.1f} G multiply-adds>"


def summarise(model: ViT, image_size: int | tuple[int, int] | None = None) -> Summary:
    """Count a `vitkern.ViT` for its own image size, or another one."""
    c = model.config if image_size is None else model.config.replace(image_size=image_size)
    D, F, S, N = c.width, c.mlp_width, c.tokens, c.patches
    rows: list[Row] = []

    def add(layer: str, shape: tuple[int, ...], module: nn.Module | int, work: int = 0) -> None:
        count = module if isinstance(module, int) else sum(p.numel() for p in module.parameters())
        if count or work:
            rows.append(Row(layer, shape, count, work))

    y, x = (side // c.patch_pixels * c.patch_size for side in c.pixels)
    backbone = getattr(model.patch_embed, "backbone", None)
    if backbone is not None:
        add("patch_embed.backbone", (c.map_channels, y, x), backbone, stem.multiply_adds(c))
    work = N * D * c.map_channels * c.patch_size**2
    add("patch_embed.proj", (N, D), model.patch_embed.proj, work)
    own = sum(p.numel() for p in model.parameters(recurse=False))
    add("tokens, positions", (S, D), own)
    if model.rope is not None:
        add("rope", (S, c.head_dim), model.rope)
    add("norm_pre", (S, D), model.norm_pre)
    for i, block in enumerate(model.blocks):
        # qkv and projection: 4 D^2 a row; q k^T and weights v: 2 S D a row
        if c.block in ("parallel", "twin"):
            each = S * (4 * D * D + 2 * S * D + D * (c.hidden_rows + F))
            add(f"blocks.{i}", (S, D), block, each * (2 if c.block == "twin" else 1))
            continue
        attn, mlp = _count(block, "norm1", "attn", "ls1"), _count(block, "norm2", "mlp", "ls2")
        add(f"blocks.{i}.attn", (S, D), attn, S * (4 * D * D + 2 * S * D))
        add(f"blocks.{i}.mlp", (S, D), mlp, S * D * (c.hidden_rows + F))
    if model.shared_rel_pos is not None:
        add("shared_rel_pos", (c.heads, S, S), model.shared_rel_pos)
    add("norm", (S, D), model.norm)
    if model.attn_pool is not None:  # one query, folded into the keys (head.py)
        add("attn_pool", (D,), model.attn_pool, 2 * S * D * c.heads + D * (2 * D + 2 * F))
    lead = (S,) if c.pool == "none" else ()
    many, size = (S if lead else 1), model.head_hidden_size
    add("fc_norm", (*lead, D), model.fc_norm)
    add("pre_logits", (*lead, size), model.pre_logits, many * D * size if c.head == "tanh" else 0)
    add("head", (*lead, c.classes), model.head, many * size * c.classes)
    add(
        "head_dist",
        (*lead, c.classes),
        model.head_dist,
        size * c.classes if c.head == "distilled" else 0,
    )
    add("head_norm", (*lead, c.classes), model.head_norm)
    parameters = sum(p.numel() for p in model.parameters())
    work = sum(row.multiply_adds for row in rows)
    return Summary(tuple(rows), parameters, work, _table(rows, c, parameters, work))


def _count(block: nn.Module, *names: str) -> int:
    parts = [getattr(block, name) for name in names if hasattr(block, name)]
    return sum(p.numel() for part in parts for p in part.parameters())


def _table(rows: list[Row], c: ViTConfig, parameters: int, work: int) -> str:
    y, x = c.pixels
    lines = [("layer", "result", "parameters", "multiply-adds")]
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        lines.append((row.layer, shape, f"{row.parameters:,}", _short(row.multiply_adds)))
    lines.append(("total", "", f"{parameters:,}", _short(work)))
    wide = [max(len(line[i]) for line in lines) for i in range(4)]
    texts = [
        "  ".join(
            [line[0].ljust(wide[0]), *(t.rjust(w) for t, w in zip(line[1:], wide[1:], strict=True))]
        )
        for line in lines
    ]
    rule = "-" * len(texts[0])
    title = f"ViT of {c.depth} blocks, width {c.width}, {c.heads} heads; one image of {y} x {x}"
    return "\n".join([title, rule, texts[0], rule, *texts[1:-1], rule, texts[-1]])


def _short(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count) if count else "-"
