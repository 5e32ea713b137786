"""Times one case: a process for each contestant, which take turns, so that noise hits all alike."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import torch

import vitkern

from ..config import ViTConfig
from ..measure.timing import Spread
from ..model import ViT
from . import work
from .cases import Case, Contestant
from .task import CASE_FILE

TRUTH_IMAGES = 2  # of the batch, in float64: enough to see an error, and seconds instead of minutes
TURN_S = 0.3  # a turn lasts about so long, or one call
MOST_CALLS = 5  # of a turn
ROUNDS = (5, 40)  # at least, at most
PAUSE_S = 0.01  # before a turn: the thread pool of the one before goes to sleep
AT_ONCE = 2  # contestants that are built
PATIENCE_S = 600  # for an answer: torch.compile takes a minute or two

Command = Callable[[Contestant, pathlib.Path, int], list[str]]


class Died(Exception):
    """A contestant's process ended or gave no answer: why, as far as known."""

    def __init__(self, why: str, missing: bool = False) -> None:
        super().__init__(why)
        self.missing = missing


def worker_command(contestant: Contestant, folder: pathlib.Path, threads: int) -> list[str]:
    given = {
        "provider": contestant.provider,
        "precision": contestant.precision,
        "threads": threads,
        "folder": str(folder),
    }
    return [sys.executable, "-m", "vitkern.bench.worker", json.dumps(given)]


def child_environment() -> dict[str, str]:
    """So that a child imports this very vitkern, in a clone that is not installed, too."""
    root, found = pathlib.Path(vitkern.__file__).parents[1], dict(os.environ)
    if (root / "csrc").is_dir():
        found["PYTHONPATH"] = os.pathsep.join([str(root), found.get("PYTHONPATH", "")])
    return found


class Worker:
    """A contestant's process, seen from outside."""

    def __init__(
        self, command: Sequence[str], log: IO[str], environment: Mapping[str, str]
    ) -> None:
        self.log, self.begin = log, time.perf_counter()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=dict(environment),
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout  # they are pipes
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def answer(self) -> dict[str, Any]:
        """Its next line; Died when there is none, or it says why there will be none."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(PATIENCE_S, give_up)
        timer.start()
        try:
            line = self.answers.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise Died(f"no answer in {PATIENCE_S} s")
        if not line:
            raise Died(self._last_words())
        said = json.loads(line)
        if "why" in said:
            raise Died(said["why"], said.get("missing", False))
        return said

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        try:
            self.requests.write(json.dumps({"do": do, **request}) + "\n")
            self.requests.flush()
        except BrokenPipeError as error:
            raise Died(self._last_words()) from error
        return self.answer()

    def _last_words(self) -> str:
        status = self.process.wait()
        how = f"died with signal {-status}" if status < 0 else f"ended with status {status}"
        self.log.seek(0)
        said = [line.strip() for line in self.log if line.strip()]
        return f"{how}: {said[-1][:200]}" if said else how

    def close(self) -> None:
        """However it is doing: its process is gone afterwards."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.requests, self.answers):
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        self.log.close()


