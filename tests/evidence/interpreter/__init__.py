"""Runs Triton kernels on CPU tensors with a GPU's numerics: the tests' executor.

An ordinary `@triton.jit` function, which stays compilable, is executed with numpy, one program
after the other, at about 10 us per operation; nothing in triton changes. What is rounded how:
numerics.py. The language: source.py, language.py and tensor.py. A run
also checks what a GPU does not forgive: accesses outside of an argument's storage, writes to
arguments that the launch does not list as written and, on request, programs that depend on each
other. Elements that a load without `other` masks off are NaN (integers: nonsense), as a GPU leaves
there whatever the register held.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping

import numpy as np
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from vitkern.gpu.launch import Executor, Launch, grouped

from .numerics import Kind, Value, constant, from_memory, to_memory
from .source import resolve
from .tensor import builder, pointer, scalar

_ELEMENTS = {
    "fp32": tl.float32,
    "fp16": tl.float16,
    "bf16": tl.bfloat16,
    "fp64": tl.float64,
    **{f"i{n}": getattr(tl, f"int{n}") for n in (1, 8, 16, 32, 64)},
    **{f"u{n}": getattr(tl, f"uint{n}") for n in (8, 16, 32, 64)},
    "u1": tl.int1,
}
_lock = threading.RLock()  # the builder has one run in progress at a time


class Interpreter(Executor):
    """Runs launches on CPU tensors, in place.

    `arch` chooses the launch settings. Programs run in `order` "linear" (x fastest) or "shuffled"
    by `seed`: results must not depend on it. `check` refuses accesses outside of the arguments;
    `races` refuses programs that read or write what another one of the launch writes.
    """

    def __init__(
        self,
        arch: str = "sm_80",
        order: str = "linear",
        seed: int = 0,
        check: bool = True,
        races: bool = False,
    ) -> None:
        if order not in ("linear", "shuffled"):
            raise ValueError(f"order={order!r}: use 'linear' or 'shuffled'")
        self.arch, self.order, self.seed = arch, order, seed
        self.check, self.races = check, races

    def run(self, launch: Launch) -> None:
        values, regions, storages = {}, {}, {}
        for (name, kind), value in zip(
            launch.variant.signature, launch.run_time().values(), strict=True
        ):
            if isinstance(value, Tensor):
                if value.device.type != "cpu":
                    raise ValueError(f"{launch.kernel.__name__}: `{name}` is on {value.device}")
                bytes_ = value.untyped_storage()
                key = bytes_.data_ptr()
                storage = storages.setdefault(key, Storage(key, bytes_.nbytes()))
                regions[name] = Region(name, storage, name in launch.writes)
                value = value.data_ptr()
            values[name] = (kind, value)
        constants = dict(launch.variant.constants)
        self.run_raw(launch.kernel, launch.grid, values, constants, regions if self.check else {})

    def run_raw(
        self,
        kernel: JITFunction,
        grid: tuple[int, ...],
        values: Mapping[str, tuple[str, object]],
        constants: Mapping[str, object],
        regions: Mapping[str, Region] | None = None,
    ) -> None:
        """Run with addresses for tensors: `values` are name -> ("*bf16", address) or ("i32", 7).

        The elements of a tuple have names of their own, "strides.0". Accesses through an argument
        without a region are believed.
        """
        given = {}
        for name, (kind, number) in values.items():
            if kind[0] == "*":
                region = (regions or {}).get(name)
                given[name] = pointer(number, _ELEMENTS[kind[1:]], region)
            else:
                given[name] = scalar(number, _ELEMENTS[kind])
        arguments = {name: resolve(value) for name, value in constants.items()}
        arguments |= grouped(given.items())
        x, y, z = (*grid, 1, 1)[:3]
        programs = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        if self.order == "shuffled":
            random.Random(self.seed).shuffle(programs)
        function = resolve(kernel)
        with _lock, np.errstate(all="ignore"):
            builder.grid, builder.memory = (x, y, z), Memory(kernel.__name__, self.races)
            builder.smallest_k = 16 if self.arch.startswith("sm_") else 1
            try:
                for program in programs:
                    builder.program = program
                    function(**arguments)
            finally:
                builder.memory = None


# ---- memory ----


class Storage:
    """A block of memory, and which program of the launch touched which of its elements."""

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size
        self._views: dict[np.dtype, np.ndarray] = {}
        self._marks: dict[tuple[str, int], np.ndarray] = {}

    def view(self, dtype: np.dtype) -> np.ndarray:
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = _at(self.base, self.size // dtype.itemsize, dtype)
        return found

    def marks(self, what: str, itemsize: int) -> np.ndarray:
        """(elements,): the number of the program that reads or writes each, 0 for none yet."""
        found = self._marks.get((what, itemsize))
        if found is None:
            found = np.zeros(self.size // itemsize, np.int64)
            self._marks[what, itemsize] = found
        return found


class Region:
    """What an argument may touch: the storage of its tensor."""

    def __init__(self, name: str, storage: Storage, writable: bool) -> None:
        self.name, self.storage, self.writable = name, storage, writable


class _Address:
    """Memory that numpy can view without owning it."""

    def __init__(self, address: int, count: int, dtype: np.dtype) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": dtype.str,
            "version": 3,
        }


def _at(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    return np.asarray(_Address(address, count, dtype)) if count else np.empty(0, dtype)


class Memory:
    """The loads and stores of one launch."""

    def __init__(self, kernel: str, races: bool) -> None:
        self.kernel, self.races = kernel, races

    def load(self, pointer: Value, mask: Value | None, other: Value | None) -> Value:
        kind = pointer.kind.element
        keep, some = _kept(mask)
        if keep is not None:
            rest = _nonsense(kind) if other is None else other.data
            if not some:
                return Value(rest, kind, pointer.shape)
        view, index = self._locate(pointer, keep, kind, "reads")
        data = from_memory(view[index], kind)
        if keep is not None:
            data = np.where(keep, data, rest)
        return Value(data, kind, pointer.shape)

    def store(self, pointer: Value, value: Value, mask: Value | None) -> None:
        kind, shape = pointer.kind.element, pointer.shape
        keep, some = _kept(mask)
        if not some:
            return
        view, index = self._locate(pointer, keep, kind, "writes")
        raw = np.broadcast_to(to_memory(value.data, kind), shape)
        index = np.broadcast_to(index, shape)
        if keep is not None:
            keep = np.broadcast_to(keep, shape)
            raw, index = raw[keep], index[keep]
        if self.races and pointer.region is not None:
            self._note_writes(pointer.region, view, index, raw)
        view[index] = raw

    def atomic(self, operation: str, pointer: Value, value: Value, mask: Value) -> Value:
        """One element after the other; returns what was there before."""
        if operation not in _ATOMIC:
            raise NotImplementedError(f"the interpreter does not model atomic {operation}")
        kind, shape = pointer.kind.element, pointer.shape
        before = np.zeros(shape, kind.data)
        keep, some = mask.full(), bool(mask.data.any())
        if some:
            view, index = self._locate(pointer, keep, kind, "writes")
            index, new = np.broadcast_to(index, shape), value.full()
            for at in zip(*np.nonzero(keep), strict=True) if shape else [()]:
                slot = index[at]
                before[at] = old = from_memory(view[slot], kind)
                joined = _ATOMIC[operation](old, new[at])
                view[slot] = to_memory(constant(joined, kind).data, kind)
        return Value(before, kind, shape)

    def _locate(self, pointer: Value, keep, kind: Kind, what: str):
        """A view of memory and the index in it of every address (any index where masked off)."""
        region, address, size = pointer.region, pointer.data, kind.memory.itemsize
        if region is None:
            wanted = address
            if keep is not None:
                wanted = np.broadcast_to(address, pointer.shape)
                wanted = wanted[np.broadcast_to(keep, pointer.shape)]
            base = int(wanted.min())
            view = _at(base, (int(wanted.max()) - base) // size + 1, kind.memory)
        else:
            base, view = region.storage.base, region.storage.view(kind.memory)
        index = (address - base) >> _SHIFT[size]
        if keep is not None:
            index = np.where(keep, index, 0)
        if region is not None:
            if index.view(np.uint64).max() >= view.size:  # negative ones are huge
                self._refuse(region, pointer, keep, size, what)
            if what == "writes" and not region.writable:
                self._fail(f"writes to `{region.name}`, which its launch lists as only read")
            if self.races and what == "reads":
                wanted = index if keep is None else index[np.broadcast_to(keep, index.shape)]
                self._note_reads(region, wanted, size)
        return view, index

    def _fail(self, what: str) -> None:
        raise IndexError(f"kernel {self.kernel}, program {builder.program}, {what}")

    def _refuse(self, region: Region, pointer: Value, keep, size: int, what: str) -> None:
        offset = np.broadcast_to(pointer.data - region.storage.base, pointer.shape)
        if keep is not None:
            offset = offset[np.broadcast_to(keep, pointer.shape)]
        outside = offset[(offset < 0) | (offset > region.storage.size - size)]
        self._fail(
            f"{what} outside of argument `{region.name}`: {outside.size} elements, the first at"
            f" byte {int(outside.flat[0])} of a storage of {region.storage.size} bytes"
        )

    # ---- races: every element has one writer, or readers ----

    def _number(self) -> int:
        (x, y, z), (nx, ny, _) = builder.program, builder.grid
        return 1 + x + nx * (y + ny * z)

    def _note_reads(self, region: Region, index, size: int) -> None:
        me = self._number()
        writer = region.storage.marks("writer", size)[index]
        if ((writer != 0) & (writer != me)).any():
            self._fail(f"reads elements of `{region.name}` that another program writes")
        readers = region.storage.marks("reader", size)
        before = readers[index]
        readers[index] = np.where((before == 0) | (before == me), me, _MANY)

    def _note_writes(self, region: Region, view, index, raw) -> None:
        me, size = self._number(), view.itemsize
        writers = region.storage.marks("writer", size)
        before, reader = writers[index], region.storage.marks("reader", size)[index]
        if ((reader != 0) & (reader != me)).any():
            self._fail(f"writes elements of `{region.name}` that another program reads")
        there = view[index]
        other = (there != raw) & ((there == there) | (raw == raw))  # NaN over NaN is no race
        if ((before != 0) & (before != me) & other).any():
            self._fail(f"writes other values to `{region.name}` than another program did")
        writers[index] = me


_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3}  # bytes of an element: a division by shifting
_MANY = -1  # programs that read an element
_ATOMIC = {
    "ADD": lambda old, new: old + new,
    "FADD": lambda old, new: old + new,
    "MAX": max,
    "MIN": min,
    "AND": lambda old, new: old & new,
    "OR": lambda old, new: old | new,
    "XOR": lambda old, new: old ^ new,
    "XCHG": lambda old, new: new,
}


def _kept(mask: Value | None):
    """The mask, or None where it masks nothing, and whether anything is left."""
    if mask is None or mask.data.all():
        return None, True
    return mask.data, bool(mask.data.any())


def _nonsense(kind: Kind):
    """What a register may hold that was never loaded."""
    return constant(np.nan if kind.is_float else 0x5A5A5A5A5A5A5A5A, kind).data
