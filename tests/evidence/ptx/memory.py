"""Parameters and global memory: ld, st and the buffers that a launch may touch.

Buffers are copied into one arena with gaps of forbidden bytes between them, and copied back when
the kernel has ended. So an access that misses its buffer is found even where another buffer lies
next to it in the host's memory. Readable are the bytes of the elements of the tensors that were
given (not the gaps between their rows); writable only those of the tensors named as written.
Blocks have no order: one that reads what another writes, or writes it otherwise, is an error.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np

from .machine import DTYPES, Machine, Step, lanes_of, opcode, unsupported
from .parser import Address, Immediate, Instruction, Name, PtxError, Vector

BASE = 0x7E00_0000_0000  # of the arena: an address that no kernel computes by accident
GUARD = 4096  # forbidden bytes between buffers


@dataclasses.dataclass
class _Buffer:
    """A storage: host memory that one or more arguments are views of."""

    host: np.ndarray  # uint8
    at: int  # its first byte in the arena
    names: list[str]
    written: bool = False


class GlobalMemory:
    """The arena; `add` all buffers, then `open`, run, `close`."""

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}
        self._views: list[tuple[_Buffer, int, tuple, tuple, int, bool]] = []
        self._end = GUARD

    def add(self, value: object, name: str, written: bool = True) -> int:
        """The address, in the kernel's eyes, of a torch tensor on the CPU or a numpy array."""
        if isinstance(value, np.ndarray):
            base = value
            while isinstance(base.base, np.ndarray):
                base = base.base
            start, size = base.ctypes.data, base.nbytes
            address, item, strides = value.ctypes.data, value.itemsize, value.strides
        else:
            storage = value.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            address, item = value.data_ptr(), value.element_size()
            strides = tuple(s * item for s in value.stride())
        if size == 0:
            return BASE
        buffer = self._buffers.get(start)
        if buffer is None:
            host = np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)
            at = -(-self._end // 256) * 256 + start % 256  # as aligned as on the host
            buffer = self._buffers[start] = _Buffer(host, at, [])
            self._end = at + size + GUARD
        buffer.names.append(name)
        buffer.written |= written
        shape = tuple(value.shape)
        self._views.append((buffer, address - start, shape, strides, item, written))
        return BASE + buffer.at + address - start

    def open(self) -> None:
        size = -(-self._end // 256) * 256
        self.bytes = np.zeros(size, np.uint8)
        readable, writable = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        for buffer in self._buffers.values():
            self.bytes[buffer.at : buffer.at + buffer.host.size] = buffer.host
        for buffer, offset, shape, strides, item, written in self._views:
            for rights in (readable, writable) if written else (readable,):
                part = rights[buffer.at + offset : buffer.at + buffer.host.size]
                if 0 not in shape:
                    np.lib.stride_tricks.as_strided(part, (*shape, item), (*strides, 1))[...] = 1
        # Blocks (from 1) that have written and read each 2 bytes of what may be written at all.
        self._writer, self._reader = np.zeros(size // 2, np.int32), np.zeros(size // 2, np.int32)
        self._rights = {
            (kind, width): rights.reshape(-1, width).all(1)
            for kind, rights in (("read", readable), ("write", writable))
            for width in (1, 2, 4, 8, 16)
        }

    def close(self) -> None:
        for buffer in self._buffers.values():
            if buffer.written:
                buffer.host[:] = self.bytes[buffer.at : buffer.at + buffer.host.size]

    def locate(
        self, m: Machine, address: np.ndarray, where: object, width: int, kind: str
    ) -> np.ndarray:
        """(n,): checked places of accesses of `width` bytes, in units of that width."""
        place = address.view(np.int64) - BASE
        if np.any(place & (width - 1)):
            lane = np.arange(m.size)[lanes_of(where)][np.flatnonzero(place & (width - 1))[0]]
            m.fail(lane, f"{kind}s {width} bytes at an address that is no multiple of {width}")
        slot = place >> (width.bit_length() - 1)
        allowed = self._rights[kind, width].take(slot, mode="clip")
        if not allowed.all():
            bad = np.flatnonzero(~allowed)[0]
            lane = np.arange(m.size)[lanes_of(where)][bad]
            m.fail(lane, f"{kind}s {width} bytes at {self._describe(int(place[bad]))}")
        if kind == "read" and self._rights["write", width].take(slot).any():
            self._note_reads(m, slot, where, width)
        return slot

    def write(self, m: Machine, slot: np.ndarray, where: object, values: np.ndarray) -> None:
        """Puts (n, parts) values where `locate` has allowed it."""
        rows = self.bytes.view(values.dtype).reshape(-1, values.shape[1])
        units, mine = self._units(m, slot, where, values.shape[1] * values.itemsize)
        if np.any((self._reader[units] != 0) & (self._reader[units] != mine)):
            bad = ((self._reader[units] != 0) & (self._reader[units] != mine)).any(1)
            self._clash(m, where, bad, "writes what another block reads")
        owner = self._writer[units]
        others = ((owner != 0) & (owner != mine)).any(1)
        if others.any() and np.any(rows[slot[others]] != values[others]):
            self._clash(m, where, others, "writes what another block wrote otherwise")
        rows[slot] = values
        self._writer[units] = mine
        lost = rows.take(slot, axis=0) != values
        if lost.any():
            self._clash(m, where, lost.any(1), "writes what another thread writes otherwise")

    def _units(
        self, m: Machine, slot: np.ndarray, where: object, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """((n, width / 2), (n, 1)): the 2-byte units of accesses, and the blocks that make them."""
        units = (slot * width // 2)[:, None] + np.arange(max(1, width // 2))
        return units, (m.first + m.block_of[lanes_of(where)] + 1).astype(np.int32)[:, None]

    def _note_reads(self, m: Machine, slot: np.ndarray, where: object, width: int) -> None:
        units, mine = self._units(m, slot, where, width)
        owner = self._writer[units]
        if np.any((owner != 0) & (owner != mine)):
            bad = ((owner != 0) & (owner != mine)).any(1)
            self._clash(m, where, bad, "reads what another block wrote")
        before = self._reader[units]
        note = np.where((before == 0) | (before == mine), mine, -1)  # -1: several blocks
        self._reader[units] = note
        lost = self._reader[units] != note
        self._reader[units[lost]] = -1

    def _clash(self, m: Machine, where: object, bad: np.ndarray, what: str) -> None:
        m.fail(np.arange(m.size)[lanes_of(where)][np.flatnonzero(bad)[0]], f"{what} (no order)")

    def _describe(self, place: int) -> str:
        if not self._buffers:
            return hex(BASE + place)
        nearest = min(
            self._buffers.values(),
            key=lambda b: max(b.at - place, place - (b.at + b.host.size - 1), 0),
        )
        offset = place - nearest.at
        if abs(offset) > 1 << 40:
            return hex((BASE + place) % 2**64)
        inside = 0 <= offset < nearest.host.size
        what = "not its own, or not to be written" if inside else f"of {nearest.host.size}"
        return f"byte {offset} of {'/'.join(nearest.names)} ({what})"

    def rows(self, width: int, dtype: np.dtype) -> np.ndarray:
        """(arena / width, width / itemsize): the arena in accesses of one width."""
        return self.bytes.view(dtype).reshape(-1, width // dtype.itemsize)


def addresses(m: Machine, operand: Address, kind: str) -> np.ndarray:
    """A function where -> (n,) addresses of the executing threads, as `kind` (u32 or u64)."""
    base = m.read(operand.base, kind)
    offset = DTYPES[kind].type(operand.offset & (256 ** DTYPES[kind].itemsize - 1))
    whole = np.broadcast_to(base, m.size)
    if operand.offset == 0:
        return lambda where: whole if where is True else whole[lanes_of(where)]
    return lambda where: (whole if where is True else whole[lanes_of(where)]) + offset


def parts_of(operand: object) -> tuple:
    return operand.parts if isinstance(operand, Vector) else (operand,)


_CACHING = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "weak", "relaxed"}
_CACHING |= {"L1", "L2", "evict_last", "evict_first", "evict_normal", "no_allocate", "gpu", "cta"}
_CACHING |= {"64B", "128B", "256B", "cache_hint", "evict_unchanged", "unified"}


def form(i: Instruction) -> tuple[str, int, str]:
    """(space, how many parts, type) of an ld or st; hints about caches change no result."""
    words = [x for x in i.modifiers if x not in _CACHING]
    space, kind, parts = words[0], words[-1], 1
    if len(words) == 3 and words[1] in ("v2", "v4"):
        parts = int(words[1][1])
    elif len(words) != 2:
        raise unsupported(i)
    return space, parts, kind


@opcode("ld")
@opcode("ld", family="integer")
@opcode("ld", family="float")
@opcode("ld", family="half")
def _load(m: Machine, i: Instruction) -> Step:
    space, parts, kind = form(i)
    if space == "param":
        return _load_param(m, i, kind)
    if space == "shared":
        return m.shared.load(i, parts, kind)
    if space != "global":
        raise unsupported(i)
    raw = f"{'s' if kind[0] == 's' else 'u'}{8 * DTYPES[kind].itemsize}"  # bits, whatever they mean
    width = parts * DTYPES[kind].itemsize
    memory, address = m.globals, addresses(m, i.operands[1], "u64")
    outs = [m.write_wide(o, raw) for o in parts_of(i.operands[0])]
    rows = memory.rows(width, DTYPES[raw])

    def step(where: object) -> None:
        slot = memory.locate(m, address(where), where, width, "read")
        values = rows.take(slot, axis=0)
        lanes = lanes_of(where)
        for n, d in enumerate(outs):
            d[lanes] = values[:, n]

    return step


@opcode("st")
@opcode("st", family="integer")
@opcode("st", family="float")
@opcode("st", family="half")
def _store(m: Machine, i: Instruction) -> Step:
    space, parts, kind = form(i)
    raw = f"u{8 * DTYPES[kind].itemsize}"
    if space == "shared":
        return m.shared.store(i, parts, raw)
    if space != "global":
        raise unsupported(i)
    width = parts * DTYPES[kind].itemsize
    memory, address = m.globals, addresses(m, i.operands[0], "u64")
    sources = [m.read(o, raw) for o in parts_of(i.operands[1])]

    def step(where: object) -> None:
        slot = memory.locate(m, address(where), where, width, "write")
        memory.write(m, slot, where, gathered(sources, where, m.size))

    return step


def gathered(sources: list[np.ndarray], where: object, size: int) -> np.ndarray:
    """(n, parts): what the executing threads hold in some registers."""
    lanes = lanes_of(where)
    return np.stack([np.broadcast_to(s, size)[lanes] for s in sources], axis=1)


def _load_param(m: Machine, i: Instruction, kind: str) -> Step:
    source = i.operands[1]
    if not isinstance(source.base, Name) or source.base.name not in m.params:
        raise PtxError(f"no such parameter, {i}")
    raw = f"{'s' if kind[0] == 's' else 'u'}{8 * DTYPES[kind].itemsize}"
    value = m.params[source.base.name]
    if source.offset or DTYPES[kind].itemsize > len(value):
        raise unsupported(i)
    number = np.frombuffer(value[: DTYPES[kind].itemsize], DTYPES[raw])
    d = m.write_wide(i.operands[0], raw)
    return lambda where: np.copyto(d, number, where=where, casting="unsafe")


@opcode("createpolicy")
def _policy(m: Machine, i: Instruction) -> Step:
    """A hint about caches, made into a register: any value will do."""
    d, a = m.write(i.operands[0], "b64"), m.read(Immediate(0), "b64")
    return lambda where: np.copyto(d, a, where=where)
