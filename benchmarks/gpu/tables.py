"""The report on a GPU's rows: tables, pictures, and the plain word where there are none yet."""

from __future__ import annotations

import pathlib

from benchmarks.gpu.model_peers import GRAPH, PEERS
from benchmarks.rows import EAGER, precision, shape_text
from benchmarks.tables import fastest_eager, groups, stamp
from vitkern.measure import charts

UNMEASURED = (
    "**GPU speed is unmeasured**: nobody has run `vitkern bench --device cuda` yet, so nothing is"
    " claimed about it."
)
# In pictures, besides eager PyTorch, timm and vitkern.
SHOWN = ("flash_attn", "compile", "compile_max", "tensorrt", "native_graph")
# kind of row -> (its pictures' names, their titles), with the precision after each
PICTURES = {
    "model": ("gpu_models", "Whole models on a GPU"),
    "train": ("gpu_training", "Training steps on a GPU"),
    "op": ("gpu_ops", "Operators on a GPU, each at its largest benchmark shape"),
    "op_train": ("gpu_ops_training", "Operators on a GPU, forward and backward"),
}


def is_gpu(row: dict) -> bool:
    return "device" in row.get("machine", {})


def summary(rows: list[dict]) -> str:
    """For README.md: whole models, or that there is no result yet."""
    if not rows:
        return UNMEASURED
    missing = skipped_text([row for row in rows if row.get("of", "model") == "model"])
    parts = ["\n".join(whole(rows, "model")), conditions(rows), missing]
    return "\n\n".join(part for part in parts if part)


def text(rows: list[dict]) -> str:
    """For docs/performance.md: everything."""
    if not rows:
        return UNMEASURED
    parts = [summary(rows), limits_text(rows)]
    if any(row["kind"] == "train" for row in rows):
        parts += ["Training steps (forward, loss, backward):", "\n".join(whole(rows, "train"))]
    for kind, title in (("op", "Operators:"), ("op_train", "Operators, forward and backward:")):
        if any(row["kind"] == kind for row in rows):
            parts += [title, "\n".join(operators(rows, kind))]
    parts += [f"![{title}](pictures/{stem}.svg)" for stem, (title, _) in pictures(rows).items()]
    skipped = skipped_text(rows)
    return "\n\n".join([*parts, skipped] if skipped else parts)


def conditions(rows: list[dict]) -> str:
    who = "; ".join(f"{charts.NAMES[name]}: {what}" for name, what in PEERS.items())
    return (
        f"Milliseconds as it is / in a CUDA graph, median of calls timed in turns by the device's"
        f" events; {stamp(rows)}. All have the row's precision and the same weights, and results"
        f" were compared before anybody was timed. {who}. The speed-up is vitkern's over the"
        " fastest eager one, in brackets that of its graph; the last column is the better of"
        " vitkern's two over the best of all others."
    )


def whole(rows: list[dict], kind: str) -> list[str]:
    """Whole models: milliseconds of each competitor, images a second, speed-up."""
    columns = [*PEERS, "native"]
    lines = [
        f"| model | batch | precision | {' | '.join(charts.NAMES[p] for p in columns)}"
        " | images/s | speed-up | over the best |",
        "|---|--:|---|" + "--:|" * (len(columns) + 3),
    ]
    reasons = {
        (row["name"], tuple(row["axes"].items()), row["precision"], row["provider"]): row["why"]
        for row in rows
        if row["kind"] == "skipped" and row["of"] == kind
    }
    for key, group in groups(rows, kind).items():
        name, axes, how = key
        cells = [cell(group, p, reasons.get((*key, p), "")) for p in columns]
        batch = dict(axes)["B"]
        ours = [group[p]["us"] for p in ("native", "native" + GRAPH) if p in group]
        speed = f"{batch / min(ours) * 1e6:.0f}" if ours else "–"
        others = [row["us"] for p, row in group.items() if not p.startswith("native")]
        best = f"{min(others) / min(ours):.2f}×" if ours and others else "–"
        line = [name, str(batch), how, *cells, speed, gains(group), best]
        lines.append(f"| {' | '.join(line)} |")
    return lines


def cell(group: dict[str, dict], provider: str, why: str) -> str:
    """ "2.00 / 1.50" without and with a graph; who is not installed has that in its place."""
    times = [group.get(name) for name in (provider, provider + GRAPH)]
    if not any(times):
        return why if why == "not installed" else "–"
    return " / ".join(f"{row['us'] / 1e3:.2f}" if row else "–" for row in times)


def gains(group: dict[str, dict]) -> str:
    """vitkern over the fastest eager way, and the same of its graph in brackets."""
    if not any(p in group for p in EAGER):
        return "–"
    best = fastest_eager(group)["us"]
    plain = f"**{best / group['native']['us']:.2f}×**" if "native" in group else "–"
    if "native_graph" in group:
        plain += f" ({best / group['native_graph']['us']:.2f}×)"
    return plain


