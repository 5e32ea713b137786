"""attention's gradients from its log-sum-exp: nothing S x S is stored, no sum depends on timing.

With P = exp(scores - lse), dP = dropout(dy v^T) and delta = rowsum(P dP), dscores = P (dP - delta).
Three kernels, each with its tile of results in registers and one walk over the other axis:
  queries  delta and dq = scale (sum_j P dP k_j - delta sum_j P k_j), in one walk over the keys
  keys     dv = sum_i dropout(P) dy_i and dk = scale sum_i dscores q_i, in one walk over the queries
  bias     dscores, summed over the axes along which the bias was broadcast
delta is the row sum itself and not dy y^T: y is not kept for the backward. The first walk computes
with dP - guess, where guess is the mean of dP over the first keys: what all of a row's dP have in
common is subtracted before anything is rounded.

In fp32, and with a bias, P is also divided by its row sum (`shares` holds the reciprocals). The
reason is lse: an fp32 number near 50 is exact to 2**-19 only, so exp(scores - lse) is off by the
same factor for a whole row, and gradients had seven times torch's error. The row sum has that
factor too, and the division removes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import attention, heads, philox
from .attention import LOG2E, load_bias, load_keys, own_tile, parts_of
from .gemm import precision_of, rounded
from .launch import cdiv, launch


@triton.jit
def _power(s, bias, lse, scale, BIASED: tl.constexpr):
    """P of scores s before their scale; lse is in powers of two unless there is a bias."""
    if BIASED:
        return tl.math.exp2((tl.fma(s, scale, bias) - lse) * LOG2E)
    else:
        return tl.math.exp2(tl.fma(s, scale, -lse))


@triton.jit
def _gradient_of(dy, strides, b, h, UNIT: tl.constexpr):
    """Where the gradient of head h of sample b is, and the stride between its rows."""
    b_stride, s_stride, h_stride = strides
    return dy + (b * b_stride + h * h_stride) * UNIT, s_stride * UNIT


@triton.jit
def _queries_step(
    q, dy, levels, state, k_at, v_at, stride, bias_at, bias_stride, rows, first, end, S, scale,
    seed, dropout,
    HEAD: tl.constexpr, BM: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
    WRITES: tl.constexpr, SHARES: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of N keys from `first` on.

    `levels` are the rows' log-sum-exp and guess, `state` is (sums of P (dP - guess) k, of P k, of
    P (dP - guess), of P), `rows` (head, first row, which are live).
    """
    lse, guess = levels
    dsum, psum, delta, norm = state
    head, row, rows_live = rows
    k, v, live = load_keys(k_at, v_at, stride, first, end, HEAD, N, MASK, PRECISION)
    s = heads.dot(q, k, HEAD, PRECISION)  # (BM, N)
    dp = heads.dot(dy, v, HEAD, PRECISION)
    if bias_at is not None:
        bias = load_bias(bias_at + first, bias_stride, rows_live, live, BM, N, MASK)
        p = _power(s, bias, lse[:, None], scale, True)
    else:
        p = _power(s, 0.0, lse[:, None], scale, False)
    if MASK:
        p = tl.where(live[None, :], p, 0.0)
    if seed is not None:
        limit, keep_scale = dropout
        index = head * S + row + tl.arange(0, BM)
        keep = philox.keep_tile(seed, index, first, S, limit, philox.ELEMENTS, N, QUADS)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - guess[:, None])
    delta += tl.sum(ds, 1)
    if SHARES:
        norm += tl.sum(p, 1)
    if WRITES:
        ds, p = rounded(ds.to(k[0].dtype), PRECISION), rounded(p.to(k[0].dtype), PRECISION)
        dsum = heads.add(dsum, ds, k, HEAD, PRECISION)
        psum = heads.add(psum, p, k, HEAD, PRECISION)
    return dsum, psum, delta, norm


_SIZES = ["strides", "dy_strides", "bias_strides", "tiles", "S", "H", "dropout", "seed"]


