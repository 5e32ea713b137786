"""Dropout's masks in a kernel: the words of vitkern/philox.py, to the bit."""

import triton
import triton.language as tl
from triton.language.random import philox_impl

from .. import philox

ELEMENTS = tl.constexpr(philox.ELEMENTS)
PATH = tl.constexpr(philox.PATH)
HIDDEN = tl.constexpr(philox.HIDDEN)


def limits(p: float) -> tuple[int, float]:
    """A kernel's `dropout`: the smallest kept value of a word's top bits, and the scale."""
    return philox.threshold(p), philox.scale(p)


@triton.jit
def _words(seed, block, STREAM: tl.constexpr):
    """The four words of each Philox block: `block` int64, any shape."""
    key = tl.load(seed).to(tl.uint64, bitcast=True)
    low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    stream = tl.full(low.shape, STREAM, tl.uint32)
    return philox_impl(low, high, stream, low * 0, key.to(tl.uint32), (key >> 32).to(tl.uint32), 10)


@triton.jit
def keep(seed, index, limit, STREAM: tl.constexpr):
    """Whether elements `index` (int64, any shape) of a stream are kept: one Philox block each."""
    a, b, c, d = _words(seed, index // 4, STREAM)
    lane = index % 4
    word = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    return (word >> 8) >= limit


@triton.jit
def keep_tile(
    seed, rows, first, columns, limit, STREAM: tl.constexpr, BN: tl.constexpr, QUADS: tl.constexpr
):
    """(BM, BN): whether elements (rows[i], first + j) of a (., columns) matrix are kept.

    Four neighbours share one Philox block where rows start at a multiple of 4 (QUADS: `columns` and
    `first` are multiples of 4), a quarter of the work of one block per element.
    """
    start = rows.to(tl.int64)[:, None] * columns + first
    if QUADS:
        a, b, c, d = _words(seed, start // 4 + tl.arange(0, BN // 4)[None, :], STREAM)
        pairs = tl.join(tl.join(a, c), tl.join(b, d))  # (BM, BN / 4, 2, 2): [.., 0] = a, c
        word = tl.reshape(pairs, (rows.shape[0], BN))  # a, b, c, d
        return (word >> 8) >= limit
    return keep(seed, start + tl.arange(0, BN)[None, :], limit, STREAM)
