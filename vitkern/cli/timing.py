"""Times several functions in turns in one process, so that noise hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# A call shorter than this is repeated once untimed before its timed turn: the neighbours' turn
# threw its data out of the caches, and 20 ms is far longer than refilling 2 MB of L2 takes.
COLD_MATTERS_BELOW_S = 0.02
LONG_CALL_S = 0.5


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
class Turns:
    """Functions of no argument that do the same job, and how long one call of each takes."""

    functions: Mapping[str, Callable[[], object]]

    def __post_init__(self) -> None:
        # First calls pack weights and allocate; of a long call that is a small share.
        self.once = {name: _time(function) for name, function in self.functions.items()}
        for name, function in self.functions.items():
            if self.once[name] < LONG_CALL_S:
                self.once[name] = _time(function)
        self.samples: dict[str, list[float]] = {name: [] for name in self.functions}

    def rounds(self, seconds: float, at_least: int = 3, at_most: int = 200) -> int:
        """How many turns of all the functions fit in `seconds`."""
        one_round = sum(t * (2 if t < COLD_MATTERS_BELOW_S else 1) for t in self.once.values())
        return max(at_least, min(at_most, int(seconds / one_round)))

    def retire(self, name: str) -> None:
        """Keep the one call that was timed and take no more turns: it said enough."""
        self.samples[name].append(self.once.pop(name))

    def warm(self, name: str) -> None:
        """Bring a short function's data back into the caches."""
        if self.once[name] < COLD_MATTERS_BELOW_S:
            self.functions[name]()

    def take(self, name: str) -> None:
        """One timed turn of one function."""
        self.warm(name)
        self.samples[name].append(_time(self.functions[name]))

    def run(self, seconds: float) -> dict[str, Spread]:
        """Let all take turns for about `seconds`; the spread of each."""
        for _ in range(self.rounds(seconds)):
            for name in self.once:
                self.take(name)
        return self.spreads()

    def spreads(self) -> dict[str, Spread]:
        return {name: Spread.of(seconds) for name, seconds in self.samples.items()}


def _time(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
