"""Weights in the panels that CPU kernels read: packed once per parameter, shared, freed after it.

The engines and the lone operators ask here, so that both read one copy where their panels are the
same. An engine holds what it is given. A lone operator (`vitkern.ops.mlp` called by hand, or by the
fused path) gets panels when it sees a weight the third time unchanged: a training step uses a
weight once, or twice with checkpointing, and then changes it. Those panels are held here, up to
`limit()` bytes, until the weight is changed or freed; beyond, a weight is converted at each call.

A weight is unchanged while its version counter, address, sizes and strides are the same, and the
bits of four of its elements (csrc/cpu/fingerprint.hpp), which show most writes through `.data`.
After a write through `.data` to a part of a weight call `forget(weight)`.

What is known of a weight ends with its memory (its storage; a weak reference to the tensor itself
would forbid torch.utils.swap_tensors). It is looked for when another weight is seen first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from . import _C

DTYPES = {torch.float32: _C.DType.f32, torch.bfloat16: _C.DType.bf16}
CALLS = 3  # the call at which a lone operator's weight is packed
RETRY = 1000  # calls after which a weight is tried again that was beyond the limit
_PLAIN = (nn.Parameter, Tensor)


class _Entry:
    """What is packed of one tensor, and what the tensor was like then."""

    __slots__ = ("calls", "fingerprint", "held", "panels", "place", "storage")

    def __init__(self, weight: Tensor) -> None:
        # Also keeps the address of the storage's record, though not its memory, from coming back.
        self.storage = StorageWeakRef(weight.untyped_storage())
        self.place = _place(weight)
        self.calls = 0
        self.panels: dict[int, weakref.ref[_C.Packed]] = {}  # by layout
        self.held: dict[int, _C.Packed] = {}  # those of them that nobody else may hold
        self.fingerprint: _C.Fingerprint | None = None  # with the first panels

    def fits(self, weight: Tensor) -> bool:
        """Whether this is of that weight, unchanged."""
        if StorageWeakRef(weight.untyped_storage()) != self.storage or self.place != _place(weight):
            return False
        return self.fingerprint is None or self.fingerprint.matches()

    def find(self, layout: int) -> _C.Packed | None:
        found = self.panels.get(layout)
        return None if found is None else found()

    def pack(self, weight: Tensor, layout: int) -> _C.Packed:
        if self.fingerprint is None:
            size = weight.element_size()
            rows = [(weight.data_ptr(), size, weight.shape, weight.stride())]
            self.fingerprint = _C.Fingerprint(rows)
        matrix = weight.detach().flatten(1).contiguous()
        packed = _C.Packed(layout, DTYPES[matrix.dtype], matrix.data_ptr(), *matrix.shape)
        self.panels[layout] = weakref.ref(packed)
        return packed


_entries: dict[int, _Entry] = {}  # by the id of the tensor
_lock = threading.RLock()  # for those who write
_limit = 512 << 20


def shared(weight: Tensor, layout: int) -> _C.Packed:
    """The panels of a weight (N, ...) for an engine, which holds them: found, or made."""
    with _lock:
        entry = _entry(weight)
        return entry.find(layout) or entry.pack(weight, layout)


def unshared(weight: Tensor, layout: int) -> _C.Packed:
    """The panels of a weight (N, K) that is no parameter: nobody else will ask for them."""
    matrix = weight.detach().contiguous()
    return _C.Packed(layout, DTYPES[matrix.dtype], matrix.data_ptr(), *matrix.shape)


def lone(isa: str, weights: Sequence[Tensor]) -> list[_C.Packed] | None:
    """The panels of an operator's weights; None while they are to be converted at each call."""
    found = []
    for weight in weights:
        layout = _C.operator_layout(isa, DTYPES[weight.dtype])
        entry = _entries.get(id(weight))
        if entry is None or not entry.fits(weight):
            if not _is_watchable(weight):
                return None
            with _lock:
                entry = _entry(weight)
        entry.calls += 1
        panels = entry.find(layout)
        if panels is None:
            if entry.calls < CALLS:
                continue
            with _lock:
                panels = entry.find(layout) or _hold(entry, weight, layout)
            if panels is None:
                continue
        found.append(panels)
    return found if len(found) == len(weights) else None


def limit(bytes: int | None = None) -> int:
    """The most that panels of lone operators may take in all; sets it if given, and 0 is none."""
    global _limit
    if bytes is not None:
        if not isinstance(bytes, int) or bytes < 0:
            raise ValueError(f"packing.limit: expected a number of bytes, got {bytes!r}")
        with _lock:
            _limit = bytes
            if held_bytes() > bytes:
                for entry in list(_entries.values()):
                    entry.held.clear()
    return _limit


def held_bytes() -> int:
    """Memory of the panels that are held for lone operators."""
    _forget_dead()
    entries = list(_entries.values())
    return sum(panels.bytes for entry in entries for panels in list(entry.held.values()))


def forget(*weights: Tensor) -> None:
    """Pack these weights anew when they are next used; without any, all."""
    with _lock:
        for key in map(id, weights) if weights else list(_entries):
            _entries.pop(key, None)


def unique_bytes(panels: Iterable[_C.Packed]) -> int:
    """Memory of some panels, each counted once."""
    return sum({one.panels: one.bytes for one in panels}.values())


def _entry(weight: Tensor) -> _Entry:
    """The entry of a weight as it is now; the lock is held."""
    entry = _entries.get(id(weight))
    if entry is None or not entry.fits(weight):
        _forget_dead()
        entry = _entries[id(weight)] = _Entry(weight)
    return entry


def _hold(entry: _Entry, weight: Tensor, layout: int) -> _C.Packed | None:
    """Pack a lone operator's weight if there is room for it; the lock is held."""
    held = held_bytes()
    if held + weight.nbytes <= _limit:
        panels = entry.pack(weight, layout)
        if held + panels.bytes <= _limit:
            entry.held[layout] = panels
            return panels
    entry.calls = -RETRY
    return None


def _forget_dead() -> None:
    """Drop what is known of weights whose memory was freed."""
    with _lock:
        for key in [key for key, entry in _entries.items() if entry.storage.expired()]:
            del _entries[key]


def _place(weight: Tensor) -> tuple[Any, ...]:
    return weight._version, weight.data_ptr(), weight.shape, weight.stride()


def _is_watchable(weight: Tensor) -> bool:
    """Whether a change would be seen, and the tensor is one that calls may come back with."""
    return type(weight) in _PLAIN and weight.is_leaf and not weight.is_inference()
