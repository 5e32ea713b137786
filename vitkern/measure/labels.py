"""Labels that stand beside what they name and not on each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FONT = 8.0  # points
# Where a point's label may go, in points: near places first, to the right before above and below.
NEAR = [
    (dx, dy)
    for ring in (0, 1, 2, 3, 4, 5)
    for dx, dy in ((6, 10 * ring), (6, -10 * ring), (-6, 10 * ring), (-6, -10 * ring))
]


def beside_lines(axis: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """(x, y, text, colour) of each line's last point: texts to the right, a line's height apart."""
    height = FONT * 1.25
    placed: list[float] = []
    per_point = 72 / axis.figure.dpi
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        at = axis.transData.transform((x, y))[1] * per_point
        goal = max(at, placed[-1] + height) if placed else at
        placed.append(goal)
        axis.annotate(
            text, (x, y), (7, goal - at), textcoords="offset points", color=colour, va="center",
            fontsize=FONT, annotation_clip=False,
        )  # fmt: skip


def near_points(axis: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """(x, y, text, colour): each text at the first place that is free, with a hair line to it."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2, foreground="white")]  # small points may lie behind
    per_point = 72 / axis.figure.dpi
    spots = [axis.transData.transform((x, y)) * per_point for x, y, _, _ in points]
    taken = [(px - 4, py - 4, px + 4, py + 4) for px, py in spots]
    for (x, y, text, colour), (px, py) in zip(points, spots, strict=True):
        wide, high = 0.56 * FONT * len(text), FONT * 1.2
        for dx, dy in NEAR:
            left = px + dx - (wide if dx < 0 else 0)
            box = (left, py + dy - high / 2, left + wide, py + dy + high / 2)
            if not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        axis.annotate(
            text, (x, y), (dx, dy), textcoords="offset points", color=colour, fontsize=FONT,
            ha="left" if dx > 0 else "right", va="center", path_effects=halo, zorder=4,
            arrowprops={"arrowstyle": "-", "color": "#999999", "lw": 0.5} if dy else None,
        )  # fmt: skip


def _overlap(a: tuple, b: tuple) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
