"""One run of `vitkern bench` on a CPU: cases one after another, rows kept as they come."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence

from ..measure.progress import Progress
from . import limits, rows, tables
from .cases import NAMES, PEERS, Case, Contestant, contestants, missing
from .rows import Row
from .turns import Runner

LIMITS_S = 0.3  # for each limit of the machine


def chosen(
    flags: dict[str, bool], against: Sequence[str], precisions: Sequence[str] | None
) -> list[Contestant]:
    """Vitkern and the peers asked for; those that are not installed have a row that says so."""
    found = []
    for one in contestants(flags):
        if one.provider != "native" and one.provider not in against:
            continue
        # A peer's fp32 is every row's rival, whatever precision was asked for.
        wanted = precisions is None or one.precision in precisions
        if not wanted and (one.provider == "native" or one.precision != "fp32"):
            continue
        lacks = missing(one.provider)
        if lacks:
            one = one._replace(why_not=f"not installed: pip install {' '.join(lacks)}")
        found.append(one)
    return found


def installed() -> list[str]:
    """The peers that can take part here."""
    return [name for name in PEERS if not missing(name)]


def run(
    runner: Runner, cases: Iterable[Case], everybody: Sequence[Contestant], path: pathlib.Path,
    say: Callable[[str], None],
) -> list[Row]:  # fmt: skip
    """All rows, which are in the file after each case: an interruption loses one case."""
    cases, stamp = list(cases), rows.stamp()
    ours = [one.precision for one in everybody if one.provider == "native"]
    first = limits.row(ours, LIMITS_S)
    found: list[Row] = [{**first, **stamp}]
    with Progress("cases") as progress:
        for number, case in enumerate(cases, 1):
            found += [{**row, **stamp} for row in runner.run(case, everybody)]
            rows.write(path, found)
            for line in tables.lines(found, case):
                say(line)
            progress(number, len(cases), case.text)
    # Others may have run at the beginning: a limit is the best that the machine showed.
    found[0] = {**limits.best(first, limits.row(ours, LIMITS_S)), **stamp}
    rows.write(path, found)
    return found


def report(found: list[Row]) -> str:
    """Markdown: the comparison, everybody's time, spread, error and memory, and the steps."""
    own = sorted({row["modules"] for row in found if row.get("modules")})
    modules = "Peers run timm's model." if own == ["timm"] else ""
    if "vitkern" in own:
        modules = "Peers run vitkern's modules in plain PyTorch: timm is not installed."
    absent = sorted({NAMES[row["provider"]] for row in found if "us" not in row and "why" in row})
    parts = [
        rows.stamp_text(found), "", *tables.comparison(found), "", tables.NOTES, modules,
        f"Without a time somewhere: {', '.join(absent)} (below)." if absent else "", "",
        *tables.details(found), "", tables.operators(found),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def problems(found: list[Row]) -> list[str]:
    """Vitkern without a time, or with an error that its precision does not allow."""
    without = [
        f"vitkern {row['precision']}, {row['name']} batch {row['axes']['B']}: {row['why']}"
        for row in found
        if row["kind"] == "peer" and row["provider"] == "native" and "us" not in row
    ]
    return without + tables.too_coarse(row for row in found if row["kind"] == "peer")