def operators(rows: list[dict], kind: str) -> list[str]:
    lines = [
        "| operator | shape | precision | PyTorch | by | vitkern | TFLOPS | GB/s | of peak"
        " | speed-up |",
        "|---|---|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for (name, axes, how), group in groups(rows, kind).items():
        if "native" not in group:
            continue
        ours, eager = group["native"], [p for p in EAGER if p in group]
        best = fastest_eager(group) if eager else None
        theirs = f"{best['us']:.1f} µs | {best['provider']}" if best else "– | –"
        lines.append(
            f"| {name} | {shape_text(dict(axes))} | {how} | {theirs} | {ours['us']:.1f} µs"
            f" | {ours['gflops'] / 1e3:.1f} | {ours['gbs']:.0f} | {share(ours)} | {gains(group)} |"
        )
    return lines


def share(row: dict) -> str:
    """The nearer of the device's two peaks; – where neither is known."""
    known = {
        "flops": row.get("of_peak_flops"),
        "bandwidth": row.get("of_peak_gbs"),
    }
    known = {what: part for what, part in known.items() if part is not None}
    if not known:
        return "–"
    what = max(known, key=known.get)
    return f"{known[what]:.0%} of {what}"


def limits_text(rows: list[dict]) -> str:
    """The peaks that are known and what PyTorch reaches, in words."""
    found = next((row for row in rows if row["kind"] == "limits"), None)
    if found is None:
        return "The device's limits were not measured."
    parts = []
    if found.get("peak_gflops"):
        rates = ", ".join(f"{r / 1e3:.0f} in {p}" for p, r in found["peak_gflops"].items())
        parts.append(f"Peak TFLOPS at the highest clock: {rates}.")
    if found.get("peak_gbs"):
        parts.append(f"Peak memory bandwidth: {found['peak_gbs']:.0f} GB/s.")
    if found.get("matmul_gflops"):
        rates = ", ".join(f"{r / 1e3:.0f} in {p}" for p, r in found["matmul_gflops"].items())
        parts.append(f"PyTorch's best matmul reaches {rates} TFLOPS.")
    if found.get("copy_gbs"):
        parts.append(f"A copy moves {found['copy_gbs']:.0f} GB/s.")
    return " ".join(parts) or "The device's limits are unknown."


def skipped_text(rows: list[dict]) -> str:
    """Who was left out and why, the same reasons together."""
    reasons: dict[tuple[str, str], list[str]] = {}
    graphs: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if row["kind"] == "skipped":
            what = f"{row['name']} {shape_text(row['axes'])} {row['precision']}"
            what += " (with backward)" if row["of"].endswith("train") else ""
            key = (row["provider"].removesuffix(GRAPH), row["why"])
            reasons.setdefault(key, []).append(what)
            graphs.setdefault(key, set()).add(row["provider"])
    if not reasons:
        return ""
    lines = ["Left out:", ""]
    for key, found in reasons.items():
        found = list(dict.fromkeys(found))
        some = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        lines.append(f"- {', '.join(sorted(graphs[key]))}: {key[1].replace('|', ' ')} ({some})")
    return "\n".join(lines)


def pictures(rows: list[dict]) -> dict[str, tuple[str, list]]:
    """name -> (title, bars): one for each kind of row and each precision that is there."""
    found = {}
    for kind, (stem, title) in PICTURES.items():
        for how in dict.fromkeys(precision(row) for row in rows if row["kind"] == kind):
            made = bars(rows, kind, how)
            if made:
                found[f"{stem}_{how}"] = (f"{title}, {how}", made)
    return found


def bars(rows: list[dict], kind: str, how: str) -> list[tuple[str, dict[str, float]]]:
    """(label, {provider: speed relative to the fastest eager}) of each group that has one."""
    found = {
        key: group
        for key, group in groups(rows, kind).items()
        if key[2] == how and "native" in group and any(p in group for p in EAGER)
    }
    if kind.startswith("op"):
        found = largest(found)
    made = []
    for (name, axes, _), group in found.items():
        base = fastest_eager(group)["us"]
        ways = {p: row["us"] for p, row in group.items() if p in EAGER and p != "timm"}
        ratios = {"torch": base / min(ways.values())} if ways else {}
        ratios |= {p: base / group[p]["us"] for p in ("timm", *SHOWN, "native") if p in group}
        made.append((f"{name} {shape_text(dict(axes))}", ratios))
    return made


def largest(found: dict[tuple, dict]) -> dict[tuple, dict]:
    """Of each operator the shape with the most work."""
    kept: dict[str, tuple] = {}
    for key, group in found.items():
        old = kept.get(key[0])
        if old is None or group["native"]["flops"] > found[old]["native"]["flops"]:
            kept[key[0]] = key
    return {key: found[key] for key in kept.values()}


def draw(rows: list[dict], folder: pathlib.Path) -> list[pathlib.Path]:
    """Every picture that these rows can fill."""
    return [
        charts.speedup_bars(found, folder / f"{stem}.svg", title, stamp(rows))
        for stem, (title, found) in pictures(rows).items()
    ]


def line(rows: list[dict]) -> str:
    """The times of one case, for the terminal."""
    times = ", ".join(f"{row['provider']} {_time(row['us'])}" for row in rows)
    ours = next((row for row in rows if row["provider"] == "native"), None)
    gain = f" ({ours['ratio']:.2f}x)" if ours and ours["ratio"] else ""
    return f"{times}{gain}"


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us"
