"""Results files of several machines, or of several versions, side by side."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .cases import NAMES
from .rows import Row, read, stamp_text

KINDS = ("peer", "model")  # rows of whole models: of `vitkern bench`, of the benchmark suite


class Key(NamedTuple):
    """What must agree for two rows to be compared."""

    name: str
    batch: int
    size: int
    precision: str
    provider: str


def key_of(row: Mapping) -> Key | None:
    """None for what is no timed model."""
    if row.get("kind") not in KINDS or "us" not in row or "B" not in row.get("axes", {}):
        return None
    size = row["axes"].get("Y", 224)  # the suite's models have 224 pixels
    return Key(row["name"], row["axes"]["B"], size, row["precision"], row["provider"])


def timed(path: pathlib.Path) -> tuple[list[Row], dict[Key, Row]]:
    """All rows of a file, and those that can be compared; a ValueError where there are none."""
    rows = read(path)
    lacking = [name for name in ("machine", "commit", "date") if name not in rows[0]]
    if lacking:
        raise ValueError(f"{path}:1 does not say its {', '.join(lacking)}: it is no results file")
    found: dict[Key, Row] = {}
    for row in rows:
        key = key_of(row)
        if key is not None:
            found[key] = row
    if not found:
        raise ValueError(f"{path} has no times of models: compare files of vitkern bench")
    return rows, found


def table(paths: Sequence[pathlib.Path]) -> str:
    """Markdown: a line for each model, precision and contestant that the first file shares."""
    files = [timed(path) for path in paths]
    names = [chr(ord("A") + index) for index in range(len(paths))]
    lines = [
        f"{name}: {path}: {stamp_text(rows)}"
        for name, path, (rows, _) in zip(names, paths, files, strict=True)
    ]
    first = files[0][1]
    shared = [key for key in first if any(key in found for _, found in files[1:])]
    if not shared:
        raise ValueError(
            f"{' and '.join(map(str, paths))} have no model, batch, size, precision and contestant"
            " in common"
        )
    speeds = " | ".join(f"{name} over {names[0]}" for name in names[1:])
    lines += [
        "",
        f"| model | batch | image | precision | who | {' | '.join(names)} | {speeds} |",
        "|---|--:|--:|---|---|" + "--:|" * (2 * len(names) - 1),
    ]
    for key in shared:
        cells = [_cell(found.get(key)) for _, found in files]
        gains = [_gain(first[key], found.get(key)) for _, found in files[1:]]
        who = NAMES.get(key.provider, key.provider)
        lines.append(
            f"| {key.name} | {key.batch} | {key.size} | {key.precision} | {who}"
            f" | {' | '.join(cells)} | {' | '.join(gains)} |"
        )
    alone = [len(set(found) - set(shared)) for _, found in files]
    if any(alone):
        said = ", ".join(
            f"{count} of {name}" for name, count in zip(names, alone, strict=True) if count
        )
        lines += ["", f"Not compared, as no other file has them: {said}."]
    notes = "Median milliseconds; in brackets vitkern's share of the machine's multiply rate."
    return "\n".join([*lines, "", notes])


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    share = ""
    if row["provider"] == "native" and row.get("gflops") and row.get("multiply_gflops"):
        share = f" ({row['gflops'] / row['multiply_gflops']:.0%})"
    return f"{row['us'] / 1e3:.1f} ms{share}"


def _gain(first: Row, other: Row | None) -> str:
    return "–" if other is None else f"{first['us'] / other['us']:.2f}×"
