"""The report's pictures: speed-up bars of models and operators, the roofline, the sweeps."""

from __future__ import annotations

import pathlib

from benchmarks import roofline, sweeps
from benchmarks.gpu import tables as gpu
from benchmarks.rows import shape_text
from benchmarks.tables import fastest_eager, groups, stamp
from vitkern.measure import charts


def draw(rows: list[dict], folder: pathlib.Path) -> list[pathlib.Path]:
    """Every picture that these rows can fill; a GPU's have their own."""
    drawn = gpu.draw([row for row in rows if gpu.is_gpu(row)], folder)
    rows = [row for row in rows if not gpu.is_gpu(row)]
    titles = {"model": "Whole models", "op": "Operators, each at its largest benchmark shape"}
    for kind, title in titles.items():
        found = groups(rows, kind)
        found = roofline.largest_shapes(found) if kind == "op" else found
        bars = [(label(key), ratios(group)) for key, group in found.items()]
        if bars:
            path = folder / f"speedup_{kind}s.svg"
            drawn.append(charts.speedup_bars(bars, path, title, stamp(rows)))
    if roofline.limits_of(rows) and any(row["kind"] == "op" for row in rows):
        drawn.append(roofline.draw(rows, folder / "roofline.svg"))
    return drawn + sweeps.draw(rows, folder)


def label(key: tuple) -> str:
    name, axes, how = key
    return f"{name} {shape_text(dict(axes))} {how}"


def ratios(group: dict[str, dict]) -> dict[str, float]:
    """Speed relative to the fastest eager provider; that of PyTorch's ways stands for "torch"."""
    base = fastest_eager(group)["us"]
    torchs = {provider: row for provider, row in group.items() if provider != "timm"}
    shown = {"torch": fastest_eager(torchs)}
    shown |= {provider: group[provider] for provider in ("timm", "native") if provider in group}
    return {provider: base / row["us"] for provider, row in shown.items()}
