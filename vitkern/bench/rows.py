"""Rows of a results file: one JSON object a line, a measurement of one contestant each."""

from __future__ import annotations

import datetime
import json
import pathlib
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

import vitkern

from ..measure.machine import describe, one_line
from .cases import Case

ROOT = pathlib.Path(vitkern.__file__).parents[1]  # of a clone, where this is one
# What decides how fast the code is; a change elsewhere leaves a measurement valid.
MEASURED_PATHS = ("vitkern", "csrc", "CMakeLists.txt", "setup.py")

Row = dict[str, Any]


def commit() -> str:
    """The commit that was measured, with a + when the code differs from it; "none" outside git."""
    if not (ROOT / "csrc").is_dir():  # installed: a repository around it is somebody else's
        return "none"

    def git(*arguments: str) -> str:
        said = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return said.stdout.strip() if said.returncode == 0 else ""

    try:
        short = git("rev-parse", "--short", "HEAD") or "none"
        return short + ("+" if git("status", "--porcelain", "--", *MEASURED_PATHS) else "")
    except OSError:
        return "none"


def stamp() -> Row:
    """Machine, code and date: what every row carries."""
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    code = {"commit": commit(), "vitkern": vitkern.__version__}
    return {"machine": describe(), **code, "date": date}


def stamp_text(rows: list[Row]) -> str:
    """Machine, commit and date of a results file, in one line."""
    first = rows[0]
    code = f"commit {first['commit']}"
    if first["commit"] == "none" and "vitkern" in first:
        code = f"vitkern {first['vitkern']}"
    return f"{one_line(first['machine'])}; {code}, {first['date']}"


def write(path: pathlib.Path, found: Iterable[Mapping]) -> None:
    """The file is whole at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(json.dumps(row) + "\n" for row in found))
    beside.replace(path)


def read(path: pathlib.Path, advice: str = "vitkern bench writes one") -> list[Row]:
    """The rows of a results file; the error names the file and line that is not one."""
    if not path.is_file():
        raise FileNotFoundError(f"no results file {path}: {advice} first")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not a results row: {error}") from error
        if not isinstance(row, dict) or "kind" not in row:
            raise ValueError(f"{path}:{number} is not a results row: it has no kind")
        found.append(row)
    if not found:
        raise ValueError(f"{path} has no rows: {advice} again")
    return found


def is_of(row: Mapping, case: Case) -> bool:
    return row["kind"] == "peer" and (row["name"], row["axes"]) == (case.name, case.axes)
