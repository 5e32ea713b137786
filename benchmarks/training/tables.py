"""The published table of training steps: those of every class of machines."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from benchmarks.rows import RESULTS, read
from benchmarks.tables import stamp
from vitkern.bench.cases import CLASSES

HEAD = (
    "| model | batch | precision | eager PyTorch | torch.compile | vitkern | speed-up"
    " | memory: eager | torch.compile | vitkern |",
    "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
)


def published(class_name: str) -> pathlib.Path:
    """The results file of a class of machines."""
    return RESULTS / f"training-{class_name}.jsonl"


def all_published() -> dict[str, list[dict]]:
    """class -> rows, of every class that was measured."""
    files = {name: published(name) for name in CLASSES}
    return {name: read(path) for name, path in files.items() if path.is_file()}


def text(measured: Mapping[str, list[dict]]) -> str:
    """A table for each class; the speed-up is over the faster of the other two."""
    found = []
    for name, rows in measured.items():
        about = f"**{CLASSES[name][0]}**"
        found += [f"{about}: {stamp(rows)}." if "machine" in rows[0] else f"{about}:", ""]
        found += [*HEAD, *lines(rows), "", *losses(rows)]
    return "\n".join(found).strip() or "Not measured yet: run `make bench-training`."


def lines(rows: list[dict]) -> list[str]:
    cases: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["kind"] == "training_step":
            key = row["model"], row["batch"], row["precision"]
            cases.setdefault(key, {})[row["contestant"]] = row
    found = []
    for (model, batch, precision), by in cases.items():
        order = [by[name] for name in ("eager", "compile", "vitkern")]
        times = [f"{row['us'] / 1e3:.0f} ms" for row in order]
        memory = [f"{row['peak_bytes'] / 1e6:.0f} MB" for row in order]
        gain = min(row["us"] for row in order[:2]) / order[2]["us"]
        cells = (model, batch, precision, *times, f"**{gain:.2f}×**", *memory)
        found.append("| " + " | ".join(map(str, cells)) + " |")
    return found


def losses(rows: list[dict]) -> list[str]:
    """How far losses are from eager PyTorch's, in words."""
    for row in rows:
        if row["kind"] == "training_loss":
            ours, rounding = row["apart"]["vitkern"], row["apart"]["eager, other rounding"]
            return [
                f"Losses over {row['steps']} steps of a small model: at most {ours:.1g} from eager"
                f" PyTorch's; eager PyTorch with another number of threads is {rounding:.1g} from"
                " itself.",
                "",
            ]
    return []
