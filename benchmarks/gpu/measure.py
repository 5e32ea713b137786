"""Times one case: its competitors take turns on the device; who fails is left out with a note.

Before anybody is timed, what each call computes is compared with eager PyTorch's result: a peer
that computes something else is a note, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import rows
from benchmarks.gpu import limits as device_limits
from benchmarks.gpu.cases import Case, Selection
from benchmarks.gpu.competitors import Contest, GraphDiffers, contest
from benchmarks.gpu.device import Device, computing_in
from benchmarks.gpu.model_peers import GRAPH
from vitkern.contract import Error
from vitkern.measure.timing import Spread, Turns
from vitkern.precision import PRECISIONS

# Seconds of turns for one case by mode; before them a part for the device's clocks to rise.
SECONDS = {"quick": 0.05, "default": 0.5, "full": 3.0}
SETTLING = 0.3  # of those seconds
# How far results of the same precision may be from each other, in units of the precision (the
# spacing of a GEMM's operands) and of the result's rms. Two right ones are a few apart after dozens
# of layers; a peer that computes another function (no LayerScale, another GELU) is not meant to be
# caught to the last bit: vitkern's own errors are held to the contract (contract.py).
APART = 16.0
ALONE = 0.2  # of the seconds of a case, for one that is timed by itself


class Outcome(NamedTuple):
    """Rows of those that were timed, and why the others were not."""

    rows: list[dict]
    skipped: list[dict]  # rows of the kind "skipped"
    samples: dict[str, list[float]]  # seconds

    @property
    def broken(self) -> list[str]:
        """What kept vitkern itself from being timed, too little memory aside."""
        return [
            f"{row['provider']}: {row['why']}"
            for row in self.skipped
            if row["provider"] == "native" and row["why"] != "out of memory"
        ]


class Failed(Exception):
    """A competitor's own error, with its name."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why


def measure(
    case: Case, device: Device, selection: Selection, limits: Mapping[str, object]
) -> Outcome:
    """All competitors of the case in turns. DeviceLost and GraphDiffers end the run."""
    device.free()  # what the case before this one held
    if selection.compile != "none":
        torch.compiler.reset()  # past eight shapes of one function it would run eagerly instead
    times, notes = _Times({}, {}), {}
    with computing_in(case.precision):
        try:
            found = contest(case, device, selection)
        except Exception as error:  # the inputs alone do not fit, or there is no kernel
            return Outcome([], [_skipped(case, "native", device.reason(error))], {})
        check = Agreement(PRECISIONS[case.precision].unit)
        for names in found.rounds():
            seconds = SECONDS[selection.mode] * (1 if len(names) > 1 else ALONE)
            turns = _turns(found, names, check, device, seconds, notes)
            if turns is not None:
                times.samples.update(turns.samples)
                times.spreads.update(turns.spreads())
            del turns
            device.free()
    skipped = [_skipped(case, name, why) for name, why in notes.items()]
    return Outcome(_rows(case, found, times, limits), skipped, times.samples)


class _Times(NamedTuple):
    samples: dict[str, list[float]]
    spreads: dict[str, Spread]


class Differs(Exception):
    """A competitor computed something else than eager PyTorch."""


class Agreement:
    """Compares results with those of the first that ran, which is eager PyTorch if it can."""

    def __init__(self, unit: float) -> None:
        self.unit = unit
        self._first: list[Tensor] = []

    def check(self, function: Callable[[], object], result: object) -> None:
        """Raises Differs; `result` is what `function` just returned."""
        probe = getattr(function, "probe", None)  # of a training step: a gradient
        found = [result, probe() if probe else None]
        tensors = [t.detach() for t in found if isinstance(t, Tensor)]
        if not self._first:
            self._first = [t.clone() for t in tensors]
            return
        for ours, first in zip(tensors, self._first, strict=True):
            if ours.shape != first.shape:
                raise Differs(f"its result is {tuple(ours.shape)}, not {tuple(first.shape)}")
            off = Error.of(ours, first).rms
            if not off <= APART * self.unit:
                raise Differs(f"its result is another one, {off:.1e} of its size away")


def _turns(
    found: Contest, names: tuple[str, ...], check: Agreement, device: Device, seconds: float,
    notes: dict[str, str],
) -> Turns | None:  # fmt: skip
    """These competitors in turns; None if there is none. Who fails is noted."""
    functions: dict[str, Callable[[], object]] = {}
    for name in names:
        if name.removesuffix(GRAPH) in notes:  # what does not run is not captured either
            notes[name] = notes[name.removesuffix(GRAPH)]
            continue
        try:
            function = found.builds[name]()
            with found.regime():
                result = function()
                device.synchronize()
                check.check(function, result)
            functions[name] = _named(name, function, device)
        except GraphDiffers:
            raise
        except Differs as error:
            notes[name] = str(error)
        except Exception as error:  # anything that PyTorch, timm or a compiler may throw
            notes[name] = device.reason(error)
        function = result = None
        if name in notes:
            device.free()  # outside of the handler, whose traceback holds tensors
    while functions:
        try:
            with found.regime():
                turns = Turns(functions, device.clock(found.cold))
                turns.settle(SETTLING * seconds)
                turns.run(seconds)
            return turns
        except Failed as failed:
            loser, notes[failed.name] = failed.name, failed.why
        del functions[loser]
        device.free()
    return None


def _named(name: str, function: Callable[[], object], device: Device) -> Callable[[], object]:
    def call() -> None:
        try:
            function()
        except Exception as error:
            raise Failed(name, device.reason(error)) from None

    return call


def _rows(case: Case, found: Contest, times: _Times, limits: Mapping[str, object]) -> list[dict]:
    spreads = times.spreads
    eager = [spreads[p].median for p in rows.EAGER if p in spreads]
    made = []
    for provider, spread in spreads.items():
        ours = provider.startswith("native")
        row = rows.row(
            case.kind,
            case.name,
            dict(case.axes),
            str(PRECISIONS[case.precision].dtype)[6:],
            provider,
            spread,
            min(eager, default=None),
            flops=found.native_flops if ours else found.flops,
            bytes_moved=found.bytes_moved,
            rounds=len(times.samples[provider]),
            precision=case.precision,
        )
        del row["multiply_gflops"]  # a CPU's calibration
        row |= device_limits.shares(row["gflops"], row["gbs"], case.precision, limits)
        made.append({**row, "path": found.path} if ours and found.path else row)
    return made


def _skipped(case: Case, provider: str, why: str) -> dict:
    return {
        "kind": "skipped",
        "of": case.kind,
        "name": case.name,
        "axes": dict(case.axes),
        "precision": case.precision,
        "provider": provider,
        "why": why,
    }
