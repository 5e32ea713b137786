"""vitkern beside PyTorch, torch.compile, ONNX Runtime and OpenVINO on this CPU.

    python -m benchmarks.cpu            # all rows of the published table: 20 minutes on 2 cores
    python -m benchmarks.cpu --quick    # two rows, briefly: 6 minutes; not published
    python -m benchmarks.cpu --class amx --minutes 10    # refuses a CPU without AMX

Every contestant has a process of its own and the same weights and images; they take turns. Run it
again after an interruption: finished rows are kept. A complete run replaces the results file of
this machine's class, benchmarks/results/cpu-CLASS.jsonl, and the tables that show it.

Status 0: all is well. 1: vitkern could not be timed, its error is too large, or the run is not
complete. 2: the command cannot be carried out here. 130: interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks import preload, report, rows
from benchmarks.cpu import results
from vitkern.bench import tables
from vitkern.bench.cases import CASES, CLASSES, QUICK, Case, Contestant, contestants, machine_class
from vitkern.bench.turns import Runner
from vitkern.measure.machine import describe, features, let_torch_run_bf16
from vitkern.measure.progress import Progress

SECONDS, QUICK_SECONDS = 60.0, 15.0  # of turns for a case
BUSY = 0.5  # load average above which the figures deserve a warning


def main(arguments: Sequence[str] | None = None, runner: Runner | None = None) -> int:
    given = parse(arguments)
    known = features()
    flags = known.get("flags", {})
    here = machine_class(flags)
    if given.machine_class and given.machine_class != here:
        words = CLASSES[given.machine_class][0]
        return refuse(f"this CPU has no {words}, it is of the class {CLASSES[here][0]}")
    if not known:
        return refuse("the native extension is not built: make setup")
    if os.environ.get("VITKERN_ISA"):
        return refuse("VITKERN_ISA forces an instruction set: unset it, or the class would lie")
    try:
        library = preload.chosen(given.preload, known)
    except ValueError as error:
        return refuse(str(error))
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"warning: load average {load:.1f}: repeat it when the machine is quiet")
    note = "" if library else let_torch_run_bf16()
    if note:
        print(note)
    cases = QUICK if given.quick else CASES
    seconds = QUICK_SECONDS if given.quick else SECONDS
    runner = runner or Runner(torch.get_num_threads(), seconds, preload=library)
    name = f"{here}-quick" if given.quick else here
    path = results.unfinished(name, given.results)
    kept = results.Kept(path, stamp())
    if given.fresh:
        kept.rows = []
    elif kept.dropped:
        print(f"{path.name} is not continued: {kept.dropped}")
    run(runner, kept, cases, contestants(flags), given.minutes)
    return finish(kept, cases, results.published(name, given.results))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two rows, briefly; not published")
    parser.add_argument("--fresh", action="store_true", help="forget an interrupted run")
    parser.add_argument(
        "--class", dest="machine_class", choices=tuple(CLASSES), help="refuse any other machine"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="begin only what ends within N minutes; run it again for the rest",
    )
    preload.add_option(parser)
    parser.add_argument(
        "--results", type=pathlib.Path, metavar="FOLDER", default=rows.RESULTS,
        help="where results files are (default benchmarks/results; with another one the documents"
        " stay as they are)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def refuse(why: str) -> int:
    print(f"benchmarks.cpu: {why}", file=sys.stderr)
    return 2


def stamp() -> dict[str, object]:
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return {"machine": describe(), "commit": rows.commit(), "date": date}


def run(
    runner: Runner, kept: results.Kept, cases: Sequence[Case],
    contestants: Sequence[Contestant], minutes: float | None,
) -> None:  # fmt: skip
    """Times what is not there yet. KeyboardInterrupt leaves the finished cases in the file."""
    start, longest = time.perf_counter(), 0.0
    with Progress("rows") as progress:
        for number, case in enumerate(cases, 1):
            if kept.has(case):
                print(f"{case.text}: kept from the run before")
                continue
            begin = time.perf_counter()
            if minutes is not None and begin - start + longest > 60 * minutes:
                print(
                    f"{case.text}: no time left of {minutes:g} minutes; run it again for this row"
                )
                continue
            kept.add(case, runner.run(case, contestants))
            longest = max(longest, time.perf_counter() - begin)
            print("\n".join(tables.lines(kept.rows, case)), flush=True)
            progress(number, len(cases), case.text)


def finish(kept: results.Kept, cases: Sequence[Case], target: pathlib.Path) -> int:
    """Publishes a complete run; says what is lacking otherwise."""
    print(tables.operators(kept.rows))
    problems = results.lacking(kept.rows, cases) + tables.too_coarse(kept.rows)
    for problem in problems:
        print(f"lacking: {problem}", file=sys.stderr)
    if problems:
        print(f"rows are in {kept.path}; the published table is as it was")
        return 1
    kept.path.replace(target)
    print(f"{len(kept.rows)} rows are in {target}")
    return report.main([]) if target in results.all_files() else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("interrupted: finished rows are kept, run it again to go on", file=sys.stderr)
        raise SystemExit(130) from None
