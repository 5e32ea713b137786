"""Memory of a forward, vitkern's and eager PyTorch's, each in a fresh process (--scaling)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import memory, rows
from benchmarks.machine import precisions
from vitkern.precision import CHOICES, PRECISIONS

KIND = "memory"
BATCHES = {"S/16": (1, 8, 32), "B/16": (1, 8)}


def cases(quick: bool) -> list:
    """(model, batch, precision); quick keeps Ti/16 at batch 1 in the first precision."""
    found = [(m, b, p) for m, batches in BATCHES.items() for b in batches for p in precisions()]
    found = [("Ti/16", 1, CHOICES[0])] if quick else found
    return [pytest.param(case, id="-".join(map(str, case))) for case in found]


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="the resident set is read from /proc")
def test_memory(case, benchmark, keep_row) -> None:
    name, batch, precision = case

    def measure(provider: str) -> dict[str, int]:
        command = [sys.executable, "-m", "benchmarks.memory", name, str(batch), precision, provider]
        run = subprocess.run(command, cwd=rows.ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    found = {"torch": measure("torch")}
    found["native"] = benchmark.pedantic(measure, args=("native",))
    for provider, sizes in found.items():
        keep_row(
            {
                "kind": KIND,
                "name": name,
                "axes": {"B": batch},
                "dtype": str(PRECISIONS[precision].dtype)[6:],
                "precision": precision,
                "provider": provider,
                **sizes,
            }
        )
