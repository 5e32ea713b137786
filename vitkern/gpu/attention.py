"""attention: y = dropout(softmax(q k^T * scale + bias)) v; one read of q, k and v, one write of y.

Flash attention: a program holds BM queries of one head and walks over its keys in tiles of BN with
an online softmax, so the S x S scores are never stored. Full tiles have no masks; the rest of the
keys go in tiles of BT. A head of E channels is held as E1 + E2 (80 = 64 + 16): padding it to the
next power of two would cost up to twice the work and the registers. Exponentials are powers of two
with log2(e) in the scale, so that a score costs one FMA and one EX2.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import configs, heads, philox
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
def own_tile(tiles, offsets, S, queries, BM: tl.constexpr):
    """(head of the B * H, first row, end of rows, first key, end of keys) of this program's tile.

    `tiles` is (tiles of a head, sequences), as tiles_of counts them.
    """
    each, sequences = tiles
    head = (tl.program_id(0) // each).to(tl.int64)
    row, rows_end, begin, end = span(tl.program_id(0) % each, offsets, sequences, S, queries, BM)
    return head, row, rows_end, begin, end


@triton.jit
def parts_of(qkv, strides, b, h, UNIT: tl.constexpr):
    """Where head h of sample b has its q, k and v, and the stride between their rows."""
    b_stride, s_stride, part_stride, h_stride = strides
    part = part_stride.to(tl.int64) * UNIT
    q_at = qkv + (b * b_stride + h * h_stride) * UNIT
    k_at = q_at + part
    return q_at, k_at, k_at + part, s_stride * UNIT


@triton.jit
def load_keys(
    k_at, v_at, stride, first, end,
    HEAD: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(k, v, which of them are live): N keys from `first` on; MASK: only the live ones."""
    n = tl.arange(0, N)
    live = n < end - first
    ahead = tl.cast(first, tl.int64) * stride
    k = heads.load(k_at + ahead, n, stride, live, HEAD, MASK, PRECISION)
    v = heads.load(v_at + ahead, n, stride, live, HEAD, MASK, PRECISION)
    return k, v, live


