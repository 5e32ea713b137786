"""One contestant's process: builds its forward, then answers requests, a line of JSON each.

python -m benchmarks.cpu.worker '{"provider": ..., "precision": ..., "threads": ..., "folder": ...}'

    {"do": "turn", "calls": 3}  ->  {"seconds": [...], "rate": flops a second or null}
    {"do": "profile", "calls": 3}  ->  {"steps": {name: seconds}, "steps_rate": flops a second}
    {"do": "end"}  ->  {"resident_bytes": ...}, and the process ends

The first line it says is {"ready": true, ...} or {"why": "..."}, as it does when a call fails.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any, TextIO

import torch

from benchmarks import memory
from benchmarks.cpu.builders import Built, LeftOut, Task, build
from vitkern import ViTConfig, cpu
from vitkern.contract import Error

CASE_FILE = "case.pt"  # in the folder of a case: config, state, images, truth
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

    def _rate(self) -> float | None:
        return cpu.calibrate(self.precision, seconds=CALIBRATION_S) if self.built.model else None

    def ready(self) -> dict[str, Any]:
        return {"ready": True, "error": self.error, "version": self.built.version}

    def turn(self, calls: int) -> dict[str, Any]:
        rate = self._rate()
        if self.once < WARM_BELOW_S:
            self.built.call()
        seconds = [self._time() for _ in range(calls)]
        self.once = min(self.once, *seconds)
        return {"seconds": seconds, "rate": rate}

    def profile(self, calls: int) -> dict[str, Any]:
        """Of vitkern: seconds of each step of a forward, and the machine's rate in between."""
        found, rates = [], []
        for _ in range(calls):
            rates.append(self._rate())
            found.append(cpu.profile(self.built.call))
        threads = torch.get_num_threads()  # the steps' seconds are summed over them
        steps = {name: statistics.median(f[name] for f in found) / threads for name in found[0]}
        return {"steps": steps, "steps_rate": statistics.median(rates)}

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
    folder = pathlib.Path(given["folder"])
    torch.set_num_threads(given["threads"])
    case = torch.load(folder / CASE_FILE, weights_only=True)
    task = Task(
        ViTConfig(**case["config"]), case["state"], case["images"], given["precision"],
        given["threads"], folder,
    )  # fmt: skip
    return build(given["provider"], task), given["precision"], case["truth"]


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    return serve(json.loads(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    raise SystemExit(main())
