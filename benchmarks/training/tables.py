"""The published table of training steps: those of every class of machines."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from benchmarks.rows import RESULTS, read
from benchmarks.tables import stamp
from vitkern.bench.cases import CLASSES

PEERS = ("eager", "compile")
STEP, LOSSES = "training_step", "training_loss"  # kinds of rows
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
    """A table for each class; the speed-up is over the faster of the other two, at bf16 also where
    its fp32 is faster."""
    found = []
    for name, rows in measured.items():
        about = f"**{CLASSES[name][0]}**"
        found += [f"{about}: {stamp(rows)}." if "machine" in rows[0] else f"{about}:", ""]
        steps = lines(rows)
        found += [*([*HEAD, *steps, ""] if steps else []), *losses(rows)]
    return "\n".join(found).strip() or "Not measured yet: run `make bench-training`."


def lines(rows: list[dict]) -> list[str]:
    steps = {
        (row["model"], row["batch"], row["precision"], row["contestant"]): row
        for row in rows
        if row["kind"] == STEP
    }
    found = []
    for model, batch, precision in dict.fromkeys(key[:3] for key in steps):
        ours = steps[model, batch, precision, "vitkern"]
        cells, memory, peers = [], [], []
        for peer in PEERS:  # at its faster precision, of those that are exact enough
            theirs = min(
                (row for p in {precision, "fp32"} if (row := steps.get((model, batch, p, peer)))),
                key=lambda row: row["us"],
            )
            note = "" if theirs["precision"] == precision else f" ({theirs['precision']})"
            peers.append(theirs["us"])
            cells.append(f"{theirs['us'] / 1e3:.0f} ms{note}")
            memory.append(f"{theirs['peak_bytes'] / 1e6:.0f} MB{note}")
        cells += [f"{ours['us'] / 1e3:.0f} ms", f"**{min(peers) / ours['us']:.2f}×**", *memory]
        cells.append(f"{ours['peak_bytes'] / 1e6:.0f} MB")
        found.append("| " + " | ".join((model, str(batch), precision, *cells)) + " |")
    return found


def losses(rows: list[dict]) -> list[str]:
    """How far losses are from eager PyTorch's, in words."""
    for row in rows:
        if row["kind"] == LOSSES:
            said = _pairs(row) if "runs" in row else _one_pair(row)
            return [f"Losses over {row['steps']} steps of a small model: {said}", ""]
    return []


def _pairs(row: dict) -> str:
    ours, theirs = row["apart"]["vitkern"], row["apart"]["eager"]
    said = (
        f"{row['runs']} runs of vitkern's are {ours['median']:.2g} from {row['runs']} of eager"
        f" PyTorch's, {ours['largest']:.2g} at most (median and largest of {ours['pairs']} pairs of"
        f" runs, each at its worst step); eager PyTorch's are {theirs['median']:.2g} from each"
        f" other, {theirs['largest']:.2g} at most ({theirs['pairs']} pairs). But for the first of"
        " each, runs begin with weights that are moved by one unit in the last place"
    )
    if "commit" in row:
        said += f"; commit {row['commit']}, {row['date']}"
    return said + "."


def _one_pair(row: dict) -> str:
    """Of files that were written when one run of vitkern's was compared with one of eager's."""
    ours, rounding = row["apart"]["vitkern"], row["apart"]["eager, other rounding"]
    return (
        f"at most {ours:.1g} from eager PyTorch's; eager PyTorch with another number of threads is"
        f" {rounding:.1g} from itself (one pair of runs each)."
    )
