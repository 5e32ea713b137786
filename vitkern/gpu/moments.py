"""Row statistics handed from the kernel that writes a row to the one that normalises it.

A block leaves for every PART columns of a row their sum and their squared deviations from their own
mean: moments (parts, M, 2) fp32, parts = ceil(D / PART). The reader joins the parts (Chan's
formula), so that LayerNorm costs no pass over the row of its own, and large means cancel nothing.

A GEMM's tile depends on the number of rows, the statistics must not: parts are WIDTH columns
wide whatever the tile, and their sums are added in one order whatever layout the compiler gives it.
What could be contracted is written as the fused operation that it shall be, so that no compiler
contracts it in one tile and not in another.
"""

import triton
import triton.language as tl

WIDTH = 32  # columns of the narrowest tile of a GEMM, and of a part that GEMMs leave
_WIDTH = tl.constexpr(WIDTH)
_AT_ONCE = tl.constexpr(8)  # parts whose loads are in flight together


@triton.jit
def _halved(x, BM: tl.constexpr, PARTS: tl.constexpr, HALF: tl.constexpr):
    """The right half of the last axis of x (BM, PARTS, 2 * HALF) added to the left one."""
    return tl.sum(tl.reshape(x, (BM, PARTS, 2, HALF)), 2)


@triton.jit
def _sums(x, BM: tl.constexpr, PARTS: tl.constexpr):
    """Sums over the last axis of x (BM, PARTS, WIDTH), (BM, PARTS), in one order.

    It is halved until one column is left: a sum of two has one order, that of more (tl.sum) is the
    layout's. Neighbours, which lie in other threads, meet last.
    """
    x = _halved(x, BM, PARTS, 16)
    x = _halved(x, BM, PARTS, 8)
    x = _halved(x, BM, PARTS, 4)
    x = _halved(x, BM, PARTS, 2)
    return tl.reshape(_halved(x, BM, PARTS, 1), (BM, PARTS))


@triton.jit
def store(moments, block, rows, live, y, columns, M, D, BM: tl.constexpr, BN: tl.constexpr):
    """Leave the moments of y (BM, BN), a row's columns from block * BN on, as they are stored.

    `live` (BM,) are the real rows. Parts are WIDTH columns wide.
    """
    PART: tl.constexpr = _WIDTH
    PARTS: tl.constexpr = BN // PART
    inside = tl.reshape((columns < D)[None, :], (1, PARTS, PART))
    y = tl.where(inside, tl.reshape(y.to(tl.float32), (BM, PARTS, PART)), 0.0)
    part = block * PARTS + tl.arange(0, PARTS)
    width = tl.maximum(tl.minimum(PART, D - part * PART), 1).to(tl.float32)
    total = _sums(y, BM, PARTS)
    away = tl.fma(-total[:, :, None], (1.0 / width)[None, :, None], y)
    away = tl.where(inside, away, 0.0)
    # A plain away * away would be contracted with the sum's first addition, a * a + b * b with one
    # of the squares unrounded: in each thread its own, so that two of them would differ.
    squares = _sums(tl.fma(away, away, 0.0), BM, PARTS)
    at = moments + (part.to(tl.int64)[None, :] * M + rows[:, None]) * 2
    mask = live[:, None] & (part * PART < D)[None, :]
    # As vectors: neighbours are 8 bytes (rows) or M rows (parts) from each other, so no layout has
    # the 128 bits a thread that the machine code's gate wants of a matrix.
    at, mask = tl.reshape(at, (BM * PARTS,)), tl.reshape(mask, (BM * PARTS,))
    tl.store(at, tl.reshape(total, (BM * PARTS,)), mask=mask)
    tl.store(at + 1, tl.reshape(squares, (BM * PARTS,)), mask=mask)


@triton.jit
def store_row(moments, rows, live, y, inside, D):
    """The same of whole rows y (BM, BD) in one part, by a kernel with one layout for every M."""
    y = tl.where(inside[None, :], y.to(tl.float32), 0.0)
    total = tl.sum(y, 1)
    away = tl.where(inside[None, :], y - (total / D)[:, None], 0.0)
    tl.store(moments + rows * 2, total, mask=live)
    tl.store(moments + rows * 2 + 1, tl.sum(away * away, 1), mask=live)


@triton.jit
def load(moments, rows, live, M, D, eps, PART: tl.constexpr):
    """Mean and 1 / sqrt(var + eps) of each row: (BM,), (BM,); PART is the writer's."""
    parts = tl.cdiv(D, PART)
    at = moments + rows.to(tl.int64) * 2
    step = tl.cast(M, tl.int64) * 2
    total = tl.zeros(rows.shape, tl.float32)
    for first in range(0, parts, _AT_ONCE):
        for part in tl.static_range(_AT_ONCE):
            some = live & (first + part < parts)
            total += tl.load(at + (first + part) * step, mask=some, other=0.0)
    mean = total / D
    squares = tl.zeros(rows.shape, tl.float32)
    for first in range(0, parts, _AT_ONCE):
        for part in tl.static_range(_AT_ONCE):
            some = live & (first + part < parts)
            width = tl.maximum(tl.minimum(PART, D - (first + part) * PART), 1).to(tl.float32)
            sums = tl.load(at + (first + part) * step, mask=some, other=0.0)
            inner = tl.load(at + (first + part) * step + 1, mask=some, other=0.0)
            away = tl.fma(sums, 1.0 / width, -mean)
            squares += tl.where(some, tl.fma(width * away, away, inner), 0.0)
    return mean, tl.math.rsqrt(squares / D + eps)