@dataclasses.dataclass
class Runner:
    """Times cases; `command` starts a contestant, and a test's starts another one."""

    threads: int
    seconds: float  # of turns for a case
    say: Callable[[str], None] = print
    command: Command = worker_command
    preload: pathlib.Path | None = None  # LD_PRELOAD of the peers, never of vitkern
    config: Callable[[Case], ViTConfig] = lambda case: ViTConfig.named(
        case.name, image_size=case.size
    )

    def run(self, case: Case, contestants: Iterable[Contestant]) -> list[dict]:
        """A row of each contestant: its time, or why it has none."""
        with tempfile.TemporaryDirectory(prefix="vitkern-bench-") as name:
            folder = pathlib.Path(name)
            model = write_case(folder, self.config(case), case.batch)
            workers: dict[Contestant, Worker] = {}
            found: dict[Contestant, dict] = {}
            try:
                self._start(contestants, case, folder, workers, found)
                self._take_turns(workers, found)
                return [_row(case, one, fields, model) for one, fields in found.items()]
            finally:
                for worker in workers.values():
                    worker.close()

    def _start(
        self, contestants: Iterable[Contestant], case: Case, folder: pathlib.Path,
        workers: dict[Contestant, Worker], found: dict[Contestant, dict],
    ) -> None:  # fmt: skip
        """Builds a few at a time, most of which is done by one thread; returns when all are."""
        building: collections.deque[Contestant] = collections.deque()
        for one in contestants:
            found[one] = {"why": one.why_not, "missing": False} if one.why_not else {}
            if one.why_not:
                continue
            if len(building) == AT_ONCE:
                self._welcome(building.popleft(), case, workers, found)
            log = tempfile.TemporaryFile("w+", dir=folder)
            environment = child_environment() | {"OMP_NUM_THREADS": str(self.threads)}
            if self.preload and one.provider != "native":
                environment["LD_PRELOAD"] = str(self.preload.resolve())
            workers[one] = Worker(self.command(one, folder, self.threads), log, environment)
            building.append(one)
        for one in building:
            self._welcome(one, case, workers, found)

    def _welcome(
        self, one: Contestant, case: Case, workers: dict[Contestant, Worker],
        found: dict[Contestant, dict],
    ) -> None:  # fmt: skip
        """Waits until it is ready or says why it never will be."""
        worker = workers[one]
        try:
            found[one] = {**worker.answer(), "seconds": [], "rates": [], "steps": []}
        except Died as error:
            self._drop(one, error, workers, found)
        else:
            took = time.perf_counter() - worker.begin
            self.say(f"{case.text}: {one.text} is ready after {took:.0f} s")

    def _drop(
        self, one: Contestant, error: Died, workers: dict[Contestant, Worker],
        found: dict[Contestant, dict],
    ) -> None:  # fmt: skip
        workers.pop(one).close()
        found[one] = {"why": str(error), "missing": error.missing}
        self.say(f"{one.text}: {error}")

    def _take_turns(self, workers: dict[Contestant, Worker], found: dict[Contestant, dict]) -> None:
        for one in list(workers):  # how long a call takes now that nobody is building any more
            self._ask(one, workers, found, "turn", calls=1)
        once = {one: max(1e-9, min(found[one]["seconds"])) for one in workers}
        for one in workers:
            found[one]["seconds"].clear()
        calls = {one: max(1, min(MOST_CALLS, round(TURN_S / once[one]))) for one in workers}
        one_round = sum(once[one] * calls[one] for one in workers)
        low, high = ROUNDS
        rounds = max(low, min(high, int(self.seconds / max(one_round, 1e-9))))
        for _ in range(rounds):
            for one in list(workers):
                time.sleep(PAUSE_S)
                self._ask(one, workers, found, "turn", calls=calls[one])
        for one in list(workers):
            self._ask(one, workers, found, "end")

    def _ask(
        self, one: Contestant, workers: dict[Contestant, Worker], found: dict[Contestant, dict],
        do: str, **request: Any,
    ) -> None:  # fmt: skip
        try:
            said = workers[one].ask(do, **request)
        except Died as error:
            self._drop(one, error, workers, found)
            return
        if do == "turn":
            found[one]["seconds"] += said["seconds"]
            if "steps" in said:
                found[one]["rates"].append(said["rate"])
                found[one]["steps"].append(said["steps"])
        else:
            found[one].update(said)


def write_case(folder: pathlib.Path, config: ViTConfig, batch: int) -> ViT:
    """Weights, images and the truth in float64, for all contestants; the model itself."""
    torch.manual_seed(0)
    model = ViT(config).eval()
    y, x = (config.patch_size * n for n in config.grid)
    images = torch.randn(batch, config.channels, y, x)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    wide = ViT(config, dtype=torch.float64).eval()
    wide.load_state_dict(state)
    with torch.inference_mode():
        truth = wide(images[:TRUTH_IMAGES].double())
    case = {
        "config": dataclasses.asdict(config),
        "state": state,
        "images": images,
        "truth": truth,
    }
    torch.save(case, folder / CASE_FILE)
    return model


def _steps(fields: dict, flops: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Of each step of a forward: its time, its rate, and which share of the machine's that is."""
    rate, found = statistics.median(fields["rates"]), fields["steps"]
    steps = {name: statistics.median(turn[name] for turn in found) for name in found[0]}
    return {
        name: {
            "us": round(1e6 * seconds, 1),
            "gflops": round(flops[name] / seconds / 1e9, 2),
            "of_rate": round(flops[name] / seconds / rate, 4),
        }
        for name, seconds in steps.items()
        if seconds > 0
    }


def _row(case: Case, one: Contestant, fields: dict, model: ViT) -> dict:
    about = {
        "kind": "peer",
        "name": case.name,
        "axes": case.axes,
        "precision": one.precision,
        "provider": one.provider,
    }
    if "why" in fields:
        return {**about, "why": fields["why"], "missing": fields["missing"]}
    spread = Spread.of(fields["seconds"])
    images = (case.batch, model.config.channels, case.size, case.size)
    row = {
        **about,
        "us": spread.median,
        "us_p20": spread.p20,
        "us_p80": spread.p80,
        "calls": len(fields["seconds"]),
        "error": fields["error"],
        "version": fields["version"],
        "modules": fields.get("modules", ""),
        "flops": work.flops(model, case.batch, case.size),
        "bytes": work.bytes_moved(model, torch.empty(images, dtype=torch.float32), one.precision),
        "resident_bytes": fields["resident_bytes"],
    }
    if one.provider == "native":
        row["flops"] = work.engine_flops(model, case.batch, case.size)
        row["gflops"] = round(row["flops"] / spread.median / 1e3, 2)
        row["multiply_gflops"] = round(statistics.median(fields["rates"]) / 1e9, 2)
        row["steps"] = _steps(fields, work.step_flops(model, case.batch, case.size))
    return row
