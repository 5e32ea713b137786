"""What `vitkern verify` found, as a table for people and as JSON for programs."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..contract import SLACK
from .run import Checked

CONTRACT = (
    "The truth is the reference in float64. An error is given as a multiple of the one that PyTorch"
    f" itself makes on this machine at the same precision: at most {SLACK[0]:g} times its worst and"
    f" {SLACK[1]:g} times its rms error, plus one eps (docs/numerics.md). The share is that of"
    " what is allowed, the larger of both."
)


class Line(NamedTuple):
    """All checks of one row of the table: the largest multiples, and what failed."""

    name: str
    part: str
    precision: str
    isa: str
    checks: int
    worst: float
    rms: float
    share: float
    failures: tuple[Checked, ...]

    @property
    def verdict(self) -> str:
        return "TOO LARGE" if self.failures else "ok"


def lines(rows: Iterable[Checked]) -> list[Line]:
    """One for each operator or model, part, precision and instruction set."""
    groups: dict[tuple[str, str, str, str], list[Checked]] = {}
    for row in rows:
        groups.setdefault((row.name, row.part, row.precision, row.isa), []).append(row)
    return [_line(key, group) for key, group in groups.items()]


def _line(key: tuple[str, str, str, str], group: Sequence[Checked]) -> Line:
    # The check that is nearest to its limit speaks for the row: a multiple of an error of PyTorch
    # that is almost 0 says nothing, and one eps is allowed beside it.
    nearest = max(group, key=lambda row: (bool(row.problem), row.share))
    failures = tuple(row for row in group if row.problem)
    return Line(*key, len(group), *nearest.multiples, nearest.share, failures)


class Certificate(NamedTuple):
    """Checks with where and when they were made."""

    rows: Sequence[Checked]
    machine: Mapping[str, Any]
    date: str
    seconds: float
    command: str

    @classmethod
    def of(
        cls, rows: Sequence[Checked], machine: Mapping[str, Any], seconds: float, command: str
    ) -> Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        return cls(rows, machine, now.strftime("%Y-%m-%d %H:%M UTC"), round(seconds, 1), command)

    @property
    def failures(self) -> list[Checked]:
        return [row for row in self.rows if row.problem]

    @property
    def passed(self) -> bool:
        return bool(self.rows) and not self.failures

    def summary(self) -> str:
        count, bad = len(self.rows), len(self.failures)
        if bad:
            return f"{bad} of {count} results break the error contract"
        return f"all {count} results keep the error contract"

    def text(self) -> str:
        """The table of a terminal."""
        found = lines(self.rows)
        wide = max([len("operator or model"), *(len(line.name) for line in found)])
        head = f"{'operator or model':<{wide}}  {'part':<14}{'precision':<10}{'on':<13}"
        head += f"{'checks':>6}{'worst':>8}{'rms':>8}{'share':>7}"
        body = [
            f"{line.name:<{wide}}  {line.part:<14}{line.precision:<10}{line.isa:<13}"
            f"{line.checks:>6}{line.worst:>7.2f}x{line.rms:>7.2f}x{line.share:>6.0%}"
            f"  {line.verdict}"
            for line in found
        ]
        return "\n".join([head, *body])

    def problems(self, most: int = 20) -> list[str]:
        """The results that break the contract, with shape and both errors."""
        said = []
        for row in self.failures[:most]:
            where = (row.name, row.part, row.result, row.shape, row.precision, row.isa)
            said.append(f"{' '.join(filter(None, where))}: {row.problem}")
        more = len(self.failures) - most
        return [*said, f"and {more} more"] if more > 0 else said

    def markdown(self) -> str:
        machine = "\n".join(f"| {name} | {value} |" for name, value in self.machine.items())
        table = "\n".join(
            f"| {line.name} | {line.part} | {line.precision} | {line.isa} | {line.checks}"
            f" | {line.worst:.2f}× | {line.rms:.2f}× | {line.share:.0%} | {line.verdict} |"
            for line in lines(self.rows)
        )
        failed = "".join(f"- {problem}\n" for problem in self.problems())
        return (
            f"# Error certificate\n\n**{self.summary()}**, {self.date}, by `{self.command}` in"
            f" {self.seconds:.0f} s.\n\n{CONTRACT}\n\n{failed}{chr(10) if failed else ''}"
            f"| machine | |\n|---|---|\n{machine}\n\n"
            "| operator or model | part | precision | on | checks | worst | rms | share | verdict"
            f" |\n|---|---|---|---|--:|--:|--:|--:|---|\n{table}\n"
        )

    def json(self) -> str:
        rows = [
            {**row._asdict(), "multiples": row.multiples, "passed": not row.problem}
            for row in self.rows
        ]
        for row in rows:
            row["torchs"], row["ours"] = row["torchs"]._asdict(), row["ours"]._asdict()
        about = {
            "passed": self.passed,
            "summary": self.summary(),
            "date": self.date,
            "seconds": self.seconds,
            "command": self.command,
            "slack": SLACK,
            "machine": dict(self.machine),
        }
        return json.dumps({**about, "checks": rows}, indent=1)

    def save(self, prefix: pathlib.Path) -> list[pathlib.Path]:
        """PREFIX.md and PREFIX.json; the folder is made."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        made = [prefix.with_name(prefix.name + ending) for ending in (".md", ".json")]
        made[0].write_text(self.markdown(), encoding="utf-8")
        made[1].write_text(self.json() + "\n", encoding="utf-8")
        return made
