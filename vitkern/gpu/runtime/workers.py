"""Compiles kernels in processes of their own, several at a time.

Triton compiles one kernel at a time in a process, and a crash of its compiler ends that process.
The workers are started by their command line, not by multiprocessing: that would import the user's
main program again, and needs a guard in it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..compiler import compile_variant, from_fields, to_fields
from ..launch import Variant

MOST = 8  # processes; each holds torch and Triton, some 300 MB
FEW = 8  # kernels: a worker takes seconds to start, in which as many are compiled without it
_MAIN = (
    "import sys; sys.path[:] = sys.argv[1:]; from vitkern.gpu.runtime.workers import serve; serve()"
)


class Made(NamedTuple):
    """A compiled kernel, or why there is none."""

    facts: dict[str, Any]  # what a manifest says of it
    code: bytes
    failure: str = ""


def wanted(kernels: int) -> int:
    """How many workers pay for this many kernels; 0: compile them in this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    several = min(cores or 1, kernels // 2, MOST)
    return several if kernels >= FEW and several > 1 and sys.executable else 0


def compile_all(
    variants: Sequence[Variant], arch: str, jobs: int
) -> Iterator[tuple[Variant, Made]]:
    """What `jobs` workers make of kernels, in any order; without those that no worker took."""
    waiting: queue.SimpleQueue[Variant] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Variant, Made] | None] = queue.SimpleQueue()  # None: one ended
    for variant in variants:
        waiting.put(variant)
    workers = [_Worker() for _ in range(jobs)]
    threads = [
        threading.Thread(target=worker.work, args=(waiting, done, arch), daemon=True)
        for worker in workers
    ]
    try:
        for thread in threads:
            thread.start()
        left = jobs
        while left:
            made = done.get()
            if made is None:
                left -= 1
            else:
                yield made
    finally:  # also where the user interrupts it
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for worker in workers:
            worker.end()


class _Worker:
    """A process that compiles, and the thread of this one that gives it work."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def work(
        self,
        waiting: queue.SimpleQueue[Variant],
        done: queue.SimpleQueue[tuple[Variant, Made] | None],
        arch: str,
    ) -> None:
        try:
            while self._ready():
                variant = waiting.get_nowait()
                done.put((variant, self._compile(variant, arch)))
        except queue.Empty:
            pass
        finally:
            self.end()
            done.put(None)

    def _ready(self) -> bool:
        """Whether there is a process that waits for a kernel; the last may have crashed."""
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, *map(str, sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # an interrupt is for the parent, which ends it
                )
            except OSError:
                return False
            return self._answer() == "ready"
        return True

    def _compile(self, variant: Variant, arch: str) -> Made:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                pickle.dump((to_fields(variant), arch), process.stdin)
                process.stdin.flush()
        answer = self._answer()
        if isinstance(answer, Made):
            return answer
        self.end()
        return Made({}, b"", "the compiler crashed")

    def _answer(self) -> object:
        """What the process says next; None if it has ended."""
        process = self._process
        if process is None or process.stdout is None:
            return None
        try:
            return pickle.load(process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            return None

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()


def serve() -> None:
    """The other side: compiles what comes by standard input, until that ends."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a compiler prints is no answer
        said: object = "ready"
        while True:
            pickle.dump(said, answers)
            answers.flush()
            try:
                fields, arch = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                binary = compile_variant(from_fields(fields), arch)
                said = Made(binary.facts, binary.code)
            except Exception as error:
                said = Made({}, b"", f"{type(error).__name__}: {error}")