@triton.jit(do_not_specialize=_SIZES)
def attention_backward_queries(
    qkv,  # (B, S, 3, H, E) by strides
    bias,  # (B or 1, H or 1, S, S) by bias_strides, or None
    dy,  # (B, S, H, E) by dy_strides
    lse,  # (B, H, S) fp32
    seed,  # (1,) int64, or None: no dropout
    offsets,  # (sequences + 1,) int32, or None: one sequence
    dqkv,  # (B, S, 3, H, E): dq's part is written, or None
    delta,  # (B, H, S) fp32
    shares,  # (B, H, S) fp32, or None
    strides, dy_strides, bias_strides, tiles, S, H, scale, dropout,  # as attention_forward's
    HEAD: tl.constexpr, UNIT: tl.constexpr, BIAS_UNIT: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    head, row, rows_end, begin, end = own_tile(tiles, offsets, S, S, BM)
    b, h = head // H, head % H
    q_at, k_at, v_at, stride = parts_of(qkv, strides, b, h, UNIT)
    dy_at, dy_stride = _gradient_of(dy, dy_strides, b, h, UNIT)
    m = tl.arange(0, BM)
    live = m < rows_end - row
    row64 = tl.cast(row, tl.int64)
    q = heads.load(q_at + row64 * stride, m, stride, live, HEAD, True, PRECISION)
    g = heads.load(dy_at + row64 * dy_stride, m, dy_stride, live, HEAD, True, PRECISION)
    guess = tl.zeros((BM,), tl.float32)
    if seed is None:  # what dropout leaves of dP has no common part
        n = tl.arange(0, BT)
        at = v_at + tl.cast(begin, tl.int64) * stride
        v = heads.load(at, n, stride, n < end - begin, HEAD, True, PRECISION)
        dp = heads.dot(g, v, HEAD, PRECISION)
        guess = tl.sum(dp, 1) / tl.maximum(tl.minimum(end - begin, BT), 1)
    level = tl.load(lse + head * S + row + m, mask=live, other=0.0)
    bias_b, bias_h, bias_s = bias_strides
    bias_at = None
    if bias is not None:
        bias_at = bias + (b * bias_b + h * bias_h + row64 * bias_s) * BIAS_UNIT
        factor = scale
    else:
        level *= LOG2E
        factor = scale * LOG2E
    WRITES: tl.constexpr = dqkv is not None
    SHARES: tl.constexpr = shares is not None
    dsum, psum = heads.zeros(BM, HEAD), heads.zeros(BM, HEAD)
    rest, norm = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)  # delta - guess, sum P
    full = begin + (end - begin) // BN * BN
    for first in range(begin, full, BN):
        dsum, psum, rest, norm = _queries_step(
            q, g, (level, guess), (dsum, psum, rest, norm), k_at, v_at, stride, bias_at,
            bias_s * BIAS_UNIT, (head, row, live), first, end, S, factor, seed, dropout,
            HEAD, BM, BN, False, WRITES, SHARES, QUADS, PRECISION,
        )  # fmt: skip
    for first in tl.range(full, end, BT, num_stages=1):
        dsum, psum, rest, norm = _queries_step(
            q, g, (level, guess), (dsum, psum, rest, norm), k_at, v_at, stride, bias_at,
            bias_s * BIAS_UNIT, (head, row, live), first, end, S, factor, seed, dropout,
            HEAD, BM, BT, True, WRITES, SHARES, QUADS, PRECISION,
        )  # fmt: skip
    gain = tl.full((BM,), 1.0, tl.float32) * scale
    if SHARES:
        share = 1.0 / norm
        tl.store(shares + head * S + row + m, share, mask=live)
        rest, gain = rest * share, gain * share
    tl.store(delta + head * S + row + m, guess + rest, mask=live)
    if WRITES:
        common = heads.scaled(psum, rest, HEAD)
        dq = dsum[0] - common[0], dsum[1] - common[1]
        dq_at = dqkv + ((b * S + row64) * 3 * H + h) * HEAD[0]
        heads.store(dq_at, m, 3 * H * HEAD[0], live, heads.scaled(dq, gain, HEAD), HEAD)


