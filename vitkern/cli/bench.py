"""Run the benchmark suite of a source checkout and draw its report.

The suite compares every operator and whole models with eager PyTorch, timed in turns in one
process, and writes one JSON line per measurement. Arguments after -- go to pytest:
    vitkern bench -- -k layernorm
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys


def arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="the smallest shapes only")
    length.add_argument("--full", action="store_true", help="many more repetitions")
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE", help="where the rows go")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="draw --results there")
    parser.add_argument("--source", type=pathlib.Path, metavar="FOLDER", help="the source checkout")
    parser.add_argument("rest", nargs="*", metavar="-- ARGUMENT", help="arguments for pytest")


def checkout(given: pathlib.Path | None) -> pathlib.Path:
    """The folder that holds benchmarks/: the given one, the current one or the package's parent."""
    places = [given] if given else [pathlib.Path.cwd(), pathlib.Path(__file__).parents[2]]
    for place in places:
        if (place / "benchmarks" / "test_operators.py").is_file():
            return place.resolve()
    looked = " or ".join(str(place) for place in places)
    raise FileNotFoundError(
        f"no benchmarks in {looked}: run in a clone of the repository or name one with --source"
    )


def run(given: argparse.Namespace) -> int:
    source = checkout(given.source)
    if given.out and not given.results:
        raise ValueError("--out draws the rows of --results FILE: give both")
    suite = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "-q"]
    suite += [f"--{mode}" for mode in ("quick", "full") if getattr(given, mode)]
    if given.results:
        suite += ["--results", str(given.results.resolve())]
    status = subprocess.run([*suite, *given.rest], cwd=source).returncode
    if status == 0 and given.out:
        report = [sys.executable, "-m", "benchmarks.report", str(given.results.resolve())]
        status = subprocess.run(
            [*report, "--pictures", str(given.out.resolve())], cwd=source
        ).returncode
    return status