@triton.jit
def load_bias(at, stride, rows_live, live, BM: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr):
    """(BM, N) in fp32; MASK: only the live ones of the keys."""
    where = at + tl.arange(0, BM)[:, None] * stride + tl.arange(0, N)[None, :]
    mask = rows_live[:, None] & live[None, :] if MASK else rows_live[:, None]
    return tl.load(where, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _step(
    q, state, k_at, v_at, stride, bias_at, bias_stride, rows, first, end, S, scale, seed, limit,
    HEAD: tl.constexpr, BM: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
    QUADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over a tile of N keys from `first` on.

    `state` is (sums of P v, the rows' running maximum and sum), `rows` (head, first row, which are
    live). With a bias scores are natural, else in powers of two.
    """
    sums, top, total = state
    head, row, rows_live = rows
    k, v, live = load_keys(k_at, v_at, stride, first, end, HEAD, N, MASK, PRECISION)
    s = heads.dot(q, k, HEAD, PRECISION)  # (BM, N)
    if bias_at is not None:
        bias = load_bias(bias_at + first, bias_stride, rows_live, live, BM, N, MASK)
        s = tl.fma(s, scale, bias)
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
    if seed is not None:
        index = head * S + row + tl.arange(0, BM)
        keep = philox.keep_tile(seed, index, first, S, limit, philox.ELEMENTS, N, QUADS)
        p = tl.where(keep, p, 0.0)
    p = rounded(p.to(v[0].dtype), PRECISION)
    return heads.add(heads.scaled(sums, decay, HEAD), p, v, HEAD, PRECISION), higher, total


_SIZES = ["strides", "bias_strides", "tiles", "S", "queries", "H", "dropout", "seed"]


@triton.jit(do_not_specialize=_SIZES)
def attention_forward(
    qkv,  # (B, S, 3, H, E) by strides
    bias,  # (B or 1, H or 1, S, S) by bias_strides, or None
    y,  # (B, queries, H, E)
    lse,  # (B, H, queries) fp32: log-sum-exp, or None
    seed,  # (1,) int64, or None: no dropout
    offsets,  # (sequences + 1,) int32, or None: one sequence
    strides,  # of B, S, the three parts and H, in UNITs
    bias_strides,  # of B, H and S, in BIAS_UNITs
    tiles,  # of a head, and sequences
    S, queries, H, scale,
    dropout,  # (threshold, scale)
    HEAD: tl.constexpr, UNIT: tl.constexpr, BIAS_UNIT: tl.constexpr, NEGATIVE: tl.constexpr,
    QUADS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    head, row, rows_end, begin, end = own_tile(tiles, offsets, S, queries, BM)
    b, h = head // H, head % H
    q_at, k_at, v_at, stride = parts_of(qkv, strides, b, h, UNIT)
    limit, keep_scale = dropout
    m = tl.arange(0, BM)
    live = m < rows_end - row
    row64 = tl.cast(row, tl.int64)
    q = heads.load(q_at + row64 * stride, m, stride, live, HEAD, True, PRECISION)
    if NEGATIVE:  # `scale` is positive, so that the largest q k^T has the largest score
        q = -q[0], -q[1]
    bias_b, bias_h, bias_s = bias_strides
    bias_at = None
    if bias is not None:
        bias_at = bias + (b * bias_b + h * bias_h + row64 * bias_s) * BIAS_UNIT
    factor = scale if bias is not None else scale * LOG2E
    sums = heads.zeros(BM, HEAD)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    full = begin + (end - begin) // BN * BN
    for first in range(begin, full, BN):
        sums, top, total = _step(
            q, (sums, top, total), k_at, v_at, stride, bias_at, bias_s * BIAS_UNIT,
            (head, row, live), first, end, S, factor, seed, limit,
            HEAD, BM, BN, False, QUADS, PRECISION,
        )  # fmt: skip
    for first in tl.range(full, end, BT, num_stages=1):
        sums, top, total = _step(
            q, (sums, top, total), k_at, v_at, stride, bias_at, bias_s * BIAS_UNIT,
            (head, row, live), first, end, S, factor, seed, limit,
            HEAD, BM, BT, True, QUADS, PRECISION,
        )  # fmt: skip
    if lse is not None:
        if bias is None:
            top *= LN2
        level = tl.where(top == float("inf"), top, top + tl.log(total))  # total is NaN there
        tl.store(lse + head * queries + row + m, level, mask=live)
    share = 1.0 / total
    if seed is not None:
        share *= keep_scale
    width = H * HEAD[0]
    y_at = y + ((b * queries + row64) * H + h) * HEAD[0]
    heads.store(y_at, m, width, live, heads.scaled(sums, share, HEAD), HEAD)


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


def in_units(steps: list[int], size: int) -> tuple[int, ...]:
    return tuple(step // size for step in steps)


def bias_arguments(bias: Tensor | None) -> dict[str, Any]:
    """bias (B or 1, H or 1, S, S) in place, with a stride of 0 along an axis it is broadcast."""
    if bias is None:
        return dict(bias=None, bias_strides=(0, 0, 0), BIAS_UNIT=1)
    if bias.stride(3) != 1 and bias.shape[3] > 1:
        bias = bias.contiguous()
    steps = strides(bias, 0, 1, 2)
    size = unit(steps)
    return dict(bias=bias, bias_strides=in_units(steps, size), BIAS_UNIT=size)


def plain(offsets: Tensor | None) -> Tensor | None:
    return None if offsets is None else offsets.contiguous()


def dropout_arguments(
    p: float, seed: Tensor | None, offsets: Tensor | None, S: int
) -> dict[str, Any]:
    return dict(
        seed=seed if p else None,
        dropout=philox.limits(p),
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
    extra = bias is not None or dropout_p > 0
    row = row_for("attention_forward", qkv, max(queries, 1), extra)
    tiles = tiles_of(offsets, queries, row.blocks["BM"])
    launch(
        attention_forward, (tiles[0] * H * B,), row, writes=("y",) if lse is None else ("y", "lse"),
        qkv=qkv, y=y, lse=lse, offsets=plain(offsets), **bias_arguments(bias),
        **dropout_arguments(dropout_p, seed, offsets, S), strides=in_units(steps, size),
        tiles=tiles, S=S, queries=queries, H=H, scale=abs(float(scale)), HEAD=(E, *parts(E)),
        UNIT=size, NEGATIVE=scale < 0, PRECISION=precision_of(qkv),
    )  # fmt: skip


def forward(n, results, qkv, bias, scale, dropout_p, seed, offsets, save) -> None:
    y, lse = results
    attend(qkv, y, lse if lse.numel() else None, bias, scale, dropout_p, seed, offsets, n["S"])


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    from . import attention_backward  # which uses this file's kernels' parts

    return attention_backward.backward(grad, args, saved, needs)
