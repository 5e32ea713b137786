"""Shared memory that knows which bytes may be read, and a cp.async that is as late as it may be.

Every byte is poison until it is written, pending from the cp.async that will write it until the
wait of the thread that issued it, and good after. Reading poison or pending bytes is an error. So
is a race: reading what another warp wrote, or writing what another warp read, with no barrier
between the two. Each byte remembers who touched it last: barriers passed * 64 + warp (masks are
bytes, and warps write neighbours). Threads of one warp are taken to be in step, as Triton takes
them; two warps may write one byte.
"""

from __future__ import annotations

import numpy as np

from .machine import DTYPES, Machine, Step, lanes_of, opcode, unsupported
from .memory import addresses, gathered, parts_of
from .parser import Immediate, Instruction

GOOD, PENDING = 1, 2  # states of a byte; 0 is poison
MANY = np.uint32(63)  # in the place of a warp: several of them
GAP = 256  # between blocks' memories


class SharedMemory:
    """The shared memories of the blocks of a wave, one after another."""

    def __init__(self, m: Machine, size: int) -> None:
        self.m = m
        static = 0
        for name, (count, align) in m.program.shared.items():
            if count:
                static = -(-static // align) * align
                m.addresses[name] = static
                static += count
        static = -(-static // 128) * 128
        for name, (count, _) in m.program.shared.items():
            if not count:
                m.addresses[name] = static
        self.size = static + size
        self.stride = -(-self.size // GAP) * GAP + GAP
        self.bytes = np.empty(m.blocks * self.stride, np.uint8)
        self.state = np.empty_like(self.bytes)
        self.writer = np.empty(self.bytes.size, np.uint32)  # stamps
        self.reader = np.empty_like(self.writer)
        self.base = m.block_of * self.stride  # of each thread's block
        self.copies: list[_Copy] = []
        self.groups = np.zeros(m.size, np.int64)  # commits of each thread
        self.proxy = None  # proxy.py, of programs with wgmma
        m.resets.append(self._reset)

    def _reset(self) -> None:
        self.bytes.fill(0xFF)  # NaN in every format
        self.state.fill(0)
        self.writer.fill(0xFFFFFFFF)
        self.reader.fill(0xFFFFFFFF)
        self.copies.clear()
        self.groups.fill(0)

    # ---- checks --------------------------------------------------------------------------------

    def locate(self, address: np.ndarray, lanes: np.ndarray | slice, width: int) -> np.ndarray:
        """(n,): places of accesses of `width` bytes at `address` by `lanes`."""
        address = address.astype(np.int64)
        if np.any(address & (width - 1)):
            bad = np.flatnonzero(address & (width - 1))[0]
            self._fail(lanes, bad, f"shared address {address[bad]} is no multiple of {width}")
        if np.any(address > self.size - width):
            bad = np.flatnonzero(address > self.size - width)[0]
            self._fail(lanes, bad, f"shared address {address[bad]}, of {self.size} bytes")
        return address + self.base[lanes]

    def _fail(self, lanes: np.ndarray | slice, n: int, message: str) -> None:
        self.m.fail(np.arange(self.m.size)[lanes][n], message)

    def _states(self, place: np.ndarray, width: int) -> np.ndarray:
        """(n, width): states of the bytes of some accesses."""
        return self.state.reshape(-1, width).take(place // width, axis=0)

    def _touched(self, place: np.ndarray, width: int) -> np.ndarray:
        """(n, width): the bytes that accesses touch."""
        return place[:, None] + np.arange(width)

    def readable(self, place: np.ndarray, lanes: np.ndarray | slice, width: int) -> None:
        """Complains if nobody wrote these bytes, or cp.async has yet to."""
        state = self._states(place, width)
        if np.any(state != GOOD):
            bad = np.flatnonzero((state != GOOD).any(1))[0]
            what = "cp.async has yet to write" if np.any(state[bad] == PENDING) else "nobody wrote"
            at = int(place[bad]) % self.stride
            self._fail(lanes, bad, f"reads {width} shared bytes at {at} that {what}")

    def fetch(
        self, place: np.ndarray, lanes: np.ndarray | slice, width: int, dtype: np.dtype
    ) -> np.ndarray:
        """(n, width / itemsize): what is there, if it may be read."""
        self.readable(place, lanes, width)
        touched, mine = self._touched(place, width), self.m.stamp[lanes][:, None]
        # Equal stamps: this warp. Stamps that differ in their last 6 bits only: another warp's.
        if np.any((self.writer.take(touched) ^ mine) - np.uint32(1) < MANY):
            races = (self.writer.take(touched) ^ mine) - np.uint32(1) < MANY
            bad = np.flatnonzero(races.any(1))[0]
            at = int(place[bad]) % self.stride
            self._fail(lanes, bad, f"reads shared bytes at {at} that another warp just wrote")
        before = self.reader.take(touched) ^ mine
        note = np.where(before - np.uint32(1) < MANY, mine | MANY, mine)
        self.reader[touched] = note
        if np.any(self.reader.take(touched) != note):  # several warps read it in this instruction
            lost = self.reader.take(touched) != note
            self.reader[touched[lost]] = (mine | np.zeros_like(touched, np.uint32))[lost] | MANY
        return self.bytes.view(dtype).reshape(-1, width // dtype.itemsize)[place // width]

    def claim(self, place: np.ndarray, lanes: np.ndarray | slice, width: int) -> None:
        """Complains if these bytes may not be written now."""
        if np.any(self._states(place, width) == PENDING):
            bad = np.flatnonzero((self._states(place, width) == PENDING).any(1))[0]
            at = int(place[bad]) % self.stride
            self._fail(lanes, bad, f"writes shared bytes at {at} that cp.async has yet to write")
        touched, mine = self._touched(place, width), self.m.stamp[lanes][:, None]
        races = (self.reader.take(touched) ^ mine) - np.uint32(1) < MANY
        if np.any(races):
            bad = np.flatnonzero(races.any(1))[0]
            at = int(place[bad]) % self.stride
            self._fail(lanes, bad, f"writes shared bytes at {at} that another warp just read")
        if self.proxy is not None and self.proxy.busy(place).any():
            bad = np.flatnonzero(self.proxy.busy(place))[0]
            at = int(place[bad]) % self.stride
            self._fail(lanes, bad, f"writes shared bytes at {at} that wgmma has yet to read")

    def put(
        self, place: np.ndarray, lanes: np.ndarray | slice, width: int, values: np.ndarray
    ) -> None:
        """Writes (n, parts) values, which may be read from now on."""
        rows = self.bytes.view(values.dtype).reshape(-1, values.shape[1])
        rows[place // width] = values
        lost = rows.take(place // width, axis=0) != values
        if np.any(lost):
            bad = np.flatnonzero(lost.any(1))[0]
            self._fail(lanes, bad, "two threads write different numbers to one shared address")
        self.state.reshape(-1, width)[place // width] = GOOD
        touched = self._touched(place, width)
        self.writer[touched] = self.m.stamp[lanes][:, None]
        if self.proxy is not None:
            self.proxy.written(touched)

    # ---- ld and st -----------------------------------------------------------------------------

    def load(self, i: Instruction, parts: int, kind: str) -> Step:
        m = self.m
        raw = f"{'s' if kind[0] == 's' else 'u'}{8 * DTYPES[kind].itemsize}"
        width = parts * DTYPES[raw].itemsize
        address = addresses(m, i.operands[1], "u32")
        outs = [m.write_wide(o, raw) for o in parts_of(i.operands[0])]

        def step(where: object) -> None:
            lanes = lanes_of(where)
            place = self.locate(address(where), lanes, width)
            values = self.fetch(place, lanes, width, DTYPES[raw])
            for n, d in enumerate(outs):
                d[lanes] = values[:, n]

        return step

    def store(self, i: Instruction, parts: int, raw: str) -> Step:
        m = self.m
        width = parts * DTYPES[raw].itemsize
        address = addresses(m, i.operands[0], "u32")
        sources = [m.read(o, raw) for o in parts_of(i.operands[1])]

        def step(where: object) -> None:
            lanes = lanes_of(where)
            place = self.locate(address(where), lanes, width)
            self.claim(place, lanes, width)
            self.put(place, lanes, width, gathered(sources, where, m.size))

        return step

    # ---- cp.async ------------------------------------------------------------------------------

    def issue(self, place: np.ndarray, lanes: np.ndarray, data: np.ndarray) -> None:
        """Starts copies of (n, words), one per thread of `lanes`."""
        width = 4 * data.shape[1]
        self.claim(place, lanes, width)
        self.state.reshape(-1, width)[place // width] = PENDING
        self.copies.append(_Copy(place, lanes, data, self.groups[lanes]))

    def wait(self, where: object, keep: int) -> None:
        """Finishes the copies of the executing threads but those of their last `keep` commits."""
        left = []
        for copy in self.copies:
            done = copy.group < self.groups[copy.lanes] - keep
            if where is not True:
                done &= where[copy.lanes]
            if done.any():
                width = 4 * copy.data.shape[1]
                self.put(copy.place[done], copy.lanes[done], width, copy.data[done])
            if not done.all():
                left.append(copy.only(~done))
        self.copies = left


class _Copy:
    """One cp.async of many threads, under way."""

    def __init__(
        self, place: np.ndarray, lanes: np.ndarray, data: np.ndarray, group: np.ndarray
    ) -> None:
        self.place, self.lanes, self.data, self.group = place, lanes, data, group

    def only(self, mask: np.ndarray) -> _Copy:
        return _Copy(self.place[mask], self.lanes[mask], self.data[mask], self.group[mask])


@opcode("cp")
def _copy(m: Machine, i: Instruction) -> Step:
    shared = m.shared
    if i.modifiers == ("async", "commit_group"):

        def commit(where: object) -> None:
            shared.groups[lanes_of(where)] += 1

        return commit
    if i.modifiers == ("async", "wait_group"):
        return lambda where: shared.wait(where, i.operands[0].value)
    if i.modifiers == ("async", "wait_all"):
        return lambda where: shared.wait(where, -1)  # those not committed, too
    words = [x for x in i.modifiers if x not in ("L2", "64B", "128B", "256B", "cta")]
    if words[0] != "async" or words[2:] != ["shared", "global"] or len(i.operands) > 4:
        raise unsupported(i)
    return _copy_async(m, i)


def _copy_async(m: Machine, i: Instruction) -> Step:
    """cp.async [shared], [global], width {, bytes}: zeros after the first `bytes`, those read."""
    width = i.operands[2].value
    if width not in (4, 8, 16):
        raise unsupported(i)
    to, source = addresses(m, i.operands[0], "u32"), addresses(m, i.operands[1], "u64")
    given = i.operands[3] if len(i.operands) == 4 else Immediate(width)
    count = np.broadcast_to(m.read(given, "u32"), m.size)
    rows = m.globals.rows(width, np.dtype(np.uint32))
    every = np.arange(m.size)

    def step(where: object) -> None:
        lanes = every[lanes_of(where)]
        size = count[lanes]
        if np.any(size > width):
            m.fail(lanes[np.argmax(size > width)], f"cp.async of more than {width} bytes")
        place = m.shared.locate(to(where), lanes, width)
        address = source(where)
        data = np.zeros((len(lanes), width // 4), np.uint32)
        whole = size == width
        if whole.any():
            mask = np.zeros(m.size, bool)
            mask[lanes[whole]] = True
            data[whole] = rows[m.globals.locate(m, address[whole], mask, width, "read")]
        for n in np.flatnonzero(~whole & (size > 0)):  # rare: byte by byte
            mask = every == lanes[n]
            for byte in range(size[n]):
                at = address[n : n + 1] + np.uint64(byte)
                here = m.globals.locate(m, at, mask, 1, "read")[0]
                data.view(np.uint8)[n, byte] = m.globals.bytes[here]
        m.shared.issue(place, lanes, data)

    return step
