"""Watches the process that runs cases: time limits, deaths, and who is to blame for them."""

from __future__ import annotations

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS = 120  # importing torch takes 2 s, on a busy machine many more
LAST_WORDS_SECONDS = 2


class Limits(NamedTuple):
    seconds: float = 30  # of a case; a busy machine is no hang
    gigabytes: float = 3  # of address space beyond what the libraries take


class Result(NamedTuple):
    kind: str
    seed: int
    index: int
    outcome: str
    detail: str
    about: str
    first: int  # the case that replays it starts with: itself, or an earlier one of its process

    @property
    def replay(self) -> str:
        cases = self.index if self.first == self.index else f"{self.first}-{self.index}"
        return f"python -m tests.fuzz --kind {self.kind} --seed {self.seed} --case {cases}"


class Worker:
    """One process; `run` gives it a case and returns (outcome, detail, about)."""

    def __init__(self, limits: Limits, scratch: pathlib.Path) -> None:
        self.limits, self.scratch = limits, scratch
        self.first: int | None = None  # the first case of this process
        self._process: subprocess.Popen | None = None
        self._stderr, self._buffer = None, b""

    def run(self, kind: str, seed: int, index: int) -> tuple[str, str, str]:
        if self._process is None:
            self._start()
        self.first = index if self.first is None else self.first
        self._process.stdin.write(json.dumps([kind, seed, index]).encode() + b"\n")
        self._process.stdin.flush()
        about, deadline = "(the generator itself)", time.monotonic() + self.limits.seconds
        while True:
            answer = self._answer(deadline)
            if answer is None:
                return (*self._obituary(deadline), about)
            if "outcome" in answer:
                return answer["outcome"], answer["detail"], answer["about"]
            about = answer["about"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._stderr.close()
        self._process, self.first, self._buffer = None, None, b""

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.worker"]
        command += [str(self.limits.gigabytes), str(self.scratch)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MALLOC_PERTURB_": "165",  # freed memory is overwritten: a late use of it shows
        }
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._stderr,
        )  # fmt: skip
        if self._answer(time.monotonic() + START_SECONDS) is None:
            words = self._last_words()
            self.close()
            raise RuntimeError(f"the fuzzer's worker does not start:\n{words}")

    def _answer(self, deadline: float) -> dict | None:
        """The next line, or None when the process has died or time is up."""
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return None
            more = os.read(pipe, 65536)
            if not more:
                return None
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _obituary(self, deadline: float) -> tuple[str, str]:
        """(outcome, detail) of a process that does not answer any more."""
        if time.monotonic() >= deadline:
            self._process.send_signal(signal.SIGABRT)  # faulthandler says where it was
            outcome, reason = "hang", f"no answer for {self.limits.seconds:g} s"
        else:
            outcome, reason = "crash", ""
        try:
            status = self._process.wait(LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            status = 0
        if outcome == "crash":
            died = f"signal {-status} ({signal.strsignal(-status)})" if status < 0 else "exit"
            reason = f"the process ended by {died}"
        detail = f"{reason}\n{self._last_words()}"
        self.close()
        return outcome, detail

    def _last_words(self) -> str:
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace")
        start = max(text.rfind("Fatal Python error"), text.rfind("terminate called"))
        lines = [line for line in text[max(start, 0) :].splitlines() if line.strip()]
        return "\n".join(lines[-6:] if start < 0 else lines[:12])


def run_cases(
    kind: str, seed: int, cases: Iterable[int], limits: Limits | None = None
) -> Iterator[Result]:
    """Run cases in order, in one process for as long as it lives; yields each outcome."""
    with tempfile.TemporaryDirectory(prefix="vitkern-fuzz-") as scratch:
        worker = Worker(limits or Limits(), pathlib.Path(scratch))
        try:
            for index in cases:
                first = index if worker.first is None else worker.first
                outcome, detail, about = worker.run(kind, seed, index)
                if outcome == "crash" and first != index:  # is it to blame, or one before it?
                    again = worker.run(kind, seed, index)
                    if again[0] == "crash":
                        first, (_, detail, about) = index, again
                else:
                    first = index
                yield Result(kind, seed, index, outcome, detail, about, first)
        finally:
            worker.close()
