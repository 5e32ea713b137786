"""Times several functions in turns in one process, so that noise hits all of them alike.

A clock says how long one call takes: the CPU's by the wall, a GPU's by events on its stream.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

Name = TypeVar("Name", bound=Hashable)

# A call shorter than this is repeated once untimed before its timed turn: the neighbours' turn
# threw its data out of the caches, and 20 ms is far longer than refilling 2 MB of L2 takes.
COLD_MATTERS_BELOW_S = 0.02
LONG_CALL_S = 0.5
# Of writing over a GPU's caches before a call: Python launches the call meanwhile (tens of us for
# a few kernels), so that the device never waits for it inside the timed part.
FLUSH_S = 300e-6


class Clock(Protocol):
    """How long a call takes, in seconds; `warms`: whether short calls go better after another."""

    warms: bool

    def time(self, function: Callable[[], object]) -> float: ...


class WallClock:
    """For functions that are done when they return."""

    warms = True

    def time(self, function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start


class EventClock:
    """A GPU's own time between two events on its stream, waiting for each call to end.

    `cuda` is torch.cuda, NVIDIA's and AMD's alike. With `scratch`, a tensor larger than the L2
    cache, every call finds its data in memory and not in the cache.
    """

    warms = False

    def __init__(self, cuda: Any, scratch: Any = None) -> None:
        self.cuda, self.scratch, self.passes = cuda, None, 1
        if scratch is not None:
            once = min(self.time(scratch.zero_) for _ in range(5))  # the first ones allocate
            self.scratch = scratch
            self.passes = max(1, math.ceil(FLUSH_S / max(once, 1e-6)))

    def time(self, function: Callable[[], object]) -> float:
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        if self.scratch is not None:
            for _ in range(self.passes):
                self.scratch.zero_()
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3  # it answers in milliseconds


WALL = WallClock()


class Spread(NamedTuple):
    """Median and quintiles of repeated calls, in microseconds."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        low, *_, high = statistics.quantiles(seconds, n=5) if len(seconds) > 1 else seconds * 2
        return cls(*(round(1e6 * s, 2) for s in (statistics.median(seconds), low, high)))


@dataclass
class Turns(Generic[Name]):
    """Functions of no argument that do the same job, and how long one call of each takes."""

    functions: Mapping[Name, Callable[[], object]]
    clock: Clock = WALL

    def __post_init__(self) -> None:
        # First calls pack weights and allocate; of a long call that is a small share.
        time = self.clock.time
        self.once = {name: time(function) for name, function in self.functions.items()}
        for name, function in self.functions.items():
            if self.once[name] < LONG_CALL_S:
                self.once[name] = time(function)
        self.samples: dict[Name, list[float]] = {name: [] for name in self.functions}

    def rounds(self, seconds: float, at_least: int = 3, at_most: int = 200) -> int:
        """How many turns of all the functions fit in `seconds`."""
        twice = COLD_MATTERS_BELOW_S if self.clock.warms else 0
        one_round = sum(t * (2 if t < twice else 1) for t in self.once.values())
        return max(at_least, min(at_most, int(seconds / max(one_round, 1e-9))))

    def settle(self, seconds: float) -> None:
        """Untimed turns for about `seconds`: a GPU raises its clocks under load only."""
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            for name in self.once:
                self.clock.time(self.functions[name])

    def retire(self, name: Name) -> None:
        """Keep the one call that was timed and take no more turns: it said enough."""
        self.samples[name].append(self.once.pop(name))

    def warm(self, name: Name) -> None:
        """Bring a short function's data back into the caches."""
        if self.clock.warms and self.once[name] < COLD_MATTERS_BELOW_S:
            self.functions[name]()

    def take(self, name: Name) -> None:
        """One timed turn of one function."""
        self.warm(name)
        self.samples[name].append(self.clock.time(self.functions[name]))

    def run(self, seconds: float) -> dict[Name, Spread]:
        """Let all take turns for about `seconds`; the spread of each."""
        for _ in range(self.rounds(seconds)):
            for name in self.once:
                self.take(name)
        return self.spreads()

    def spreads(self) -> dict[Name, Spread]:
        return {name: Spread.of(seconds) for name, seconds in self.samples.items()}
