"""A whole forward as one call: launches recorded once, then started again with other tensors.

What changes from call to call (the image, the result) are *slots*: an argument that lies in a
slot's memory follows that slot. On a GPU the launches are one C++ call over a `_C.LaunchList`;
other executors get them one by one.
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
    recorder = Recorder(executor.arch, tf32, executor.processors)
    with executing(recorder):
        forward()
    return recorder.launches


class Plan:
    """Recorded launches on an executor, `count` of them.

    The executor's `native`, if there is one, starts them all from C++. `run` only launches,
    so it can be captured in a CUDA graph; with `graph` it makes one itself at the second call, and
    launches that from then on. `no_graph` says why it could not. Calls share the tensors between
    the launches, which the plan keeps alive: a lock lets one call start all of its launches before
    another's, and both must be on one stream. Plans that share those tensors share the lock.
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
        self._moved = [_places(launch, slots) for launch in launches]
        used = {one.slot for moved in self._moved for one in moved.values()}
        unused = set(range(len(slots))) - used
        if unused:  # a launcher copied it, and later calls would read the first call's copy
            raise ValueError(f"vitkern: no launch of the plan uses slots {sorted(unused)}")
        # Without the first call's slots, which would be kept alive.
        self._kept = [
            _with(launch, dict.fromkeys(moved))
            for launch, moved in zip(launches, self._moved, strict=True)
        ]
        self._native: BinaryExecutor | None = executor.native
        if self._native is not None:
            self._list = _list(self._native, launches, self._moved)
        self._graph: _C.Graph | None = None
        self._has_run, self.no_graph = False, ""

    @property
    def one_call(self) -> bool:
        """Whether all launches are one C++ call."""
        return self._native is not None

    @property
    def has_graph(self) -> bool:
        return self._graph is not None

    def run(self, *slots: Tensor, graph: bool = False) -> None:
        """Start all launches; `slots` are laid out as those that the plan was made with."""
        layouts = list(map(_layout, slots))
        if layouts != self._layouts:
            raise ValueError(
                f"vitkern: the plan was made for {self._layouts} (shape, strides, dtype), not "
                f"{layouts}"
            )
        with self._lock:
            if self._native is not None:
                self._native.run_list(self._of_graph(self._native, slots, graph), slots)
                return
            for launch, moved in zip(self._kept, self._moved, strict=True):
                at = {name: place.view(slots[place.slot]) for name, place in moved.items()}
                self.executor.run(_with(launch, at))

    def _of_graph(
        self, native: BinaryExecutor, slots: Sequence[Tensor], wanted: bool
    ) -> _C.LaunchList | _C.Graph:
        """What is started: the graph, if one is wanted and this shape of call comes again."""
        if self._graph is not None and wanted:
            return self._graph
        if not wanted:
            self._graph = None  # its memory goes, too
        elif self._has_run and not self.no_graph:
            try:
                self._graph = native.graph_of(self._list, slots)
                return self._graph
            except _C.DriverError as error:
                self.no_graph = str(error).removeprefix("vitkern: ")
        self._has_run = True
        return self._list


def _list(
    native: BinaryExecutor, launches: Sequence[Launch], places: Sequence[dict[str, _Place]]
) -> _C.LaunchList:
    """Launches as C++ has them; whose tensors must be kept alive."""
    native.prepare(launches)
    made = _C.LaunchList()
    for launch, moved in zip(launches, places, strict=True):
        values: dict[str, Any] = {**native.values(launch)}
        values |= {name: _C.Slot(place.slot, place.offset) for name, place in moved.items()}
        made.add(native.kernel(launch.variant), launch.grid, list(values.values()))
    return made


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
    return tensor.shape, tensor.stride(), tensor.dtype


def _addresses(tensor: Tensor) -> range:
    """The bytes from the tensor's first element to its last."""
    if tensor.numel() == 0:
        return range(0)
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size())
