"""The published table of predictions on photographs: of every class of machines that has a file."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from benchmarks.rows import RESULTS, read
from benchmarks.tables import stamp
from vitkern.bench.cases import CLASSES

HEAD = ("| who | precision | answers as float64 | right | error |", "|---|---|--:|--:|--:|")
WHO = {"torch": "PyTorch", "native": "vitkern"}


def published(class_name: str) -> pathlib.Path:
    """The results file of a class of machines."""
    return RESULTS / f"agreement-{class_name}.jsonl"


def all_published() -> dict[str, list[dict]]:
    """class -> rows, of every class that was measured."""
    files = {name: published(name) for name in CLASSES}
    return {name: read(path) for name, path in files.items() if path.is_file()}


def lines(rows: list[dict]) -> list[str]:
    """The table of one run."""
    found = [*HEAD]
    for row in rows:
        same = f"{row['same']} of {row['photographs']}"
        right = f"{row['right']} of {row['named']}" if row["named"] else "–"
        who = f"{WHO[row['provider']]} | {row['precision']}"
        found.append(f"| {who} | {same} | {right} | {row['error']:.2g} |")
    return found


def text(measured: Mapping[str, list[dict]]) -> str:
    """A table for each class, under a line that says of what."""
    found = []
    for name, rows in measured.items():
        of = f"{rows[0]['model']}, {rows[0]['photographs']} photographs"
        found += [f"**{CLASSES[name][0]}**: {of}; {stamp(rows)}.", "", *lines(rows), ""]
    return "\n".join(found).strip() or "Not measured yet."
