"""Training steps of vitkern, eager PyTorch (timm) and torch.compile on this CPU; loss curves.

    python -m benchmarks.training             # 10 minutes on 2 cores; close everything else
    python -m benchmarks.training --quick     # the small model only, briefly; not published
    python -m benchmarks.training --curves    # only the losses, which any load leaves as they are
    python -m benchmarks.training --preload LIBRARY    # of the peers, as benchmarks.cpu has it

Every contestant has a process of its own and the same weights and images; they take turns. Peers
have no turn in bf16 on a CPU without bf16 instructions: emulated, it is several times slower than
their fp32. A complete run replaces benchmarks/results/training-CLASS.jsonl, where CLASS is this
machine's, the picture of the losses, and the tables of docs/training.md; --curves replaces the
losses among them. With VITKERN_ISA set nothing is published.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import preload, report, rows
from benchmarks.training import curves, tables
from vitkern.bench.cases import machine_class, multiplies_bf16
from vitkern.bench.rows import write
from vitkern.bench.turns import Worker, child_environment
from vitkern.measure.machine import describe, features, let_torch_run_bf16
from vitkern.measure.progress import Progress
from vitkern.measure.timing import Spread

PRECISIONS = ("fp32", "bf16")
PICTURE = rows.ROOT / "docs" / "pictures" / "training_loss.png"
ROUNDS = (4, 20)  # at least, at most
SECONDS = 120.0  # for the turns of a case


class Case(NamedTuple):
    model: str
    batch: int


CASES = (Case("vit_tiny_patch16_224", 16), Case("vit_base_patch16_224", 8))


class Contestant(NamedTuple):
    contestant: str
    precision: str


def contestants() -> list[Contestant]:
    """All at each precision, those left out that the CPU has no instructions for."""
    bf16 = multiplies_bf16(features()["flags"])
    return [
        Contestant(name, precision)
        for precision in PRECISIONS
        for name in ("vitkern", *tables.PEERS)
        if bf16 or precision == "fp32" or name == "vitkern"
    ]


def started(one: Contestant, case: Case, library: pathlib.Path | None) -> Worker:
    """A contestant's process (worker.py)."""
    given = case._asdict() | one._asdict() | {"threads": torch.get_num_threads()}
    command = [sys.executable, "-m", "benchmarks.training.worker", json.dumps(given)]
    environment = child_environment()
    if library and one.contestant in tables.PEERS:  # which may then use what was kept from them
        environment.pop("ONEDNN_MAX_CPU_ISA", None)
        environment["LD_PRELOAD"] = str(library.resolve())
    return Worker(command, tempfile.TemporaryFile("w+"), environment)


def measure(case: Case, seconds: float, library: pathlib.Path | None) -> Iterator[dict[str, Any]]:
    """A row for each contestant."""
    children = {one: started(one, case, library) for one in contestants()}
    try:
        for child in children.values():  # compiles, and allocates the optimizer's state
            child.ask("step"), child.ask("step")
        times: dict[Contestant, list[float]] = {one: [] for one in children}
        end, done = time.monotonic() + seconds, 0
        while done < ROUNDS[0] or (time.monotonic() < end and done < ROUNDS[1]):
            for one, child in children.items():
                times[one].append(child.ask("step")["seconds"])
            done += 1
        for one, child in children.items():
            spread, memory = Spread.of(times[one]), child.ask("memory")
            yield {
                "kind": tables.STEP, **case._asdict(), **one._asdict(), "us": spread.median,
                "us_p20": spread.p20, "us_p80": spread.p80, "rounds": done,
                "peak_bytes": memory["peak"] - memory["before"],
            }  # fmt: skip
    finally:
        for child in children.values():
            child.close()


def loss_row(found: dict[str, list[curves.Curve]]) -> dict[str, Any]:
    each = {name: it._asdict() for name, it in curves.apart(found).items()}
    return {"kind": tables.LOSSES, "steps": curves.STEPS, "runs": curves.RUNS, "apart": each}


def publish(found: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Rows to a class's results file, in the place of those of the same kinds, and to the page."""
    kinds = {row["kind"] for row in found}
    others = rows.read(path) if path.is_file() else []
    kept = [row for row in others if row["kind"] not in kinds]
    if not any(row["kind"] == tables.STEP for row in [*kept, *found]):
        raise ValueError(f"{path} has no steps for losses to stand beside: measure all of it")
    write(path, kept + rows.stamped(found, describe()))
    for page, text in report.training_documents().items():
        page.write_text(text)


def refuse(why: ValueError) -> int:
    print(f"benchmarks.training: {why}", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="the small model, not published")
    parser.add_argument("--curves", action="store_true", help="only the losses")
    preload.add_option(parser)
    given = parser.parse_args(arguments)
    try:
        library = preload.chosen(given.preload, features())
    except ValueError as error:
        return refuse(error)
    note = let_torch_run_bf16()
    if note:
        print(note)
    found: list[dict[str, Any]] = []
    cases = () if given.curves else CASES[:1] if given.quick else CASES
    with Progress("case", already=0) as progress:
        for done, case in enumerate(cases, 1):
            found += measure(case, 10.0 if given.quick else SECONDS, library)
            progress(done, len(cases), case.model)
    here = machine_class(features()["flags"])
    published = not given.quick and not os.environ.get("VITKERN_ISA")
    if not given.quick:
        losses = curves.measure()
        found.append(loss_row(losses))
    print(tables.text({here: found}))
    if published:
        try:
            publish(found, tables.published(here))
        except ValueError as error:
            return refuse(error)
        curves.draw(losses, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
