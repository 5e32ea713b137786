"""A whole forward as one call: launches recorded once, then started again with other tensors.

What changes from call to call (the image, the result) are *slots*; a launch's tensor that lies in a
slot's memory follows it. With a binary for every launch the plan is one C++ call; otherwise the
launches go one by one to the executor.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from ..launch import Executor, Launch, Recorder, executing


def record(executor: Executor, tf32: bool | None, forward: Callable[[], None]) -> list[Launch]:
    """The launches that `forward` makes, none of them carried out."""
    recorder = Recorder(executor.arch, tf32)
    with executing(recorder):
        forward()
    return recorder.launches


class Plan:
    """Recorded launches on an executor; `native` tells whether they are one C++ call.

    Calls share the tensors between the launches, so one call starts all of its launches before
    another's; both must be on one stream.
    """

    def __init__(
        self, executor: Executor, launches: Sequence[Launch], slots: Sequence[Tensor]
    ) -> None:
        self.executor, self.count = executor, len(launches)
        self._lock = threading.Lock()
        make = getattr(executor, "plan", None)
        self._native = make(launches, slots) if make else None
        self._moves = [] if self._native else [_moves(launch, slots) for launch in launches]
        self._launches = [
            _without(launch, moves)
            for launch, moves in zip(launches, self._moves, strict=not self._native)
        ]
        used = {index for moves in self._moves for index, _ in moves.values()}
        if not self._native and len(used) < len(slots):  # a launcher copied it: stale at next call
            raise ValueError(f"vitkern: the plan uses slots {sorted(used)} of {len(slots)}")

    @property
    def native(self) -> bool:
        return self._native is not None

    def run(self, *slots: Tensor) -> None:
        with self._lock:
            if self._native is not None:
                self._native.run(*slots)
                return
            for launch, moves in zip(self._launches, self._moves, strict=True):
                if moves:
                    moved = {name: view(slots[i]) for name, (i, view) in moves.items()}
                    launch = dataclasses.replace(launch, arguments=launch.arguments | moved)
                self.executor.run(launch)


def _without(launch: Launch, moves: dict) -> Launch:
    """The launch without the first call's tensors, which would be kept alive."""
    return dataclasses.replace(launch, arguments=launch.arguments | dict.fromkeys(moves))


def _moves(launch: Launch, slots: Sequence[Tensor]) -> dict[str, tuple[int, Callable]]:
    """The arguments that lie in a slot: which one, and how to take the same view of another."""
    found = {}
    for name, value in launch.arguments.items():
        if not isinstance(value, Tensor):
            continue
        for index, slot in enumerate(slots):
            if value.untyped_storage().data_ptr() == slot.untyped_storage().data_ptr():
                shape, strides = value.shape, value.stride()
                offset = value.storage_offset() - slot.storage_offset()

                def view(other, shape=shape, strides=strides, offset=offset):
                    return other.as_strided(shape, strides, other.storage_offset() + offset)

                found[name] = (index, view)
    return found
