"""attention: y = dropout(softmax(q k^T * scale + bias)) v; one read of q, k and v, one write of y.

A program holds BM queries of one head and walks over its keys in tiles of BN, with the running
maximum and sum of each row (the S x S scores are never stored). Full tiles have no masks; the rest
of the keys go in tiles of BT. A head of E channels is held as E1 + E2 (80 = 64 + 16): padding it to
the next power of two would cost up to twice the work and the registers. Exponentials are powers of
two with log2(e) in the scale, so that a score costs one FMA and one EX2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import configs, philox
from .gemm import precision_of, rounded
from .launch import arch_of, cdiv, launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SCAN = tl.constexpr(128)  # sequences looked at together


@triton.jit
def span(tile, offsets, sequences, S, queries, BM: tl.constexpr):
    """(first row, end of rows, first key, end of keys) of a tile of BM queries.

    Sequence i owns the tiles from offsets[i] // BM + i on: at least as many as it needs, so no
    prefix sum and no look at the offsets by the host. A tile beyond its end gets no keys, and
    offsets that do not ascend from 0 to S nothing outside of the tensor.
    """
    if offsets is None:
        row, rows_end, begin, end = tile * BM, queries, 0, S
    else:
        owner = -1
        for start in range(0, sequences, SCAN):
            i = start + tl.arange(0, SCAN)
            begins = tl.load(offsets + i, mask=i < sequences, other=0)
            owner += tl.sum(((begins // BM + i <= tile) & (i < sequences)).to(tl.int32))
        owner = tl.maximum(owner, 0)
        rows_end = tl.minimum(tl.load(offsets + owner + 1), S)
        begin = tl.minimum(tl.maximum(tl.load(offsets + owner), 0), rows_end)
        row = tl.maximum(begin + (tile - begin // BM - owner) * BM, begin)
        end = tl.where(row < rows_end, rows_end, begin)
    return row, rows_end, begin, end


@triton.jit
def load_tile(
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
def store_tile(
    at, rows, stride, live, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr
):
    e = FIRST + tl.arange(0, WIDTH)
    mask = live[:, None] & (e < E)[None, :] if FIRST + WIDTH > E else live[:, None]
    tl.store(at + rows[:, None] * stride + e[None, :], values.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _step(
    q1, q2, sums1, sums2, top, total, k_at, v_at, stride, bias_at, bias_row, row, rows_live, first,
    end, S, scale, seed, limit, head,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BM: tl.constexpr, N: tl.constexpr,
    MASK: tl.constexpr, DROP: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of N keys from `first` on; with a bias scores are natural, else in powers of two."""
    n = tl.arange(0, N)
    live = n < end - first
    ahead = tl.cast(first, tl.int64) * stride
    k = load_tile(k_at + ahead, n, stride, live, 0, E1, E, MASK, PRECISION)
    v = load_tile(v_at + ahead, n, stride, live, 0, E1, E, MASK, PRECISION)
    s = tl.dot(q1, tl.trans(k), input_precision=PRECISION)  # (BM, N)
    if E2 > 0:
        k = load_tile(k_at + ahead, n, stride, live, E1, E2, E, MASK, PRECISION)
        s = tl.dot(q2, tl.trans(k), s, input_precision=PRECISION)
    if bias_at is not None:
        at = bias_at + first + tl.arange(0, BM)[:, None] * bias_row + n[None, :]
        mask = rows_live[:, None] & live[None, :] if MASK else rows_live[:, None]
        s = tl.fma(s, scale, tl.load(at, mask=mask, other=0.0).to(tl.float32))
    if MASK:
        s = tl.where(live[None, :], s, float("-inf"))
    peak = tl.max(s, 1)
    if bias_at is None:
        peak *= scale
    higher = tl.maximum(top, peak)
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet: p = 0, not NaN
    if bias_at is None:
        p = tl.math.exp2(tl.fma(s, scale, -shift[:, None]))
        decay = tl.math.exp2(top - shift)
    else:
        p = tl.math.exp2((s - shift[:, None]) * LOG2E)
        decay = tl.math.exp2((top - shift) * LOG2E)
    if MASK:
        p = tl.where(live[None, :], p, 0.0)  # -inf * scale is NaN when scale is 0
    total = total * decay + tl.sum(p, 1)
    if DROP:
        rows = head * S + row + tl.arange(0, BM)
        keep = philox.keep_tile(seed, rows, first, S, limit, philox.ELEMENTS, N, QUADS)
        p = tl.where(keep, p, 0.0)
    p = rounded(p.to(v.dtype), PRECISION)
    sums1 = tl.dot(p, v, sums1 * decay[:, None], input_precision=PRECISION)
    if E2 > 0:
        v = load_tile(v_at + ahead, n, stride, live, E1, E2, E, MASK, PRECISION)
        sums2 = tl.dot(p, v, sums2 * decay[:, None], input_precision=PRECISION)
    return sums1, sums2, higher, total


