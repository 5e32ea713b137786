"""How the CPU engine shares a forward among threads: counted, and what that predicts.

    python -m tools.cpu_schedule            # writes the table between the page's markers
    python -m tools.cpu_schedule --check    # status 1 if the page is old or a gate fails
    python -m tools.cpu_schedule --model B/16 --batch 1 --threads 16    # a block, phase by phase

The counts are the schedule's own: csrc/cpu/forward.cpp is compiled so that each thread notes its
share of matmuls, heads and rows, and its barriers, instead of computing (cpu_schedule.cpp). The
times are those of a model with the rates below, of machines that were not at hand: predictions.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tools.page_table import update

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- schedule:begin -->", "<!-- schedule:end -->"
MODELS = {  # name -> width, heads, depth
    "Ti/16": (192, 3, 12),
    "S/16": (384, 6, 12),
    "B/16": (768, 12, 12),
    "L/16": (1024, 16, 24),
}
TOKENS = 197
BATCHES = (1, 2, 4, 8)
THREADS = (2, 4, 8, 16, 32, 64)

# Rates of one thread: a core with AVX2 at 3 GHz has 96 GFLOP/s, of which GEMMs reach 0.8 and
# attention a half. A barrier of n threads is n atomic additions to one cache line.
FLOPS = 77e9
ATTENTION_FLOPS = 48e9
PACKED = 1.5e9  # elements of keys and values that are laid out for attention, a second
ELEMENTS = 2e9  # of rows that are normalised
LANES = 8  # of a vector of queries, the least that attention computes
READ = 10e9  # bytes of weights
BARRIER, BARRIER_EACH = 0.3e-6, 0.05e-6

# Gates, just below what the schedule gives: the balance of a block's matmuls and attention, and the
# share of perfect scaling at batch 1 on 64 threads. The 3 heads of a Ti/16 have 75 vectors of
# queries: of 64 threads 11 attend to two of them, which no schedule can avoid.
BALANCED = {"Ti/16": 0.78, "S/16": 0.84, "B/16": 0.84, "L/16": 0.9}
SCALED = {"Ti/16": 0.46, "S/16": 0.73, "B/16": 0.87, "L/16": 0.94}


class Case(NamedTuple):
    model: str
    batch: int
    threads: int


class Event(NamedTuple):
    """A letter of cpu_schedule.cpp and its numbers."""

    kind: str
    numbers: tuple[int, ...]


_ARITY = {"r": 2, "m": 4, "h": 1, "b": 2}


def _events(line: str) -> Iterator[Event]:
    words = iter(line.split())
    for kind in words:
        yield Event(kind, tuple(int(next(words)) for _ in range(_ARITY[kind])))


class Counter:
    """The counting program, compiled for AVX2, whose panels and tiles are the smallest."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._program = pathlib.Path(self._folder.name) / "cpu_schedule"
        flags = (
            "-mavx2",
            "-mfma",
            "-mf16c",
            "-mbmi2",
            "-DVITKERN_COUNTED",
            "-DVITKERN_ISA=counted",
        )
        names = ("forward", "schedule", "steps", "arena")
        sources = ("tools/cpu_schedule.cpp", *(f"csrc/cpu/{name}.cpp" for name in names))
        command = ["c++", "-std=c++20", *flags, "-Icsrc", *sources, "-o", str(self._program)]
        subprocess.run(command, check=True, cwd=ROOT)

    def count(self, case: Case, depth: int) -> list[list[Event]]:
        """The events of each thread, with so many blocks."""
        width, heads, _ = MODELS[case.model]
        line = f"{case.threads} {case.batch} {TOKENS} {width} {heads} {4 * width} {depth}\n"
        done = subprocess.run(
            [self._program, "fp32"], input=line, check=True, capture_output=True, text=True
        )
        return [list(_events(text)) for text in done.stdout.splitlines()[: case.threads]]


