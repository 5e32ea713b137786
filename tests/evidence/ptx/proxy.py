"""What wgmma may see of shared memory: it reads through the async proxy, all others do not.

A byte that st.shared, stmatrix or cp.async wrote is invisible there until a fence.proxy.async comes
after the write and before the read: of the warp that wrote it, or of one that has met that warp at
a barrier; and the warps that read must have executed that fence or have met one that did. A fence
on either side of the barrier is enough. What a wgmma reads must stay until its group was waited
for, and another warp needs a barrier after that wait before it writes.
"""

from __future__ import annotations

import numpy as np

from .machine import WARP, Machine, Step, opcode
from .parser import Instruction

ROW = 16  # bytes that wgmma reads at once
GROUP = 4  # warps of a warp group


class AsyncProxy:
    """Per byte of the shared memories of a wave: the fence that covers it, and pending reads."""

    def __init__(self, m: Machine) -> None:
        self.m, self.shared = m, m.shared
        size = self.shared.bytes.size
        self.fenced = np.zeros(size, np.uint32)  # barriers before the fence that covers it, + 1
        self.fencers = np.zeros(size, np.uint32)  # the warps that executed it: a bit each
        self.reads = np.zeros(size // ROW, np.uint16)  # of wgmma, under way
        m.resets.append(self._reset)

    def _reset(self) -> None:
        self.fenced.fill(0)
        self.reads.fill(0)

    def epochs(self, lanes: np.ndarray) -> np.ndarray:
        """Barriers that each thread's block has passed."""
        return self.m.stamp[lanes] >> 6

    def written(self, touched: np.ndarray) -> None:
        """Others than the async proxy wrote these bytes."""
        self.fenced[touched] = 0

    def busy(self, place: np.ndarray) -> np.ndarray:
        """(n,): whether wgmma has yet to read what aligned accesses of ROW bytes at most touch."""
        return self.reads[place // ROW] > 0

    def fence(self, where: object) -> None:
        """Covers what the executing warps have written, or met at a barrier."""
        m, shared = self.m, self.shared
        warps = np.broadcast_to(where, m.size).reshape(m.blocks, -1, WARP).any(2)
        for block in np.flatnonzero(warps.any(1)):
            part = slice(block * shared.stride, (block + 1) * shared.stride)
            epoch = self.epochs(np.array([block * m.threads]))[0]
            fenced, fencers = self.fenced[part], self.fencers[part]
            open_ = np.flatnonzero((fenced == 0) | (fenced == epoch + 1))
            writer = shared.writer[part][open_]
            older = writer >> 6 < epoch  # a barrier lies between
            mine = (writer >> 6 == epoch) & warps[block][(writer & 63) % warps.shape[1]]
            every = np.bitwise_or.reduce(np.uint32(1) << np.flatnonzero(warps[block]).astype("u4"))
            own = np.uint32(1) << (writer & np.uint32(31))
            add = np.where(older, every, np.where(mine, own, np.uint32(0)))
            before = np.where(fenced[open_] == 0, np.uint32(0), fencers[open_])
            fencers[open_] = before | add
            fenced[open_] = np.where(fencers[open_] == 0, 0, epoch + 1)

    def fetch(self, place: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """(n, 4) words of rows at `place`, read by the warp groups that begin with `lanes` (n,)."""
        shared = self.shared
        shared.readable(place, lanes, ROW)
        touched = place[:, None] + np.arange(ROW)
        epoch = self.epochs(lanes)[:, None]
        fresh = shared.writer[touched] >> 6 == epoch
        if fresh.any():
            self._fail(place, lanes, fresh, "some other warp of the group just wrote: no barrier")
        fenced = self.fenced[touched]
        warps = (self.m.warp_of[lanes][:, None]).astype(np.uint32)
        four = np.uint32(15) << warps
        seen = (fenced != 0) & ((fenced < epoch + 1) | (self.fencers[touched] & four == four))
        if not seen.all():
            self._fail(place, lanes, ~seen, "no fence.proxy.async has made visible to wgmma")
        return shared.bytes.view(np.uint32).reshape(-1, ROW // 4)[place // ROW]

    def _fail(self, place: np.ndarray, lanes: np.ndarray, wrong: np.ndarray, what: str) -> None:
        bad = np.flatnonzero(wrong.any(1))[0]
        at = int(place[bad]) % self.shared.stride
        self.m.fail(lanes[bad], f"wgmma reads shared bytes at {at} that {what}")

    def begin(self, place: np.ndarray) -> None:
        """Rows that are being read from now on."""
        np.add.at(self.reads, place // ROW, 1)

    def end(self, place: np.ndarray, lanes: np.ndarray) -> None:
        """They have been read, by all warps of the groups that begin with `lanes`."""
        np.subtract.at(self.reads, place // ROW, 1)
        touched = place[:, None] + np.arange(ROW)
        self.shared.reader[touched] = (self.m.stamp[lanes] | np.uint32(63))[:, None]


@opcode("fence")
def _fence(m: Machine, i: Instruction) -> Step:
    """Of the proxies; other fences order what is in order here anyway."""
    if i.modifiers[:2] != ("proxy", "async") or m.shared.proxy is None:
        return lambda where: None
    return m.shared.proxy.fence
