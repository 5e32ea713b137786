"""The whole run on a GPU: check, time, write rows, draw: `python -m benchmarks.gpu --device cuda`.

Status 0: all is well. 1: a check failed, vitkern could not be timed, or the device stopped; rows
that were taken before are kept. 2: the command cannot be carried out here.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import traceback
from collections.abc import Iterable

from benchmarks.gpu import contract, device, limits, tables
from benchmarks.gpu.cases import Selection, cases
from benchmarks.gpu.competitors import GraphDiffers, NoKernels
from benchmarks.gpu.measure import measure
from benchmarks.gpu.publish import destination, publish
from vitkern.cli.bench import GPU_OPTIONS
from vitkern.cli.demo import progress
from vitkern.measure.machine import one_line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0]
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="the smallest shapes only")
    length.add_argument("--full", action="store_true", help="many more repetitions")
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda, cuda:1; ROCm's too")
    for option, settings in GPU_OPTIONS.items():
        parser.add_argument(option, **settings)
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="where the rows go")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="where pictures go")
    given = parser.parse_args(arguments)
    try:
        selection = Selection.of(given)
        gpu = device.open_device(given.device)
    except ValueError as error:
        print(f"vitkern bench: {error}", file=sys.stderr)
        return 2
    return run(gpu, selection, given.output, given.out)


def run(
    gpu: device.Device,
    selection: Selection,
    output: pathlib.Path | None = None,
    folder: pathlib.Path | None = None,
) -> int:
    """Check, then time; what was measured is written however the run ends."""
    facts = gpu.facts()
    print(f"vitkern bench on {one_line(facts)}")
    wanted = cases(selection)
    found: list[dict] = []
    try:
        troubles = check(wanted, gpu, selection, found) or time(wanted, gpu, selection, found)
    except (device.DeviceLost, GraphDiffers, NoKernels) as error:
        troubles = [str(error)]
    except Exception as error:  # rows of an hour are not thrown away for it
        traceback.print_exc()
        troubles = [f"{type(error).__name__}: {error}"]
    except KeyboardInterrupt:
        troubles = ["interrupted"]
    if any("us" in row for row in found):
        path = destination(selection, not troubles, output)
        print("\n".join(publish(found, facts, gpu, path, folder)))
    for trouble in troubles:
        print(f"FAILED: {trouble}", file=sys.stderr)
    return 1 if troubles else 0


def check(wanted: Iterable, gpu: device.Device, selection: Selection, found: list[dict]) -> list:
    """Prints the verdicts as a table; what failed, which stops the run, in words."""
    contract.require_kernels(gpu)
    verdicts = []
    for one in progress(contract.checks(wanted, gpu, selection)):
        verdicts.append(contract.verify(one, gpu))
    print("Errors against float64, worst/rms, in units of the result's rms:")
    print("\n".join(verdict.line() for verdict in verdicts))
    found += [verdict.row() for verdict in verdicts]
    complaint = contract.complaint(verdicts)
    return [complaint] if complaint else []


def time(wanted: Iterable, gpu: device.Device, selection: Selection, found: list[dict]) -> list:
    """Rows of every case; what kept vitkern itself from being timed."""
    measured = limits.row(gpu, list(selection.kept_precisions()), selection.quick)
    found.append(measured)
    troubles = []
    for case in progress(list(wanted)):
        outcome = measure(case, gpu, selection, measured)
        found += [*outcome.rows, *outcome.skipped]
        say(f"{case.text}: {tables.line(outcome.rows) or 'not timed'}")
        for row in outcome.skipped:
            say(f"    without {row['provider']}: {row['why']}")
        troubles += [f"{case.text}: {why}" for why in outcome.broken]
    return troubles


def say(text: str) -> None:
    """A line above the progress bar, if there is one."""
    try:
        from tqdm import tqdm
    except ImportError:
        print(text)
    else:
        tqdm.write(text)


if __name__ == "__main__":
    raise SystemExit(main())
