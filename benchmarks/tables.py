"""The report's Markdown: results rows in, tables with their conditions out."""

from __future__ import annotations

from benchmarks.rows import EAGER, precision, shape_text
from vitkern.bench.rows import stamp_text as stamp


def groups(rows: list[dict], kind: str) -> dict[tuple, dict[str, dict]]:
    """(name, axes, precision) -> {provider: row}: what was timed in turns with what."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["kind"] == kind:
            key = (row["name"], tuple(row["axes"].items()), precision(row))
            found.setdefault(key, {})[row["provider"]] = row
    return found


def fastest_eager(group: dict[str, dict]) -> dict:
    """The best that eager PyTorch did in these turns, at this precision or in fp32."""
    return min((group[p] for p in EAGER if p in group), key=lambda row: row["us"])


def models(rows: list[dict]) -> str:
    """Whole models: median milliseconds, and the speed-up over the fastest eager model."""
    lines = [
        "| model | batch | precision | PyTorch | timm | vitkern | images/s | speed-up |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for (name, axes, how), group in groups(rows, "model").items():
        batch, ours = dict(axes)["B"], group["native"]["us"]
        times = [f"{group[p]['us'] / 1e3:.1f} ms" if p in group else "–" for p in ("torch", "timm")]
        gain = fastest_eager(group)["us"] / ours
        lines.append(
            f"| {name} | {batch} | {how} | {times[0]} | {times[1]}"
            f" | {ours / 1e3:.1f} ms | {batch / ours * 1e6:.1f} | **{gain:.2f}×** |"
        )
    notes = (
        f"Median of calls timed in turns; {stamp(rows)}. 224 × 224 images, PyTorch and timm"
        " eager. The speed-up is over the faster of the two, and in a bf16 row also over eager fp32"
        " timed in the same turns"
    )
    slow = [g for g in groups(rows, "model").values() if "torch_fp32" in g]
    if slow and all(g["torch"]["us"] > g["torch_fp32"]["us"] for g in slow):
        notes += ", which beats PyTorch's own bf16 on this CPU"
    return "\n".join([*lines, "", notes + "."])


def operators(rows: list[dict]) -> str:
    """Every operator row: microseconds, rates, and the ratio to eager PyTorch at the same dtype."""
    lines = [
        "| operator | shape | dtype | PyTorch | vitkern | p20-p80 | GFLOPS | GB/s | speed-up |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (name, axes, how), group in groups(rows, "op").items():
        ours = group["native"]
        lines.append(
            f"| {name} | {shape_text(dict(axes))} | {how}"
            f" | {fastest_eager(group)['us']:.1f} µs"
            f" | {ours['us']:.1f} µs | {ours['us_p20']:.1f}-{ours['us_p80']:.1f}"
            f" | {ours['gflops']:.0f} | {ours['gbs']:.1f} | {ours['ratio']:.2f}× |"
        )
    return "\n".join(lines)
