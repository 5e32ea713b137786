"""Two pictures of a run: speed beside eager PyTorch, and the roofline."""

from __future__ import annotations

import pathlib

from ..measure import charts, labels
from . import tables
from .cases import NAMES
from .rows import Row, is_of, stamp_text


def draw(rows: list[Row], folder: pathlib.Path) -> list[pathlib.Path]:
    """speedup.svg and roofline.svg, as far as the rows have what they show."""
    drawn = []
    bars = speed_bars(rows)
    if bars:
        title = "Whole models beside eager PyTorch"
        path = folder / "speedup.svg"
        drawn.append(charts.speedup_bars(bars, path, title, stamp_text(rows)))
    if limits_of(rows) and points(rows):
        drawn.append(roofline(rows, folder / "roofline.svg"))
    return drawn


def speed_bars(rows: list[Row]) -> list[tuple[str, dict[str, float]]]:
    """For each row of vitkern: everybody's best of its error class, relative to eager PyTorch."""
    found = []
    for case in tables.cases(rows):
        these = [row for row in rows if is_of(row, case)]
        for own in tables.ours(these):
            rivals = tables.rivals(these, own["precision"])
            if "torch" not in rivals:
                continue
            base = rivals["torch"]["us"]
            ratios = {name: base / row["us"] for name, row in rivals.items()}
            label = f"{case.name} batch {case.batch} {case.size} px {own['precision']}"
            found.append((label, {**ratios, "native": base / own["us"]}))
    return found


def limits_of(rows: list[Row]) -> Row | None:
    return next((row for row in rows if row["kind"] == "limits" and "read_gbs" in row), None)


def points(rows: list[Row]) -> list[Row]:
    """Timed rows that say how much work they are."""
    return [row for row in rows if row["kind"] == "peer" and "us" in row and "flops" in row]


def roofline(rows: list[Row], path: pathlib.Path) -> pathlib.Path:
    """GFLOPS over flops per byte, a panel for each precision, under that precision's roofs."""
    limits = limits_of(rows)
    if limits is None:
        raise ValueError("a roofline needs the machine's limits: a row of kind limits")
    from matplotlib.lines import Line2D

    plt = charts.pyplot()
    timed = points(rows)
    shown = [p for p in limits["multiply_gflops"] if any(row["precision"] == p for row in timed)]
    at = {id(row): (row["flops"] / row["bytes"], row["flops"] / row["us"] / 1e3) for row in timed}
    left = min(x for x, _ in at.values()) / 8
    right = max(x for x, _ in at.values()) * 8
    bottom = min(y for _, y in at.values()) / 3
    top = 2.5 * max([*limits["multiply_gflops"].values(), *(y for _, y in at.values())])
    figure, axes = plt.subplots(
        1, len(shown), figsize=(1.2 + 4.4 * len(shown), 4.6), sharey=True, squeeze=False
    )
    for axis, precision in zip(axes[0], shown, strict=True):
        axis.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
        axis.set(title=precision, xlabel="flops per byte that must move at least once")
        axis.grid(True, which="major", lw=0.3)
    axes[0][0].set_ylabel("GFLOPS")
    providers = [name for name in NAMES if any(row["provider"] == name for row in timed)]
    marks = [
        Line2D([], [], ls="", marker="o", color=charts.COLOURS[name], label=charts.NAMES[name])
        for name in providers
    ]
    axes[0][0].legend(handles=marks, fontsize=7.5, frameon=False, loc="lower right")
    charts.arrange(figure)  # labels are placed in the final layout
    for axis, precision in zip(axes[0], shown, strict=True):
        charts.roofs(axis, limits, precision, (left, right, bottom))
        texts = []
        for row in (row for row in timed if row["precision"] == precision):
            x, y = at[id(row)]
            ours = row["provider"] == "native"
            colour = charts.COLOURS[row["provider"]]
            axis.plot(x, y, "o", color=colour, markersize=6 if ours else 4, zorder=3 if ours else 2)
            if ours:
                texts.append((x, y, f"{row['name']} B{row['axes']['B']}", colour))
        labels.near_points(axis, texts)
    title = "Whole models under the machine's measured limits"
    return charts.save(figure, path, title, stamp_text(rows), arranged=True)
