"""Results files: one for each class of machines, and one of a run that is not finished.

`benchmarks/results/cpu-avx2.jsonl` holds the newest complete run on a CPU with AVX2 and no more; a
run on another class writes another file. What a run has measured so far stands in a file beside
it, case by case, from which the next run of the same code on the same machine goes on.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from benchmarks import rows
from vitkern.bench.cases import CLASSES, PEERS, Case
from vitkern.bench.rows import is_of, write

PREFIX = "cpu-"
UNFINISHED = ".unfinished.jsonl"  # not committed


def published(class_name: str, folder: pathlib.Path = rows.RESULTS) -> pathlib.Path:
    return folder / f"{PREFIX}{class_name}.jsonl"


def unfinished(class_name: str, folder: pathlib.Path = rows.RESULTS) -> pathlib.Path:
    return folder / f"{PREFIX}{class_name}{UNFINISHED}"


def all_published(folder: pathlib.Path = rows.RESULTS) -> dict[str, list[dict]]:
    """class -> rows, of every class that was measured, the most capable first."""
    return {name: rows.read(path) for path, name in all_files(folder).items() if path.is_file()}


def all_files(folder: pathlib.Path = rows.RESULTS) -> dict[pathlib.Path, str]:
    """The files that documents show, with the class of each."""
    return {published(name, folder): name for name in CLASSES}


class Kept:
    """The finished cases of a run, in its file."""

    def __init__(self, path: pathlib.Path, stamp: dict[str, object]) -> None:
        """`stamp`: machine, commit and date of this run; rows of another code or machine go."""
        self.path, self.stamp = path, stamp
        self.rows: list[dict] = []
        self.dropped = ""  # why what the file held is not used
        if path.is_file():
            found = rows.read(path) if path.stat().st_size else []
            if stamp["commit"].endswith("+"):
                self.dropped = "the code differs from its commit, which may not be what was timed"
            elif any(row[key] != stamp[key] for row in found for key in ("machine", "commit")):
                self.dropped = "it is of another commit, machine or version of PyTorch"
            else:
                self.rows = found

    def has(self, case: Case) -> bool:
        """Whether it is finished: what lacks a library or vitkern is to be tried again."""
        return not lacking(self.rows, [case])

    def add(self, case: Case, found: Iterable[dict]) -> None:
        """Keeps the rows of a finished case; the file is whole at every moment."""
        self.rows = [row for row in self.rows if not is_of(row, case)]
        self.rows += [{**row, **self.stamp} for row in found]
        write(self.path, self.rows)


def lacking(found: Iterable[dict], cases: Iterable[Case]) -> list[str]:
    """What keeps these rows from being published, in words: nothing for a complete run.

    A peer that fails is part of the result; one that is not installed is not, and neither is
    vitkern without a time.
    """
    found, problems = list(found), []
    for case in cases:
        these = [row for row in found if is_of(row, case)]
        if not these:
            problems.append(f"{case.text} was not run")
            continue
        for row in these:
            if row["provider"] == "native" and "us" not in row:
                problems.append(f"{case.text}: vitkern {row['precision']}: {row['why']}")
        for name in PEERS:
            own = [row for row in these if row["provider"] == name and row["precision"] == "fp32"]
            if own and own[0].get("modules") == "vitkern":
                problems.append(f"{case.text}: {name}: without timm its modules are vitkern's")
            elif not own or own[0].get("missing"):
                why = own[0]["why"] if own else "it was not asked"
                problems.append(f"{case.text}: {name}: {why}")
    return problems
