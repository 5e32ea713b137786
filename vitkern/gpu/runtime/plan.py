"""A whole forward as one call: launches recorded once, then started again with other tensors.

What changes from call to call (the image, the result) are *slots*: an argument that lies in a
slot's memory follows that slot. Launches with binaries that follow each other are one C++ call over
a `_C.LaunchList`: with a binary for each, all of them. The others go to the executor one by one.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ... import _C
from ..launch import Executor, Launch, Recorder, executing
from .binary import BinaryExecutor


def record(executor: Executor, tf32: bool | None, forward: Callable[[], None]) -> list[Launch]:
    """The launches that `forward` makes, none of them carried out."""
    recorder = Recorder(executor.arch, tf32, getattr(executor, "processors", None))
    with executing(recorder):
        forward()
    return recorder.launches


class Plan:
    """Recorded launches on an executor: `count` of them, `native` by binaries.

    An executor that has a binary says so by `binaries_for(launch)`. `run` only launches, so it
    can be captured in a CUDA graph. Calls share the tensors between the launches, which the plan
    keeps alive: a lock lets one call start all of its launches before another's, and both must be
    on one stream. Plans that share those tensors share the lock.
    """

    def __init__(
        self,
        executor: Executor,
        launches: Sequence[Launch],
        slots: Sequence[Tensor],
        lock: threading.Lock | None = None,
    ) -> None:
        self.executor, self.count = executor, len(launches)
        self._lock = lock or threading.Lock()
        self._layouts = [_layout(slot) for slot in slots]
        places = [_places(launch, slots) for launch in launches]
        unused = set(range(len(slots))) - {one.slot for each in places for one in each.values()}
        if unused:  # a launcher copied it, and later calls would read the first call's copy
            raise ValueError(f"vitkern: no launch of the plan uses slots {sorted(unused)}")
        binaries_for = getattr(executor, "binaries_for", lambda launch: None)
        self._steps: list[_Native | _Single] = []
        self._kept: list[Launch] = []  # keeps the tensors alive whose addresses C++ has
        for launch, moved in zip(launches, places, strict=True):
            # Without the first call's slots, which would be kept alive.
            self._kept.append(_with(launch, dict.fromkeys(moved)))
            binaries = binaries_for(launch)
            if binaries is None:
                self._steps.append(_Single(self._kept[-1], moved))
                continue
            native = self._steps[-1] if self._steps else None
            if not isinstance(native, _Native):
                native = _Native(binaries, _C.LaunchList())
                self._steps.append(native)
            values = binaries.values(launch)
            values |= {name: _C.Slot(place.slot, place.offset) for name, place in moved.items()}
            kernel = binaries.kernel(launch.variant)
            native.launches.add(kernel, launch.grid, list(values.values()))
        self.native = sum(s.launches.launches for s in self._steps if isinstance(s, _Native))

    @property
    def one_call(self) -> bool:
        """Whether all launches are one C++ call."""
        return self.native == self.count

    def run(self, *slots: Tensor) -> None:
        """Start all launches; `slots` are laid out as those that the plan was made with."""
        layouts = [_layout(slot) for slot in slots]
        if layouts != self._layouts:
            raise ValueError(
                f"vitkern: the plan was made for {self._layouts} (shape, strides, dtype), not "
                f"{layouts}"
            )
        with self._lock:
            for step in self._steps:
                if isinstance(step, _Native):
                    step.binaries.run_list(step.launches, slots[: step.launches.slots])
                    continue
                at = {name: place.view(slots[place.slot]) for name, place in step.moved.items()}
                self.executor.run(_with(step.launch, at))


class _Place(NamedTuple):
    """Where an argument lies in a slot."""

    slot: int
    offset: int  # bytes behind the slot's first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, slot: Tensor) -> Tensor:
        """The same place in another tensor."""
        first = slot.storage_offset() + self.offset // slot.element_size()
        return slot.as_strided(self.shape, self.strides, first)


class _Native(NamedTuple):
    """Launches with binaries, one after the other."""

    binaries: BinaryExecutor
    launches: _C.LaunchList


class _Single(NamedTuple):
    """A launch for the executor, without the tensors that lie in slots."""

    launch: Launch
    moved: dict[str, _Place]


def _places(launch: Launch, slots: Iterable[Tensor]) -> dict[str, _Place]:
    """The arguments that lie in a slot."""
    ranges, found = [_addresses(slot) for slot in slots], {}
    for name, value in launch.arguments.items():
        if isinstance(value, Tensor):
            for i, addresses in enumerate(ranges):
                if value.data_ptr() in addresses:
                    offset = value.data_ptr() - addresses.start
                    found[name] = _Place(i, offset, tuple(value.shape), value.stride())
    return found


def _with(launch: Launch, changes: dict[str, Any]) -> Launch:
    if not changes:
        return launch
    return dataclasses.replace(launch, arguments=launch.arguments | changes)


def _layout(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _addresses(tensor: Tensor) -> range:
    """The bytes from the tensor's first element to its last."""
    if tensor.numel() == 0:
        return range(0)
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size())