def seconds(event: Event, model: str) -> float:
    """What a thread needs for it, by the rates above; its barriers apart."""
    width, heads, _ = MODELS[model]
    if event.kind == "m":
        rows, columns, steps, read = event.numbers
        return max(2 * rows * columns * steps / FLOPS, read / READ)
    if event.kind == "h":
        head = width // heads
        packed = 2 * TOKENS * head / PACKED
        queries = -(-event.numbers[0] // LANES) * LANES
        return 4 * queries * TOKENS * head / ATTENTION_FLOPS + packed
    if event.kind == "r":
        return event.numbers[0] * event.numbers[1] / ELEMENTS
    return 0.0


def _barrier_seconds(size: int) -> float:
    return BARRIER + BARRIER_EACH * size


def run(threads: Sequence[Sequence[Event]], model: str) -> float:
    """Seconds until the last thread has ended: those of a barrier leave it together."""
    clocks = [0.0] * len(threads)
    at = [0] * len(threads)
    waiting: dict[int, list[int]] = defaultdict(list)  # barrier -> threads
    ready = list(range(len(threads)))
    while ready:
        thread = ready.pop()
        while at[thread] < len(threads[thread]):
            event = threads[thread][at[thread]]
            at[thread] += 1
            if event.kind != "b":
                clocks[thread] += seconds(event, model)
                continue
            which, size = event.numbers
            waiting[which].append(thread)
            if len(waiting[which]) == size:
                met = waiting.pop(which)
                leave = max(clocks[i] for i in met) + _barrier_seconds(size)
                for i in met:
                    clocks[i] = leave
                ready += met
            break
    if waiting:
        raise RuntimeError(f"threads wait for ever: {dict(waiting)}")
    return max(clocks)


class Phase(NamedTuple):
    """What each thread does between two barriers."""

    name: str
    seconds: tuple[float, ...]  # of each thread
    weights: int  # bytes that the thread with the most reads
    barrier: int  # threads that meet after it, 1 for none

    @property
    def balance(self) -> float:
        """The mean thread's time, as a share of the slowest one's."""
        slowest = max(self.seconds)
        return sum(self.seconds) / len(self.seconds) / slowest if slowest else 1.0


def phases(threads: Sequence[Sequence[Event]], model: str) -> list[Phase]:
    """By their place in each thread: teams beside each other do the same."""
    cut = [_between_barriers(one) for one in threads]
    found = []
    for i in range(max(map(len, cut))):
        mine = [one[i] if i < len(one) else ([], 1) for one in cut]
        done = max((done for done, _ in mine), key=len)
        found.append(
            Phase(
                name=", ".join(dict.fromkeys(map(_name, done))) or "nothing",
                seconds=tuple(sum(seconds(e, model) for e in done) for done, _ in mine),
                weights=max(sum(e.numbers[3] for e in done if e.kind == "m") for done, _ in mine),
                barrier=max(size for _, size in mine),
            )
        )
    return found


def _between_barriers(one: Sequence[Event]) -> list[tuple[list[Event], int]]:
    found, done = [], []
    for event in one:
        if event.kind == "b":
            found.append((done, event.numbers[1]))
            done = []
        else:
            done.append(event)
    return [*found, (done, 1)] if done else found


def _name(event: Event) -> str:
    if event.kind == "m":
        return f"matmul over {event.numbers[2]}"
    return {"h": "attention", "r": "rows"}[event.kind]


class Prediction(NamedTuple):
    seconds: float  # of a forward
    barriers: int  # that a thread passes in a block
    waiting: float  # the share of a forward that barriers take
    balance: float  # the least of a block's matmuls and attention
    weights: int  # bytes that the thread with the most reads in a block


def predict(counter: Counter, case: Case) -> Prediction:
    model, depth = case.model, MODELS[case.model][2]
    one, two = counter.count(case, 1), counter.count(case, 2)
    first, block = run(one, model), run(two, model) - run(one, model)
    met = [e.numbers[1] for e in two[0] if e.kind == "b"]
    earlier = [e.numbers[1] for e in one[0] if e.kind == "b"]
    total = first + (depth - 1) * block
    between = sum(map(_barrier_seconds, met)) - sum(map(_barrier_seconds, earlier))
    # Patches come first; where teams of several sizes follow each other, in each of them.
    blocks = [p for p in phases(one, model) if p.name != "rows"]
    weights = sum(p.weights for p in phases(two, model)) - sum(p.weights for p in blocks)
    return Prediction(
        seconds=total,
        barriers=len(met) - len(earlier),
        waiting=between / block,
        balance=min(p.balance for p in blocks if max(p.seconds) > 0),
        weights=weights,
    )


def scaled(counter: Counter, case: Case) -> float:
    """The share of perfect scaling from one thread."""
    alone = predict(counter, case._replace(threads=1)).seconds
    return alone / case.threads / predict(counter, case).seconds


def table(counter: Counter) -> str:
    lines = [
        "| model | batch | " + " | ".join(f"{n} threads" for n in THREADS) + " |",
        "|---|--:|" + "--:|" * len(THREADS),
    ]
    for model in MODELS:
        for batch in BATCHES:
            cells = []
            for threads in THREADS:
                case = Case(model, batch, threads)
                p = predict(counter, case)
                cells.append(f"{scaled(counter, case):.0%} ({p.barriers}, {p.waiting:.0%})")
            lines.append(f"| {model} | {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def complaints(counter: Counter, cases: Sequence[Case]) -> Iterator[str]:
    """Where a gate fails."""
    for case in cases:
        p = predict(counter, case)
        if p.balance < BALANCED[case.model]:
            yield f"{case}: a phase is balanced by {p.balance:.0%}"
        if case.batch == 1 and case.threads == 64 and scaled(counter, case) < SCALED[case.model]:
            yield f"{case}: {scaled(counter, case):.0%} of perfect scaling"


def describe(counter: Counter, case: Case) -> str:
    """A block, phase by phase; patches come before it."""
    lines = []
    for p in phases(counter.count(case, 1), case.model):
        least, most = (1e6 * f(p.seconds) for f in (min, max))
        lines.append(
            f"{p.name:28} {least:8.1f} to {most:8.1f} us  balance {p.balance:4.0%}"
            f"  weights {p.weights / 1e6:6.2f} MB  then a barrier of {p.barrier}"
        )
    p = predict(counter, case)
    return "\n".join([*lines, f"forward {1e3 * p.seconds:.2f} ms, barriers {p.waiting:.1%}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=16)
    options = parser.parse_args(arguments)
    counter = Counter()
    if options.model:
        print(describe(counter, Case(options.model, options.batch, options.threads)))
        return 0
    wrong = list(
        complaints(counter, [Case(m, b, t) for m in MODELS for b in BATCHES for t in THREADS])
    )
    for line in wrong:
        print(line, file=sys.stderr)
    return update(PAGE, BEGIN, END, table(counter), options.check) or int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
