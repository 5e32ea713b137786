"""Tiles of a head's rows, for HEAD = (E, E1, E2): a pair (rows, E1) and (rows, E2).

Tiles have powers of two, heads do not: 80 channels are held as 64 + 16. Where E2 is 0 the pair has
a second tile all the same, and nothing is computed with it.
"""

import triton
import triton.language as tl

from .gemm import rounded


@triton.jit
def _load_part(
    at, rows, stride, live,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(rows, WIDTH): channels FIRST... of rows `rows` beyond `at`; 0 where there are none."""
    e = FIRST + tl.arange(0, WIDTH)
    where = at + rows[:, None] * stride + e[None, :]
    if MASK and FIRST + WIDTH > E:
        tile = tl.load(where, mask=live[:, None] & (e < E)[None, :], other=0.0)
    elif MASK:
        tile = tl.load(where, mask=live[:, None], other=0.0)
    elif FIRST + WIDTH > E:
        tile = tl.load(where, mask=(e < E)[None, :], other=0.0)
    else:
        tile = tl.load(where)
    return rounded(tile, PRECISION)


@triton.jit
def _store_part(
    at, rows, stride, live, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr
):
    e = FIRST + tl.arange(0, WIDTH)
    mask = live[:, None] & (e < E)[None, :] if FIRST + WIDTH > E else live[:, None]
    tl.store(at + rows[:, None] * stride + e[None, :], values.to(at.dtype.element_ty), mask=mask)


@triton.jit
def load(at, rows, stride, live, HEAD: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr):
    """Rows `rows` beyond `at`; MASK: only those that are live."""
    first = _load_part(at, rows, stride, live, 0, HEAD[1], HEAD[0], MASK, PRECISION)
    second = first
    if HEAD[2] > 0:
        second = _load_part(at, rows, stride, live, HEAD[1], HEAD[2], HEAD[0], MASK, PRECISION)
    return first, second


@triton.jit
def store(at, rows, stride, live, pair, HEAD: tl.constexpr):
    _store_part(at, rows, stride, live, pair[0], 0, HEAD[1], HEAD[0])
    if HEAD[2] > 0:
        _store_part(at, rows, stride, live, pair[1], HEAD[1], HEAD[2], HEAD[0])


@triton.jit
def zeros(BM: tl.constexpr, HEAD: tl.constexpr):
    E1: tl.constexpr = HEAD[1]
    E2: tl.constexpr = HEAD[2] if HEAD[2] > 0 else 16
    return tl.zeros((BM, E1), tl.float32), tl.zeros((BM, E2), tl.float32)


@triton.jit
def scaled(pair, factor, HEAD: tl.constexpr):
    """Each row times its factor."""
    second = pair[1]
    if HEAD[2] > 0:
        second = second * factor[:, None]
    return pair[0] * factor[:, None], second


@triton.jit
def dot(a, b, HEAD: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T: (rows of a, rows of b) in fp32."""
    out = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if HEAD[2] > 0:
        out = tl.dot(a[1], tl.trans(b[1]), out, input_precision=PRECISION)
    return out


@triton.jit
def add(sums, p, b, HEAD: tl.constexpr, PRECISION: tl.constexpr):
    """sums + p b, for p (rows of sums, rows of b)."""
    first, second = tl.dot(p, b[0], sums[0], input_precision=PRECISION), sums[1]
    if HEAD[2] > 0:
        second = tl.dot(p, b[1], sums[1], input_precision=PRECISION)
    return first, second
