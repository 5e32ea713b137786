"""Compiles every kernel of two models with every Triton for every architecture, for docs/gpu.md.

    python -m tools.triton_matrix                          # what is missing: hours on two cores
    python -m tools.triton_matrix --triton 3.7.1 --arch sm_80,gfx942 --model Ti/16
    python -m tools.triton_matrix --page                   # the table alone, from the rows
    python -m tools.triton_matrix --check                  # status 1 if the page is old

A cell is a Triton, an architecture and a model: its forward and training step in bf16 and fp32, at
batches of 1 and 8, compiled and loaded as a user's first forward would be in a process with that
Triton (tests/gpu/version_matrix.py), which is installed beside (other_tritons.py). A row goes to
benchmarks/results/triton_matrix.jsonl when its cell ends, so that an interrupted run goes on: cells
whose kernels have not changed are not compiled again, but with --again. Status 1 if a kernel fails.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

from benchmarks import rows as results
from tests.gpu import version_matrix
from tests.gpu.other_tritons import VERSIONS, NotInstalled, run_with
from tools import page_table
from vitkern.gpu.compiler import source_of

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- triton matrix -->", "<!-- end of triton matrix -->"
ROWS = results.RESULTS / "triton_matrix.jsonl"
ARCHS = (
    "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100",
)  # fmt: skip
# A plain one, and one with rotary positions and a gated MLP.
MODELS = ("Ti/16", "eva02_tiny_patch14_336")
PRECISIONS = "bf16,fp32"
SAID = 5  # complaints that a row keeps

Cell = tuple[str, str, str]  # Triton, architecture, model


@functools.cache
def source_of_cell(arch: str, model: str) -> str:
    """A hash of the kernels that are compiled: their sources and all that is promised of them."""
    wanted = version_matrix.launches(arch, model, PRECISIONS.split(","))
    parts = sorted((one.variant.name, source_of(one.kernel)) for one in wanted)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def compiled(cell: Cell) -> dict[str, Any]:
    """The row of a cell, compiled now."""
    version, arch, model = cell
    begin = time.perf_counter()
    ran = run_with(version, "-m", "tests.gpu.version_matrix", arch, model, PRECISIONS)
    seconds = time.perf_counter() - begin
    count = re.search(rf"triton {re.escape(version)} {arch}: (\d+) of (\d+) kernels", ran.stdout)
    good, every = map(int, count.groups()) if count else (0, 0)
    wrong = re.findall(r"^FAILED .*", ran.stdout, re.M)
    if not count or (ran.returncode and not wrong):
        wrong = [_death(ran)]
    return {
        "kind": "triton_matrix", "triton": version, "arch": arch, "model": model,
        "kernels": every, "failed": every - good, "wrong": wrong[:SAID],
        "seconds": round(seconds), "source": source_of_cell(arch, model),
        "commit": results.commit(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def _death(ran: subprocess.CompletedProcess) -> str:
    """Where a process ended that did not say how many kernels it compiled."""
    how = f"ended by signal {-ran.returncode}" if ran.returncode < 0 else "ended"
    at = re.findall(r"^compiling \S+ (.*)", ran.stderr, re.M)
    where = f" at {at[-1]}" if at else ""
    return f"{how}{where}: {' '.join(ran.stderr.split())[-300:]}"


def recorded() -> dict[Cell, dict[str, Any]]:
    rows = results.read(ROWS) if ROWS.is_file() else []
    return {(row["triton"], row["arch"], row["model"]): row for row in rows}


def run(given: argparse.Namespace) -> int:
    """Compile the cells that are missing; 1 if a kernel of any, old or new, does not compile."""
    wrong = 0
    for version in given.triton:
        for arch, model in ((a, m) for a in given.arch for m in given.model):
            rows, cell = recorded(), (version, arch, model)
            row = rows.get(cell)
            if given.again or row is None or row["source"] != source_of_cell(arch, model):
                try:
                    row = compiled(cell)
                except NotInstalled as error:
                    print(error, flush=True)
                    break
                rows[cell] = row
                text = "".join(json.dumps(rows[name]) + "\n" for name in sorted(rows, key=_order))
                ROWS.write_text(text)
                done = f"{row['kernels'] - row['failed']} of {row['kernels']} kernels"
                print(f"triton {version} {arch} {model}: {done} in {row['seconds']} s", flush=True)
            print(*row["wrong"], sep="\n", end="\n" if row["wrong"] else "", flush=True)
            wrong += bool(row["wrong"])
    return int(wrong > 0)


def _order(cell: Cell) -> tuple[Any, ...]:
    version, arch, model = cell
    return [int(part) for part in version.split(".")], ARCHS.index(arch), MODELS.index(model)


def table(rows: dict[Cell, dict[str, Any]]) -> str:
    """Markdown: kernels of the models on each architecture, all compiled unless it says so."""
    text = "| Triton | " + " | ".join(ARCHS) + " | minutes | commit |\n"
    text += "|---|" + "--:|" * (len(ARCHS) + 1) + "---|\n"
    for version in VERSIONS:
        own = [row for cell, row in rows.items() if cell[0] == version]
        if not own:
            continue
        cells = [_text([row for row in own if row["arch"] == arch]) for arch in ARCHS]
        minutes = sum(row["seconds"] for row in own) / 60
        commits = ", ".join(sorted({row["commit"] for row in own}))
        text += f"| {version} | {' | '.join(cells)} | {minutes:.0f} | {commits} |\n"
    return text


def _text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "–"
    if any(row["wrong"] and not row["failed"] for row in rows):
        return "died"
    kernels, failed = (sum(row[name] for row in rows) for name in ("kernels", "failed"))
    return f"{failed} of {kernels} fail" if failed else str(kernels)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    def several(known: tuple[str, ...]) -> Any:
        def read(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(
                    f"{', '.join(unknown)} is not of {', '.join(known)}"
                )
            return text.split(",")

        return read

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, known in (("--triton", VERSIONS), ("--arch", ARCHS), ("--model", MODELS)):
        parser.add_argument(
            name, type=several(known), default=list(known), metavar="NAME,...",
            help=f"of {', '.join(known)} (default all)",
        )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="cells that are there, too")
    parser.add_argument("--page", action="store_true", help="compile nothing, write the table")
    parser.add_argument("--check", action="store_true", help="compile and write nothing, compare")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parsed(arguments)
    status = 0 if given.page or given.check else run(given)
    return page_table.update(PAGE, BEGIN, END, table(recorded()), given.check) or status


if __name__ == "__main__":
    sys.exit(main())