@triton.jit(
    do_not_specialize=[
        "sequences", "S", "queries", "H", "tiles", "b_stride", "s_stride", "part_stride",
        "h_stride", "bias_b", "bias_h", "bias_s", "limit",
    ]
)  # fmt: skip
def attention_forward(
    qkv, bias, y, lse, seed, offsets,
    b_stride, s_stride, part_stride, h_stride, bias_b, bias_h, bias_s,
    sequences, S, queries, H, tiles, scale, limit, keep_scale,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, UNIT: tl.constexpr,
    BIAS_UNIT: tl.constexpr, NEGATIVE: tl.constexpr, DROP: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """qkv (B, S, 3, H, E) by strides (in UNITs) -> y (B, queries, H, E), lse (B, H, queries)."""
    head = (tl.program_id(0) // tiles).to(tl.int64)  # of the B * H
    b, h = head // H, head % H
    row, rows_end, begin, end = span(tl.program_id(0) % tiles, offsets, sequences, S, queries, BM)
    stride = s_stride * UNIT
    q_at = qkv + (b * b_stride + h * h_stride) * UNIT
    k_at = q_at + part_stride.to(tl.int64) * UNIT
    v_at = k_at + part_stride.to(tl.int64) * UNIT
    m = tl.arange(0, BM)
    live = m < rows_end - row
    row64 = tl.cast(row, tl.int64)
    q1 = load_tile(q_at + row64 * stride, m, stride, live, 0, E1, E, True, PRECISION)
    q2 = q1
    if E2 > 0:
        q2 = load_tile(q_at + row64 * stride, m, stride, live, E1, E2, E, True, PRECISION)
    if NEGATIVE:  # `scale` is positive, so that the largest score has the largest product
        q1, q2 = -q1, -q2
    bias_at = None
    if bias is not None:
        bias_at = bias + (b * bias_b + h * bias_h + row64 * bias_s) * BIAS_UNIT
    factor = scale if bias is not None else scale * LOG2E
    sums1 = tl.zeros((BM, E1), tl.float32)
    sums2 = tl.zeros((BM, E2 if E2 > 0 else 16), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    full = begin + (end - begin) // BN * BN
    for first in range(begin, full, BN):
        sums1, sums2, top, total = _step(
            q1, q2, sums1, sums2, top, total, k_at, v_at, stride, bias_at, bias_s * BIAS_UNIT, row,
            live, first, end, S, factor, seed, limit, head, E, E1, E2, BM, BN, False, DROP, QUADS,
            PRECISION,
        )  # fmt: skip
    for first in tl.range(full, end, BT, num_stages=1):
        sums1, sums2, top, total = _step(
            q1, q2, sums1, sums2, top, total, k_at, v_at, stride, bias_at, bias_s * BIAS_UNIT, row,
            live, first, end, S, factor, seed, limit, head, E, E1, E2, BM, BT, True, DROP, QUADS,
            PRECISION,
        )  # fmt: skip
    if lse is not None:
        if bias is None:
            top *= LN2
        level = tl.where(top == float("inf"), top, top + tl.log(total))  # total is NaN there
        tl.store(lse + head * queries + row + m, level, mask=live)
    share = 1.0 / total
    if DROP:
        share *= keep_scale
    y_at = y + ((b * queries + row64) * H + h) * E
    store_tile(y_at, m, H * E, live, sums1 * share[:, None], 0, E1, E)
    if E2 > 0:
        store_tile(y_at, m, H * E, live, sums2 * share[:, None], E1, E2, E)


# Two halves rather than one wide part: 64 + 64 takes 10 to 60 registers less than 128 would, and
# keeps all warps along the rows.
_PARTS = (
    (16, 0), (32, 0), (32, 16), (64, 0), (64, 16), (64, 32), (64, 64),
    (128, 16), (128, 32), (128, 64), (128, 128),
)  # fmt: skip


def parts(E: int) -> tuple[int, int]:
    """(E1, E2) with E1 + E2 >= E, each a power of two: what a head of E channels is held as."""
    for E1, E2 in _PARTS:
        if E <= E1 + E2:
            return E1, E2
    raise ValueError(f"attention: E={E}, the GPU kernels hold heads of at most 256 channels")


def by_rows(t: Tensor) -> Tensor:
    """t itself if its channels are contiguous and a tile's rows are within 2**31 of each other."""
    within = (t.stride(-1) == 1 or t.shape[-1] <= 1) and t.stride(1) < 2**23
    return t if within else t.contiguous()


def strides(t: Tensor, *axes: int) -> list[int]:
    """The strides of these axes; 0 where there is nothing to step over."""
    return [t.stride(a) if t.shape[a] > 1 else 0 for a in axes]


def unit(steps: list[int]) -> int:
    """8 if all strides are multiples of 8: then rows can be read 128 bits at a time."""
    return 8 if all(step % 8 == 0 for step in steps) else 1


def bias_arguments(bias: Tensor | None) -> dict[str, object]:
    """bias (B or 1, H or 1, S, S) in place, with a stride of 0 along an axis it is broadcast."""
    if bias is None:
        return dict(bias=None, bias_b=0, bias_h=0, bias_s=0, BIAS_UNIT=1)
    if bias.stride(3) != 1 and bias.shape[3] > 1:
        bias = bias.contiguous()
    steps = strides(bias, 0, 1, 2)
    size = unit(steps)
    b, h, s = (step // size for step in steps)
    return dict(bias=bias, bias_b=b, bias_h=h, bias_s=s, BIAS_UNIT=size)


def plain(offsets: Tensor | None) -> Tensor | None:
    return None if offsets is None else offsets.contiguous()


def dropout_arguments(
    p: float, seed: Tensor | None, offsets: Tensor | None, S: int
) -> dict[str, object]:
    return dict(
        seed=seed if p else None,
        limit=philox.threshold(p),
        keep_scale=float(philox.scale(p)),
        DROP=p > 0,
        QUADS=p > 0 and S % 4 == 0 and offsets is None,  # tiles start at multiples of 4
    )


def tiles_of(offsets: Tensor | None, queries: int, BM: int) -> tuple[int, int]:
    """(tiles of a head, sequences): an upper bound, as the host does not look at the offsets."""
    if offsets is None:
        return cdiv(queries, BM), 1
    sequences = offsets.numel() - 1
    return queries // BM + sequences, sequences


def row_for(kernel: str, qkv: Tensor, queries: int, extra: bool) -> configs.Row:
    """The launch table's row; `extra`: with a bias or dropout.

    `programs` is how many there are with 128 rows each; `waste` how much work, in percent, such
    tiles waste over tiles of 64 (their last one can be half empty).
    """
    B, _, _, H, E = qkv.shape
    waste = 64 * 100 // queries if 0 < queries % 128 <= 64 else 0
    return configs.pick(
        kernel, arch_of(qkv), 8 * qkv.element_size(), E=sum(parts(E)), extra=int(extra),
        programs=B * H * cdiv(queries, 128), waste=waste,
    )  # fmt: skip


def attend(
    qkv: Tensor,
    y: Tensor,
    lse: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    offsets: Tensor | None,
    queries: int,
) -> None:
    """y (B, queries, H, E), and lse (B, H, queries) if given, of the first `queries` rows.

    `queries` is less than S where only a class token's row is wanted; with offsets it is S.
    """
    B, S, _, H, E = qkv.shape
    qkv = by_rows(qkv)
    steps = strides(qkv, 0, 1, 2, 3)
    size = unit(steps)
    b_stride, s_stride, part_stride, h_stride = (step // size for step in steps)
    extra = bias is not None or dropout_p > 0
    row = row_for("attention_forward", qkv, max(queries, 1), extra)
    tiles, sequences = tiles_of(offsets, queries, row.blocks["BM"])
    E1, E2 = parts(E)
    launch(
        attention_forward, (tiles * H * B,), row, writes=("y",) if lse is None else ("y", "lse"),
        qkv=qkv, y=y, lse=lse, offsets=plain(offsets), **bias_arguments(bias),
        **dropout_arguments(dropout_p, seed, offsets, S), b_stride=b_stride, s_stride=s_stride,
        part_stride=part_stride, h_stride=h_stride, sequences=sequences, S=S, queries=queries, H=H,
        tiles=tiles, scale=abs(float(scale)), E=E, E1=E1, E2=E2, UNIT=size, NEGATIVE=scale < 0,
        PRECISION=precision_of(qkv),
    )  # fmt: skip


def forward(n, results, qkv, bias, scale, dropout_p, seed, offsets, save) -> None:
    y, lse = results
    attend(qkv, y, lse if lse.numel() else None, bias, scale, dropout_p, seed, offsets, n["S"])


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    from . import attention_backward  # which uses this file's kernels' parts

    return attention_backward.backward(grad, args, saved, needs)
