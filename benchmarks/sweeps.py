"""The report's scaling: a table of the sweeps, one of memory, and the sweeps' pictures."""

from __future__ import annotations

import pathlib

from benchmarks.rows import precision
from benchmarks.tables import fastest_eager, groups, stamp
from vitkern.measure import charts, labels

LINES = {"fp32": "-", "tf32": "-.", "bf16": "--"}
TEXT = {"torch": "#5a5a5a"}  # its lines' grey is too light to read
NOT_YET = "Not measured yet: run `make bench`."


def text(rows: list[dict]) -> str:
    """The pictures, and every point of the sweeps with its share of the machine's multiply rate."""
    found = groups(rows, "scaling")
    if not found:
        return NOT_YET
    pictures = [f"![{alt}](pictures/{name}.svg)" for name, (alt, _) in PICTURES.items()]
    lines = [
        "\n\n".join(pictures),
        "",
        "| model | image | batch | threads | precision | PyTorch | vitkern | images/s"
        " | of multiply rate | speed-up |",
        "|---|--:|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for (name, axes, how), group in found.items():
        at, ours, best = dict(axes), group["native"], fastest_eager(group)
        lines.append(
            f"| {name} | {at['Y']} | {at['B']} | {at['threads']} | {how}"
            f" | {best['us'] / 1e3:.1f} ms | {ours['us'] / 1e3:.1f} ms"
            f" | {images_per_second(ours):.1f} | {ours['gflops'] / ours['multiply_gflops']:.0%}"
            f" | **{best['us'] / ours['us']:.2f}×** |"
        )
    these = [row for row in rows if row["kind"] == "scaling"]
    notes = (
        f"Median of calls timed in turns; {stamp(these)}. PyTorch is the fastest eager way, in"
        " 16 bits or in fp32. The share is of the multiply-adds that the same number of threads"
        " reaches on data in L1, measured between the turns."
    )
    return "\n".join([*lines, "", notes])


def memory_text(rows: list[dict]) -> str:
    """Memory of a forward beside that of the parameters."""
    found = groups(rows, "memory")
    if not found:
        return NOT_YET
    lines = [
        "| model | batch | precision | PyTorch weights | PyTorch forward | vitkern weights"
        " | vitkern forward | of it packed weights |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for (name, axes, how), group in found.items():
        torch, ours = group["torch"], group["native"]
        cells = [torch["weights_bytes"], torch["growth_bytes"]]
        cells += [ours["weights_bytes"], ours["growth_bytes"], ours["packed_bytes"]]
        figures = " | ".join(f"{size / 2**20:.0f} MiB" for size in cells)
        lines.append(f"| {name} | {dict(axes)['B']} | {how} | {figures} |")
    these = [row for row in rows if row["kind"] == "memory"]
    notes = (
        "Forward: the most by which the resident set of a fresh process grows in the model's first"
        f" forward, the packing of the weights included. {stamp(these)}."
    )
    return "\n".join([*lines, "", notes])


def images_per_second(row: dict) -> float:
    return row["axes"]["B"] / row["us"] * 1e6


def milliseconds(row: dict) -> float:
    return row["us"] / 1e3


def curves(rows: list[dict], axis: str, fixed: dict[str, int], name: str) -> dict[tuple, list]:
    """(provider, precision) -> rows along `axis`, the other axes held; PyTorch once for a dtype."""
    found: dict[tuple, list[dict]] = {}
    drawn: dict[str, str] = {}  # dtype -> the first precision whose PyTorch has it
    for row in rows:
        at = row["axes"]
        if row["provider"] not in ("torch", "native") or row["name"] != name:
            continue
        if any(at[key] != value for key, value in fixed.items()):
            continue
        how = precision(row)
        if row["provider"] == "torch" and drawn.setdefault(row["dtype"], how) != how:
            continue
        found.setdefault((row["provider"], how), []).append(row)
    return {key: sorted(line, key=lambda row: row["axes"][axis]) for key, line in found.items()}


def draw_curves(axis, lines: dict[tuple, list], along: str, height) -> list[tuple]:
    """The lines with their points; (x, y, text, colour) of each line's end, to be labelled."""
    from matplotlib import ticker

    ends = []
    for (provider, how), line in lines.items():
        xs, ys = [row["axes"][along] for row in line], [height(row) for row in line]
        colour = charts.COLOURS[provider]
        axis.plot(xs, ys, LINES.get(how, ":"), color=colour, marker="o", markersize=4, lw=1.6)
        who = "PyTorch" if provider == "torch" else charts.NAMES[provider]
        ends.append((xs[-1], ys[-1], f"{who} {how}", TEXT.get(provider, colour)))
    ticks = sorted({row["axes"][along] for line in lines.values() for row in line})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_yscale("log")  # a ratio is a distance, in every corner of the picture
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.grid(True, axis="y", lw=0.3)
    return ends


def panels(count: int, wide: float = 2.9, high: float = 2.8):
    """Plots of wide x high inches in a row, with room for an axis to the left and labels right."""
    left, right, top, bottom = 0.75, 1.45, 0.95, 0.55
    width, height = count * (left + wide + right), top + high + bottom
    room = {
        "left": left / width,
        "right": 1 - right / width,
        "top": 1 - top / height,
        "bottom": bottom / height,
        "wspace": (left + right) / wide,
    }
    figure, axes = charts.pyplot().subplots(
        1, count, figsize=(width, height), squeeze=False, gridspec_kw=room
    )
    return figure, list(axes[0])


def finish(figure, ends: dict, path: pathlib.Path, title: str, rows: list[dict]) -> pathlib.Path:
    """Labels beside the lines, now that the axes have their final limits."""
    for axis, found in ends.items():
        labels.beside_lines(axis, found)
    return charts.save(figure, path, title, stamp(rows), arranged=True)


def draw_batches(rows: list[dict], path: pathlib.Path) -> pathlib.Path:
    size, threads = base(rows)
    swept = [
        name
        for name in dict.fromkeys(row["name"] for row in rows)
        if len({r["axes"]["B"] for r in rows if r["name"] == name}) > 2
    ] or [rows[0]["name"]]
    figure, axes = panels(len(swept))
    ends = {}
    for axis, name in zip(axes, swept, strict=True):
        lines = curves(rows, "B", {"Y": size, "threads": threads}, name)
        ends[axis] = draw_curves(axis, lines, "B", images_per_second)
        axis.set(title=f"ViT-{name}", xlabel="images in a batch", ylabel="images per second")
    title = f"Throughput over the batch, {size} × {size} images, {threads} threads"
    return finish(figure, ends, path, title, rows)


def draw_threads(rows: list[dict], path: pathlib.Path) -> pathlib.Path:
    size, most = base(rows)
    few = [row for row in rows if row["axes"]["threads"] < most] or rows
    swept = list(dict.fromkeys((row["name"], row["axes"]["B"]) for row in few))
    figure, axes = panels(len(swept))
    ends = {}
    for axis, (name, batch) in zip(axes, swept, strict=True):
        lines = curves(rows, "threads", {"Y": size, "B": batch}, name)
        ends[axis] = [
            (x, y, f"{label}, {y / images_per_second(line[0]):.2f}×", colour)
            for (x, y, label, colour), line in zip(
                draw_curves(axis, lines, "threads", images_per_second), lines.values(), strict=True
            )
        ]
        axis.set(title=f"ViT-{name}, batch {batch}", xlabel="threads", ylabel="images per second")
    title = f"Throughput over threads, and its gain from the fewest to the most ({most})"
    return finish(figure, ends, path, title, rows)


def draw_resolutions(rows: list[dict], path: pathlib.Path) -> pathlib.Path:
    size, threads = base(rows)
    large = [row for row in rows if row["axes"]["Y"] > size] or rows
    name = large[0]["name"]
    figure, (axis,) = panels(1, wide=4.8)
    lines = curves(rows, "Y", {"B": 1, "threads": threads}, name)
    ends = {axis: draw_curves(axis, lines, "Y", milliseconds)}
    axis.set(xlabel="image height and width, pixels", ylabel="milliseconds an image")
    axis.set_title(f"ViT-{name}, batch 1")
    return finish(figure, ends, path, f"Time over the image size, {threads} threads", rows)


def base(rows: list[dict]) -> tuple[int, int]:
    """The image size and the number of threads of a sweep that does not vary them."""
    return min(r["axes"]["Y"] for r in rows), max(r["axes"]["threads"] for r in rows)


PICTURES = {
    "batches": ("Images per second over the batch size", draw_batches),
    "threads": ("Images per second over the number of threads", draw_threads),
    "resolutions": ("Milliseconds over the image size", draw_resolutions),
}


def draw(rows: list[dict], folder: pathlib.Path) -> list[pathlib.Path]:
    """The sweeps' pictures; none where the rows have no sweep."""
    these = [row for row in rows if row["kind"] == "scaling"]
    return [make(these, folder / f"{name}.svg") for name, (_, make) in PICTURES.items() if these]
