"""One contestant's process: builds its forward, then answers requests, a line of JSON each.

python -m vitkern.bench.worker '{"provider": ..., "precision": ..., "threads": ..., "folder": ...}'

    {"do": "turn", "calls": 3}  ->  {"seconds": [...]}, and of vitkern also the machine's "rate" in
                                    flops a second just before, and its "steps" in seconds of a call
    {"do": "end"}  ->  {"resident_bytes": ...}, and the process ends

The first line it says is {"ready": true, ...} or {"why": "..."}, as it does when a call fails.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any, TextIO

import torch

from .. import cpu
from ..contract import Error
from ..measure import memory
from .builders import Built, build
from .task import LeftOut, Task

CALIBRATION_S = 0.01  # of the machine's own rate, before each turn of vitkern
WARM_BELOW_S = 0.25  # a shorter call is repeated untimed first: others had caches and cores


class Contestant:
    """A built forward and what is asked of it."""

    def __init__(self, built: Built, precision: str, truth: torch.Tensor) -> None:
        self.built, self.precision = built, precision
        with torch.inference_mode():
            logits = built.call()
            self.error = Error.of(logits[: len(truth)].double(), truth).rms
            self.once = self._time()
        memory.settle()  # what building needed is not held against anybody

    def _time(self) -> float:
        start = time.perf_counter()
        self.built.call()
        return time.perf_counter() - start

    def ready(self) -> dict[str, Any]:
        about = {"version": self.built.version, "modules": self.built.modules}
        return {"ready": True, "error": self.error, **about}

    def turn(self, calls: int) -> dict[str, Any]:
        seconds: list[float] = []

        def take() -> None:
            seconds.extend(self._time() for _ in range(calls))

        own = self.built.model is not None
        rate = cpu.calibrate(self.precision, seconds=CALIBRATION_S) if own else None
        if self.once < WARM_BELOW_S:
            self.built.call()
        spent: dict[str, float] = {}
        if own:
            spent = cpu.profile(take)
        else:
            take()
        self.once = min(self.once, *seconds)
        if not own:
            return {"seconds": seconds}
        share = 1 / (calls * torch.get_num_threads())  # they are summed over both
        steps = {name: share * total for name, total in spent.items()}
        return {"seconds": seconds, "rate": rate, "steps": steps}

    def end(self) -> dict[str, Any]:
        return {"resident_bytes": memory.resident("VmHWM")}  # since the mark was set anew


def serve(given: dict[str, Any], requests: Iterable[str], answers: TextIO) -> int:
    """Answers until told to end; what goes wrong is an answer, too, and status 1."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        contestant = Contestant(*prepare(given))
        say(contestant.ready())
        with torch.inference_mode():
            for line in requests:
                request = json.loads(line)
                do = request.pop("do")
                say(getattr(contestant, do)(**request))
                if do == "end":
                    return 0
    except LeftOut as error:
        say({"why": str(error), "missing": error.missing})
    except Exception as error:  # a peer's own, of any kind: it is reported, not ours to mend
        traceback.print_exc()
        text = str(error).strip().split("\n")[0]
        say({"why": f"{type(error).__name__}: {text[:200]}", "missing": False})
    return 1


def prepare(given: dict[str, Any]) -> tuple[Built, str, torch.Tensor]:
    """A contestant's forward, its precision and the truth: nothing else of the case is kept."""
    torch.set_num_threads(given["threads"])
    task = Task.read(pathlib.Path(given["folder"]), given["precision"], given["threads"])
    return build(given["provider"], task), task.precision, task.truth


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    return serve(json.loads(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    raise SystemExit(main())
