"""Times one case: its competitors take turns on the device; who fails is left out with a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from benchmarks import rows
from benchmarks.gpu import limits as device_limits
from benchmarks.gpu.cases import Case, Selection
from benchmarks.gpu.competitors import Contest, GraphDiffers, contest
from benchmarks.gpu.device import Device, computing_in
from vitkern.measure.timing import Turns
from vitkern.precision import PRECISIONS

# Seconds of turns for one case by mode; before them a part for the device's clocks to rise.
SECONDS = {"quick": 0.05, "default": 0.5, "full": 3.0}
SETTLING = 0.3  # of those seconds


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
    if selection.compile:
        torch.compiler.reset()  # past eight shapes of one function it would run eagerly instead
    with computing_in(case.precision):
        try:
            found = contest(case, device, selection)
        except Exception as error:  # the inputs alone do not fit, or there is no kernel
            return Outcome([], [_skipped(case, "native", device.reason(error))], {})
        turns, notes = _turns(found, device, SECONDS[selection.mode])
    skipped = [_skipped(case, name, why) for name, why in notes.items()]
    if turns is None:
        return Outcome([], skipped, {})
    return Outcome(_rows(case, found, turns, limits), skipped, turns.samples)


def _turns(found: Contest, device: Device, seconds: float) -> tuple[Turns | None, dict[str, str]]:
    functions, notes = {}, {}
    for name, build in found.builds.items():
        try:
            function = build()
            with found.regime():
                function()
                device.synchronize()
            functions[name] = _named(name, function, device)
        except GraphDiffers:
            raise
        except Exception as error:  # anything that PyTorch, timm or a compiler may throw
            notes[name] = device.reason(error)
        if name in notes:
            device.free()  # outside of the handler, whose traceback holds tensors
    while functions:
        try:
            with found.regime():
                turns = Turns(functions, device.clock(found.cold))
                turns.settle(SETTLING * seconds)
                turns.run(seconds)
            return turns, notes
        except Failed as failed:
            loser, notes[failed.name] = failed.name, failed.why
        del functions[loser]
        device.free()
    return None, notes


def _named(name: str, function: Callable[[], object], device: Device) -> Callable[[], object]:
    def call() -> None:
        try:
            function()
        except Exception as error:
            raise Failed(name, device.reason(error)) from None

    return call


def _rows(case: Case, found: Contest, turns: Turns, limits: Mapping[str, object]) -> list[dict]:
    spreads = turns.spreads()
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
            rounds=len(turns.samples[provider]),
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