@triton.jit
def _keys_step(
    k, v, state, q_at, stride, dy_at, dy_stride, bias_at, bias_stride, lse_at, delta_at, shares_at,
    keys, first, end, S, scale, seed, dropout,
    HEAD: tl.constexpr, BM: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of N queries from `first` on; scores and probabilities are transposed, (BM, N).

    `state` is (dk / scale, dv) so far, `keys` (head, first key, which are live).
    """
    dk, dv = state
    head, key, keys_live = keys
    n = tl.arange(0, N)
    live = n < end - first
    first64 = tl.cast(first, tl.int64)
    q = heads.load(q_at + first64 * stride, n, stride, live, HEAD, MASK, PRECISION)
    g = heads.load(dy_at + first64 * dy_stride, n, dy_stride, live, HEAD, MASK, PRECISION)
    if MASK:  # a query that is not there: P = 0
        level = tl.load(lse_at + first + n, mask=live, other=float("inf"))
        delta = tl.load(delta_at + first + n, mask=live, other=0.0)
    else:
        level, delta = tl.load(lse_at + first + n), tl.load(delta_at + first + n)
    s = heads.dot(k, q, HEAD, PRECISION)
    if bias_at is not None:
        at = bias_at + first64 * bias_stride + n[None, :] * bias_stride
        at += tl.arange(0, BM)[:, None]
        mask = keys_live[:, None] & live[None, :] if MASK else keys_live[:, None]
        bias = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        p = _power(s, bias, level[None, :], scale, True)
    else:
        p = _power(s, 0.0, (level * LOG2E)[None, :], scale, False)
    if shares_at is not None:
        p *= tl.load(shares_at + first + n, mask=live, other=0.0)[None, :]
    kept = p
    if seed is not None:
        limit, keep_scale = dropout
        column = (key + tl.arange(0, BM))[:, None]
        index = (head * S + first + n)[None, :] * S + column  # of (B, H, S, S)
        keep = philox.keep(seed, index, limit, philox.ELEMENTS)
        kept = tl.where(keep, p * keep_scale, 0.0)
    dv = heads.add(dv, rounded(kept.to(q[0].dtype), PRECISION), g, HEAD, PRECISION)
    dp = heads.dot(v, g, HEAD, PRECISION)
    if seed is not None:
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = rounded((p * (dp - delta[None, :])).to(q[0].dtype), PRECISION)
    return heads.add(dk, ds, q, HEAD, PRECISION), dv


@triton.jit(do_not_specialize=_SIZES)
def attention_backward_keys(
    qkv,  # (B, S, 3, H, E) by strides
    bias,  # (B or 1, H or 1, S, S) by bias_strides, or None
    dy,  # (B, S, H, E) by dy_strides
    lse, delta,  # (B, H, S) fp32
    shares,  # (B, H, S) fp32, or None
    seed,  # (1,) int64, or None: no dropout
    offsets,  # (sequences + 1,) int32, or None: one sequence
    dqkv,  # (B, S, 3, H, E): the parts of dk and dv are written
    strides, dy_strides, bias_strides, tiles, S, H, scale, dropout,  # as attention_forward's
    HEAD: tl.constexpr, UNIT: tl.constexpr, BIAS_UNIT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    head, key, keys_end, begin, end = own_tile(tiles, offsets, S, S, BM)
    b, h = head // H, head % H
    q_at, k_at, v_at, stride = parts_of(qkv, strides, b, h, UNIT)
    dy_at, dy_stride = _gradient_of(dy, dy_strides, b, h, UNIT)
    m = tl.arange(0, BM)
    live = m < keys_end - key
    key64 = tl.cast(key, tl.int64)
    k = heads.load(k_at + key64 * stride, m, stride, live, HEAD, True, PRECISION)
    v = heads.load(v_at + key64 * stride, m, stride, live, HEAD, True, PRECISION)
    bias_b, bias_h, bias_s = bias_strides
    bias_at = None
    if bias is not None:
        bias_at = bias + (b * bias_b + h * bias_h) * BIAS_UNIT + key
    factor = scale if bias is not None else scale * LOG2E
    lse_at, delta_at = lse + head * S, delta + head * S
    shares_at = None
    if shares is not None:
        shares_at = shares + head * S
    dk, dv = heads.zeros(BM, HEAD), heads.zeros(BM, HEAD)
    full = begin + (end - begin) // BN * BN
    for first in range(begin, full, BN):
        dk, dv = _keys_step(
            k, v, (dk, dv), q_at, stride, dy_at, dy_stride, bias_at, bias_s * BIAS_UNIT, lse_at,
            delta_at, shares_at, (head, key, live), first, end, S, factor, seed, dropout,
            HEAD, BM, BN, False, PRECISION,
        )  # fmt: skip
    for first in tl.range(full, end, BT, num_stages=1):
        dk, dv = _keys_step(
            k, v, (dk, dv), q_at, stride, dy_at, dy_stride, bias_at, bias_s * BIAS_UNIT, lse_at,
            delta_at, shares_at, (head, key, live), first, end, S, factor, seed, dropout,
            HEAD, BM, BT, True, PRECISION,
        )  # fmt: skip
    dk_at = dqkv + (((b * S + key64) * 3 + 1) * H + h) * HEAD[0]
    dv_at, width = dk_at + H * HEAD[0], 3 * H * HEAD[0]
    heads.store(dk_at, m, width, live, (dk[0] * scale, dk[1] * scale), HEAD)
    heads.store(dv_at, m, width, live, dv, HEAD)


@triton.jit(do_not_specialize=[*(name for name in _SIZES if name != "H"), "head_counts", "repeats"])
def attention_backward_bias(
    qkv,  # (B, S, 3, H, E) by strides
    bias,  # (B or 1, H or 1, S, S) by bias_strides
    dy,  # (B, S, H, E) by dy_strides
    lse, delta, shares,  # (B, H, S) fp32
    seed,  # (1,) int64, or None: no dropout
    dbias,  # (B or 1, H or 1, S, S)
    strides, dy_strides, bias_strides,  # as attention_forward's
    tiles,  # of an (S, S) matrix
    S,
    head_counts,  # of qkv, and of the bias
    repeats,  # samples and heads that the bias was broadcast over
    scale, dropout,
    HEAD: tl.constexpr, UNIT: tl.constexpr, BIAS_UNIT: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of dbias: dscores, summed over `repeats`."""
    H, HB = head_counts
    across = tl.cdiv(S, BN)
    tile = tl.program_id(0) % tiles
    kept = (tl.program_id(0) // tiles).to(tl.int64)  # of the bias' samples and heads
    row, key = tile // across * BM, tile % across * BN
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    rows_live, keys_live = m < S - row, n < S - key
    row64, key64 = row.to(tl.int64), key.to(tl.int64)
    bias_b, bias_h, bias_s = bias_strides
    at = (kept // HB * bias_b + kept % HB * bias_h + row64 * bias_s) * BIAS_UNIT + key
    shift = load_bias(bias + at, bias_s * BIAS_UNIT, rows_live, keys_live, BM, BN, True)
    samples, each = repeats
    sums = tl.zeros((BM, BN), tl.float32)
    for i in range(samples * each):
        b, h = kept // HB + i // each, kept % HB + i % each
        q_at, k_at, v_at, stride = parts_of(qkv, strides, b, h, UNIT)
        dy_at, dy_stride = _gradient_of(dy, dy_strides, b, h, UNIT)
        q = heads.load(q_at + row64 * stride, m, stride, rows_live, HEAD, True, PRECISION)
        k = heads.load(k_at + key64 * stride, n, stride, keys_live, HEAD, True, PRECISION)
        s = heads.dot(q, k, HEAD, PRECISION)  # (BM, BN)
        g = heads.load(dy_at + row64 * dy_stride, m, dy_stride, rows_live, HEAD, True, PRECISION)
        v = heads.load(v_at + key64 * stride, n, stride, keys_live, HEAD, True, PRECISION)
        dp = heads.dot(g, v, HEAD, PRECISION)
        rows = (b * H + h) * S + row + m  # of (B, H, S)
        level = tl.load(lse + rows, mask=rows_live, other=0.0)[:, None]
        mean = tl.load(delta + rows, mask=rows_live, other=0.0)[:, None]
        if seed is not None:
            limit, keep_scale = dropout
            keep = philox.keep_tile(seed, rows, key, S, limit, philox.ELEMENTS, BN, QUADS)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        share = tl.load(shares + rows, mask=rows_live, other=0.0)[:, None]
        sums += _power(s, shift, level, scale, True) * share * (dp - mean)
    at = dbias + (kept * S + row64) * S + key + m[:, None] * S + n[None, :]
    live = rows_live[:, None] & keys_live[None, :]
    tl.store(at, sums.to(dbias.dtype.element_ty), mask=live)


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    """The gradients of qkv and bias that `needs` names; args are attention's, saved is [lse]."""
    qkv, bias, scale, p, seed, offsets, _ = args
    (lse,) = saved
    B, S, _, H, E = qkv.shape
    dqkv = qkv.new_empty(qkv.shape) if "qkv" in needs else None
    dbias = bias.new_empty(bias.shape) if "bias" in needs else None
    delta = torch.empty_like(lse)
    shares = torch.empty_like(lse) if bias is not None or qkv.dtype == torch.float32 else None
    qkv, dy = attention.by_rows(qkv), attention.by_rows(grad.to(qkv.dtype))
    steps, dy_steps = attention.strides(qkv, 0, 1, 2, 3), attention.strides(dy, 0, 1, 2)
    size = attention.unit(steps + dy_steps)
    given = dict(
        qkv=qkv, dy=dy, lse=lse, delta=delta, shares=shares, S=S, scale=float(scale),
        strides=attention.in_units(steps, size), dy_strides=attention.in_units(dy_steps, size),
        HEAD=(E, *attention.parts(E)), UNIT=size, PRECISION=precision_of(qkv),
        **attention.bias_arguments(bias), **attention.dropout_arguments(p, seed, offsets, S),
    )  # fmt: skip

    def rowwise(kernel, *writes: str) -> None:
        row = attention.row_for(kernel.__name__, qkv, max(S, 1), bias is not None or p > 0)
        tiles = attention.tiles_of(offsets, S, row.blocks["BM"])
        launch(
            kernel, (tiles[0] * H * B,), row, writes=writes, offsets=attention.plain(offsets),
            tiles=tiles, H=H, dqkv=dqkv, **given,
        )  # fmt: skip

    results = {"dqkv": dqkv, "delta": delta, "shares": shares}
    rowwise(attention_backward_queries, *(name for name, t in results.items() if t is not None))
    if dqkv is not None:
        rowwise(attention_backward_keys, "dqkv")
    if dbias is not None:
        row = attention.row_for("attention_backward_bias", qkv, max(S, 1), True)
        tiles = cdiv(S, row.blocks["BM"]) * cdiv(S, row.blocks["BN"])
        BB, HB = bias.shape[:2]
        repeats = (B if BB == 1 else 1, H if HB == 1 else 1)
        launch(
            attention_backward_bias, (tiles * BB * HB,), row, writes=("dbias",), dbias=dbias,
            tiles=tiles, head_counts=(H, HB), repeats=repeats, **given,
        )  # fmt: skip
    return [g for g in (dqkv, dbias) if g is not None]
