"""The roofline: what operators and models reach of the machine's measured limits."""

from __future__ import annotations

import pathlib

from benchmarks.rows import precision, shape_text
from benchmarks.tables import fastest_eager, groups, stamp
from vitkern.measure import charts, labels

MARKERS = "osD^vP"  # one per operator, in the table's order; models are stars


def limits_of(rows: list[dict]) -> dict | None:
    """The machine's limits as measured in the run; None where a file lacks them."""
    return next((r for r in rows if r["kind"] == "limits" and "read_gbs" in r), None)


def peak(row: dict, limits: dict) -> float:
    """GFLOPS of multiply-adds: the calibration between the row's own turns, else the run's best."""
    return row.get("multiply_gflops") or limits["multiply_gflops"][precision(row)]


def level(row: dict, limits: dict) -> str:
    """The nearest level of memory that was measured with at least this row's bytes."""
    fits = [place for place, size in limits["read_bytes"].items() if row["bytes"] <= size]
    return fits[0] if fits else "memory"


def largest_shapes(found: dict[tuple, dict]) -> dict[tuple, dict]:
    """Of each use and precision, the shape with the most work: all of them would be a wall."""
    largest: dict[tuple, tuple] = {}
    for key, group in found.items():
        name, _, how = key
        best = largest.get((name, how), key)
        more = group["native"]["flops"] > found[best]["native"]["flops"]
        largest[name, how] = key if more else best
    return {key: found[key] for key in largest.values()}


def text(rows: list[dict]) -> str:
    """The limits in words, the picture, and a table of the shares of them."""
    limits = limits_of(rows)
    if limits is None:
        return "Not measured yet: run `make bench`."
    found = {**largest_shapes(groups(rows, "op")), **groups(rows, "model")}
    lines = [
        words(rows, limits),
        "",
        "![Roofline of operators and models](pictures/roofline.svg)",
        "",
        "| what | shape | precision | flops/byte | GFLOPS | of multiply rate | GB/s"
        " | of read rate |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for (name, axes, how), group in found.items():
        row = group["native"]
        place = level(row, limits)
        work, traffic = row["gflops"] / peak(row, limits), row["gbs"] / limits["read_gbs"][place]
        shares = [f"{work:.0%}", f"{traffic:.0%} of {place}"]
        nearer = int(traffic > work)
        shares[nearer] = f"**{shares[nearer]}**"
        lines.append(
            f"| {name} | {shape_text(dict(axes))} | {how} | {row['flops'] / row['bytes']:.1f}"
            f" | {row['gflops']:.0f} | {shares[0]} | {row['gbs']:.1f} | {shares[1]} |"
        )
    return "\n".join(lines)


def words(rows: list[dict], limits: dict) -> str:
    multiply, matmul, reads = (
        limits[key] for key in ("multiply_gflops", "matmul_gflops", "read_gbs")
    )
    sizes = {place: f"{size >> 20} MiB" for place, size in limits["read_bytes"].items()}
    rates = ", ".join(
        f"{rate} GFLOPS in {how} (PyTorch's matmul reaches {matmul[how]})"
        for how, rate in multiply.items()
    )
    read = ", ".join(f"{gbs} GB/s from {place} ({sizes[place]})" for place, gbs in reads.items())
    return f"Measured limits: multiply-adds on data in L1, {rates}; reads of {read}. {stamp(rows)}."


def draw(rows: list[dict], path: pathlib.Path) -> pathlib.Path:
    """GFLOPS over flops per byte, a panel for each precision, under that precision's roofs."""
    limits = limits_of(rows)
    plt = charts.pyplot()
    ops, models = groups(rows, "op"), groups(rows, "model")
    names = list(dict.fromkeys(operator(name) for name, _, _ in ops))
    shown = list(dict.fromkeys(how for _, _, how in (*ops, *models)))
    figure, axes = plt.subplots(
        1, len(shown), figsize=(1.2 + 5.4 * len(shown), 5.2), sharey=True, squeeze=False
    )
    everything = [row for group in (*ops.values(), *models.values()) for row in group.values()]
    intensities = [row["flops"] / row["bytes"] for row in everything]
    left, right = min(intensities) / 4, max(intensities) * 4
    bottom = min(row["gflops"] for row in everything) / 2
    top = 2.5 * max([*limits["multiply_gflops"].values(), *(r["gflops"] for r in everything)])
    for axis, how in zip(axes[0], shown, strict=True):
        axis.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top), title=how)
        axis.set_xlabel("flops per byte that must move at least once")
        axis.grid(True, which="major", lw=0.3)
    axes[0][0].set_ylabel("GFLOPS")
    axes[0][0].legend(
        handles=handles(names), fontsize=7.5, frameon=False, loc="lower right", ncols=2
    )
    charts.arrange(figure)  # labels are placed in the final layout
    for axis, how in zip(axes[0], shown, strict=True):
        charts.roofs(axis, limits, how, (left, right, bottom))
        draw_points(axis, how, names, ops, models)
    title = "Operators and models under the machine's measured limits"
    return charts.save(figure, path, title, stamp(rows), arranged=True)


def handles(names: list[str]) -> list:
    """The legend: a marker per operator, a colour per provider."""
    from matplotlib.lines import Line2D

    def mark(marker: str, colour: str, label: str) -> Line2D:
        return Line2D([], [], ls="", marker=marker, color=colour, label=label, markersize=5)

    marks = [mark(MARKERS[i % len(MARKERS)], "#444444", n) for i, n in enumerate(names)]
    marks.append(mark("*", "#444444", "whole model"))
    return marks + [mark("s", charts.COLOURS[p], charts.NAMES[p]) for p in ("torch", "native")]


def draw_points(axis, how: str, names: list[str], ops: dict, models: dict) -> None:
    """Every shape as a small point; each operator's largest one and each model large and named."""
    named = largest_shapes({k: g for k, g in ops.items() if k[0] in names and k[2] == how})
    biggest: dict[str, tuple] = {}
    for key, group in groups_of(models, how).items():
        old = biggest.get(key[0])
        if old is None or group["native"]["flops"] > models[old]["native"]["flops"]:
            biggest[key[0]] = key
    named |= {key: models[key] for key in biggest.values()}
    texts = []
    for key, group in {**groups_of(ops, how), **groups_of(models, how)}.items():
        is_model = operator(key[0]) not in names
        marker = "*" if is_model else MARKERS[names.index(operator(key[0])) % len(MARKERS)]
        large = key in named
        for provider, row in (("torch", fastest_eager(group)), ("native", group["native"])):
            x, y = row["flops"] / row["bytes"], row["gflops"]
            size = (5 if large else 2.5) * (1.6 if is_model else 1)
            axis.plot(
                x, y, marker, color=charts.COLOURS[provider], markersize=size,
                alpha=0.9 if large else 0.35, markeredgewidth=0,
                zorder=3 if provider == "native" else 2,
            )  # fmt: skip
            if large and provider == "native":
                batch = f" B{dict(key[1])['B']}" if is_model else ""
                texts.append((x, y, key[0] + batch, charts.COLOURS["native"]))
    labels.near_points(axis, texts)


def groups_of(found: dict[tuple, dict], how: str) -> dict[tuple, dict]:
    return {key: group for key, group in found.items() if key[2] == how}


def operator(name: str) -> str:
    """The operator of a use: norm_linear of norm_linear+gelu."""
    return name.split("+")[0]
