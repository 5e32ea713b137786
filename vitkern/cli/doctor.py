"""Examine this machine: CPU, instruction sets, AMX, threads, GPUs, versions, and what to mend.

One page: which instruction set runs and why not a better one, how many threads a call takes, what
each precision's matmuls reach on this CPU (a short calibration), GPUs with their kernels, versions,
optional extras. Then findings, each with what to do about it.

Status 0: nothing keeps vitkern from its work. 1: something does, and the page says what.

Examples:
    vitkern doctor
    vitkern doctor --no-measure     # without the calibration
    vitkern doctor --json           # for a program, or to attach to a bug report
    VITKERN_ISA=avx2 vitkern doctor # what another instruction set would reach
"""

from __future__ import annotations

import argparse
import json

ALIASES = ("info",)
SECONDS = 0.1  # for each precision


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the page")
    parser.add_argument(
        "--no-measure",
        action="store_true",
        help="leave out the rate of each precision, which takes half a second",
    )


def run(given: argparse.Namespace) -> int:
    from ..doctor import findings, page
    from ..doctor.examine import examine
    from ..terminal import Paint

    facts = examine(0 if given.no_measure else SECONDS)
    found = findings.findings(facts)
    if given.json:
        said = {**facts, "findings": [one._asdict() for one in found]}
        print(json.dumps(said, indent=1, default=str))
    else:
        print(page.page(facts, found, Paint.of()))
    return 1 if any(one.level == findings.ERROR for one in found) else 0
