"""The report's pictures: speed-up bars of models and operators, and the roofline."""

from __future__ import annotations

import pathlib

from benchmarks.rows import shape_text
from benchmarks.tables import fastest_eager, groups, stamp
from vitkern.cli import chart

MARKERS = "osD^vPX*<>"  # one per operator, in the table's order


def draw(rows: list[dict], folder: pathlib.Path) -> list[pathlib.Path]:
    """Every picture that these rows can fill."""
    drawn = []
    titles = {"model": "Whole models", "op": "Operators, each at its largest benchmark shape"}
    for kind, title in titles.items():
        found = groups(rows, kind)
        found = largest_shapes(found) if kind == "op" else found
        bars = [(label(key), ratios(group)) for key, group in found.items()]
        if bars:
            path = folder / f"speedup_{kind}s.svg"
            drawn.append(chart.speedup_bars(bars, path, title, stamp(rows)))
    limits = next((r for r in rows if r["kind"] == "limits"), None)
    if limits and any(r["kind"] == "op" for r in rows):
        drawn.append(roofline(rows, limits, folder / "roofline.svg"))
    return drawn


def largest_shapes(found: dict[tuple, dict]) -> dict[tuple, dict]:
    """Of each use and dtype, the shape with the most work: a picture of all would be a wall."""
    largest: dict[tuple, tuple] = {}
    for key, group in found.items():
        name, _, dtype = key
        best = largest.get((name, dtype), key)
        more = group["native"]["flops"] > found[best]["native"]["flops"]
        largest[name, dtype] = key if more else best
    return {key: found[key] for key in largest.values()}


def label(key: tuple) -> str:
    name, axes, dtype = key
    return f"{name} {shape_text(dict(axes))} {'fp32' if dtype == 'float32' else 'bf16'}"


def drawn_rows(group: dict[str, dict]) -> dict[str, dict]:
    """One row per colour: the fastest of eager PyTorch's ways stands for "torch"."""
    torchs = {provider: row for provider, row in group.items() if provider != "timm"}
    rest = {provider: row for provider, row in group.items() if provider in ("timm", "native")}
    return {"torch": fastest_eager(torchs), **rest}


def ratios(group: dict[str, dict]) -> dict[str, float]:
    """Speed relative to the fastest eager provider."""
    base = fastest_eager(group)["us"]
    return {provider: base / row["us"] for provider, row in drawn_rows(group).items()}


def operator(row: dict) -> str:
    """The operator of a use: norm_linear of norm_linear+gelu."""
    return row["name"].split("+")[0]


def roofline(rows: list[dict], limits: dict, path: pathlib.Path) -> pathlib.Path:
    """GFLOPS over flops per byte of compulsory traffic, under the limits measured in the run."""
    plt = chart.pyplot()
    figure, axis = plt.subplots(figsize=(8, 5.2))
    points = [point for group in groups(rows, "op").values() for point in drawn_rows(group).items()]
    names = list(dict.fromkeys(operator(row) for _, row in points))
    intensity = [row["flops"] / row["bytes"] for _, row in points]
    left, right = min(intensity) / 2, max(intensity) * 2
    peak_dtype = max(("float32", "bfloat16"), key=lambda d: limits[f"{d}_gflops"])
    peak = limits[f"{peak_dtype}_gflops"]
    for place, line in (("cache", "--"), ("dram", "-")):
        bandwidth = limits[f"{place}_gbs"]
        xs = [left, max(left, peak / bandwidth), right]
        text = f"{'main memory' if place == 'dram' else 'L2'} copy, {bandwidth:.0f} GB/s"
        axis.plot(xs, [min(peak, bandwidth * x) for x in xs], line, color="black", lw=1, label=text)
    axis.annotate(
        f"best torch.mm, {peak_dtype}: {peak:.0f} GFLOPS", (right, peak), (-4, 4), ha="right",
        textcoords="offset points", fontsize=7.5,
    )  # fmt: skip
    for (provider, row), x in zip(points, intensity, strict=True):
        colour = chart.COLOURS[provider]
        axis.plot(
            x,
            row["gflops"],
            MARKERS[names.index(operator(row)) % len(MARKERS)],
            color=colour,
            markerfacecolor=colour if row["dtype"] == "float32" else "none",
            markersize=5,
            alpha=0.85,
        )
    for i, name in enumerate(names):
        axis.plot([], [], MARKERS[i % len(MARKERS)], color="#444444", label=name)
    for provider in ("torch", "native"):
        axis.plot([], [], "s", color=chart.COLOURS[provider], label=chart.NAMES[provider])
    axis.plot([], [], "s", color="#444444", markerfacecolor="none", label="hollow: bf16 storage")
    axis.set(xscale="log", yscale="log", xlim=(left, right))
    axis.set_xlabel("flops per byte that must move (each input read once, the result written once)")
    axis.set_ylabel("GFLOPS")
    axis.grid(True, which="major", lw=0.3)
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return chart.save(figure, path, "Roofline of the operators", stamp(rows))
