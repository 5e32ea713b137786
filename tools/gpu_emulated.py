"""What the PTX emulator executes of a ViT's block, by class of instruction, for docs/gpu.md.

    python -m tools.gpu_emulated                  # the table from the rows that are there
    python -m tools.gpu_emulated --run            # every case first: an hour on two busy cores
    python -m tools.gpu_emulated --run --arch sm_90
    python -m tools.gpu_emulated --check          # status 1 if the page is old

The cases are those of tests/gpu/test_ptx_block.py, inference and training steps in every precision,
with few rows and with many, checked as there. A row of benchmarks/results/gpu_emulated.jsonl is an
architecture: its kernels (variants) that hold an instruction of a class, and how often warps
executed one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
import time
from typing import Any
from unittest import mock

from benchmarks import rows as results
from tests.evidence.ptx.machine import CLASSES
from tools import page_table
from vitkern.gpu.launch import Executor

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- emulated -->", "<!-- end of emulated -->"
ROWS = results.RESULTS / "gpu_emulated.jsonl"


def run(arch: str) -> dict[str, Any]:
    """Every case of an architecture, emulated and checked; its row."""
    import triton

    from tests.gpu import test_ptx_block as block

    executors: list[Any] = []
    emulator = block.emulator

    def watched(*arguments: Any) -> Executor:
        executors.append(emulator(*arguments))
        return executors[-1]

    begin, count = time.perf_counter(), 0
    with mock.patch.object(block, "emulator", watched):
        for case in block.cases(()):
            if case.values[0] != arch:
                continue
            for test in (block.test_inference_of_a_block, block.test_training_step_of_a_block):
                test(*case.values)
                count += 1
                took = time.perf_counter() - begin
                print(f"{test.__name__} {case.id}, {took:.0f} s so far", file=sys.stderr)
    kernels: dict[str, set[str]] = {name: set() for name in CLASSES}
    for executor in executors:
        for name, found in executor.classes().items():
            kernels[name] |= found
    return {
        "kind": "gpu_emulated",
        "arch": arch,
        "cases": count,
        "kernels": len({one.variant.name for e in executors for one in e.launches}),
        "holding": {name: len(found) for name, found in kernels.items()},
        "executed": {name: sum(e.executed[name] for e in executors) for name in CLASSES},
        "triton": triton.__version__,
        "commit": results.commit(),
        "date": datetime.date.today().isoformat(),
    }


def recorded() -> dict[str, dict[str, Any]]:
    """Rows by architecture."""
    return {row["arch"]: row for row in results.read(ROWS)} if ROWS.is_file() else {}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: kernels that hold a class, and how often warps executed it."""
    text = "| emulated | cases | kernels | " + " | ".join(CLASSES) + " |\n"
    text += "|---|--:|--:|" + "--:|" * len(CLASSES) + "\n"
    for arch, row in sorted(rows.items()):
        cells = [
            f"{row['holding'][name]} kernels, {row['executed'][name]:,}"
            if row["holding"][name]
            else "0"
            for name in CLASSES
        ]
        text += f"| {arch} | {row['cases']} | {row['kernels']} | " + " | ".join(cells) + " |\n"
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="emulate every case first")
    parser.add_argument("--arch", help="only this architecture's")
    parser.add_argument("--check", action="store_true", help="write no page, compare")
    given = parser.parse_args(arguments)
    if given.run:
        from tests.gpu.test_ptx_block import ARCHS

        if given.arch not in (None, *ARCHS):
            parser.error(f"no cases for {given.arch}: there are some for {', '.join(ARCHS)}")
        for arch in [given.arch] if given.arch else ARCHS:
            rows = recorded() | {arch: run(arch)}
            ROWS.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))
    return page_table.update(PAGE, BEGIN, END, table(recorded()), given.check)


if __name__ == "__main__":
    sys.exit(main())
