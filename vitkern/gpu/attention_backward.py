"""attention's gradients from its log-sum-exp: nothing S x S is stored, no sum depends on timing.

With P = exp(scores - lse), dP = dropout(dy v^T) and delta = rowsum(P dP), dscores = P (dP - delta).
Three kernels, each with its tile of results in registers and one walk over the other axis:
  queries  delta and dq = scale (sum_j P dP k_j - delta sum_j P k_j), in one walk over the keys
  keys     dv = sum_i dropout(P) dy_i and dk = scale sum_i dscores q_i, in one walk over the queries
  bias     dscores, summed over the axes along which the bias was broadcast
delta is the row sum itself and not dy y^T: y is not kept for the backward. The first walk takes
dP - guess for dP, guess being the mean of dP over the first keys, so that what is common to a row
of dP is gone before anything is rounded. In fp32, and with a bias, P is divided by its own row sum
(`shares` are the reciprocals): lse has 24 bits, and those in front of its point are missing behind
it, which with scores of 50 made gradients seven times less exact than torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import attention, philox
from .attention import LOG2E, load_tile, span, store_tile
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
def _queries_step(
    q1, q2, dy1, dy2, lse, guess, dsum1, dsum2, psum1, psum2, delta, norm, k_at, v_at, stride,
    bias_at, bias_row, row, rows_live, first, end, S, scale, seed, limit, keep_scale, head,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BM: tl.constexpr, N: tl.constexpr,
    MASK: tl.constexpr, WRITES: tl.constexpr, SHARES: tl.constexpr, DROP: tl.constexpr,
    QUADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of N keys from `first` on."""
    n = tl.arange(0, N)
    live = n < end - first
    ahead = tl.cast(first, tl.int64) * stride
    k1 = load_tile(k_at + ahead, n, stride, live, 0, E1, E, MASK, PRECISION)
    v1 = load_tile(v_at + ahead, n, stride, live, 0, E1, E, MASK, PRECISION)
    s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)  # (BM, N)
    dp = tl.dot(dy1, tl.trans(v1), input_precision=PRECISION)
    if E2 > 0:
        k2 = load_tile(k_at + ahead, n, stride, live, E1, E2, E, MASK, PRECISION)
        v2 = load_tile(v_at + ahead, n, stride, live, E1, E2, E, MASK, PRECISION)
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
        dp = tl.dot(dy2, tl.trans(v2), dp, input_precision=PRECISION)
    if bias_at is not None:
        at = bias_at + first + tl.arange(0, BM)[:, None] * bias_row + n[None, :]
        mask = rows_live[:, None] & live[None, :] if MASK else rows_live[:, None]
        bias = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        p = _power(s, bias, lse[:, None], scale, True)
    else:
        p = _power(s, 0.0, lse[:, None], scale, False)
    if MASK:
        p = tl.where(live[None, :], p, 0.0)
    if DROP:
        rows = head * S + row + tl.arange(0, BM)
        keep = philox.keep_tile(seed, rows, first, S, limit, philox.ELEMENTS, N, QUADS)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - guess[:, None])
    delta += tl.sum(ds, 1)
    if SHARES:
        norm += tl.sum(p, 1)
    if WRITES:
        ds, p = rounded(ds.to(k1.dtype), PRECISION), rounded(p.to(k1.dtype), PRECISION)
        dsum1 = tl.dot(ds, k1, dsum1, input_precision=PRECISION)
        psum1 = tl.dot(p, k1, psum1, input_precision=PRECISION)
        if E2 > 0:
            dsum2 = tl.dot(ds, k2, dsum2, input_precision=PRECISION)
            psum2 = tl.dot(p, k2, psum2, input_precision=PRECISION)
    return dsum1, dsum2, psum1, psum2, delta, norm


_SIZES = [
    "sequences", "S", "H", "tiles", "b_stride", "s_stride", "part_stride", "h_stride", "dy_b",
    "dy_s", "dy_h", "bias_b", "bias_h", "bias_s", "limit",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def attention_backward_queries(
    qkv, bias, dy, lse, seed, offsets, dqkv, delta, shares,
    b_stride, s_stride, part_stride, h_stride, dy_b, dy_s, dy_h, bias_b, bias_h, bias_s,
    sequences, S, H, tiles, scale, limit, keep_scale,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, UNIT: tl.constexpr,
    BIAS_UNIT: tl.constexpr, DROP: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """dq, into dqkv (B, S, 3, H, E) unless it is None, and delta (B, H, S)."""
    head = (tl.program_id(0) // tiles).to(tl.int64)  # of the B * H
    b, h = head // H, head % H
    row, rows_end, begin, end = span(tl.program_id(0) % tiles, offsets, sequences, S, S, BM)
    m = tl.arange(0, BM)
    live = m < rows_end - row
    row64 = tl.cast(row, tl.int64)
    stride, dy_stride = s_stride * UNIT, dy_s * UNIT
    q_at = qkv + (b * b_stride + h * h_stride) * UNIT
    k_at = q_at + part_stride.to(tl.int64) * UNIT
    v_at = k_at + part_stride.to(tl.int64) * UNIT
    dy_at = dy + (b * dy_b + h * dy_h + row64 * dy_s) * UNIT
    q1 = load_tile(q_at + row64 * stride, m, stride, live, 0, E1, E, True, PRECISION)
    dy1 = load_tile(dy_at, m, dy_stride, live, 0, E1, E, True, PRECISION)
    q2, dy2 = q1, dy1
    if E2 > 0:
        q2 = load_tile(q_at + row64 * stride, m, stride, live, E1, E2, E, True, PRECISION)
        dy2 = load_tile(dy_at, m, dy_stride, live, E1, E2, E, True, PRECISION)
    guess = tl.zeros((BM,), tl.float32)
    if not DROP:  # what dropout leaves of dP has no common part
        n = tl.arange(0, BT)
        keys = n < end - begin
        at = v_at + tl.cast(begin, tl.int64) * stride
        v = load_tile(at, n, stride, keys, 0, E1, E, True, PRECISION)
        dp = tl.dot(dy1, tl.trans(v), input_precision=PRECISION)
        if E2 > 0:
            v = load_tile(at, n, stride, keys, E1, E2, E, True, PRECISION)
            dp = tl.dot(dy2, tl.trans(v), dp, input_precision=PRECISION)
        guess = tl.sum(dp, 1) / tl.maximum(tl.minimum(end - begin, BT), 1)
    level = tl.load(lse + head * S + row + m, mask=live, other=0.0)
    bias_at = None
    if bias is not None:
        bias_at = bias + (b * bias_b + h * bias_h + row64 * bias_s) * BIAS_UNIT
        factor = scale
    else:
        level *= LOG2E
        factor = scale * LOG2E
    WRITES: tl.constexpr = dqkv is not None
    SHARES: tl.constexpr = shares is not None
    dsum1, psum1 = tl.zeros((BM, E1), tl.float32), tl.zeros((BM, E1), tl.float32)
    dsum2 = tl.zeros((BM, E2 if E2 > 0 else 16), tl.float32)
    psum2 = tl.zeros((BM, E2 if E2 > 0 else 16), tl.float32)
    rest, norm = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)  # delta - guess, sum P
    full = begin + (end - begin) // BN * BN
    for first in range(begin, full, BN):
        dsum1, dsum2, psum1, psum2, rest, norm = _queries_step(
            q1, q2, dy1, dy2, level, guess, dsum1, dsum2, psum1, psum2, rest, norm, k_at, v_at,
            stride, bias_at, bias_s * BIAS_UNIT, row, live, first, end, S, factor, seed, limit,
            keep_scale, head, E, E1, E2, BM, BN, False, WRITES, SHARES, DROP, QUADS, PRECISION,
        )  # fmt: skip
    for first in tl.range(full, end, BT, num_stages=1):
        dsum1, dsum2, psum1, psum2, rest, norm = _queries_step(
            q1, q2, dy1, dy2, level, guess, dsum1, dsum2, psum1, psum2, rest, norm, k_at, v_at,
            stride, bias_at, bias_s * BIAS_UNIT, row, live, first, end, S, factor, seed, limit,
            keep_scale, head, E, E1, E2, BM, BT, True, WRITES, SHARES, DROP, QUADS, PRECISION,
        )  # fmt: skip
    gain = tl.full((BM,), 1.0, tl.float32) * scale
    if SHARES:
        share = 1.0 / norm
        tl.store(shares + head * S + row + m, share, mask=live)
        rest, gain = rest * share, gain * share
    tl.store(delta + head * S + row + m, guess + rest, mask=live)
    if WRITES:
        rest, gain = rest[:, None], gain[:, None]
        dq_at, width = dqkv + ((b * S + row64) * 3 * H + h) * E, 3 * H * E
        store_tile(dq_at, m, width, live, (dsum1 - rest * psum1) * gain, 0, E1, E)
        if E2 > 0:
            store_tile(dq_at, m, width, live, (dsum2 - rest * psum2) * gain, E1, E2, E)


@triton.jit
def _keys_step(
    k1, k2, v1, v2, dk1, dk2, dv1, dv2, q_at, stride, dy_at, dy_stride, bias_at, bias_row, lse_at,
    delta_at, shares_at, key, keys_live, first, end, S, scale, seed, limit, keep_scale, head,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BM: tl.constexpr, N: tl.constexpr,
    MASK: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of N queries from `first` on; scores and probabilities are transposed, (BM, N)."""
    n = tl.arange(0, N)
    live = n < end - first
    first64 = tl.cast(first, tl.int64)
    q1 = load_tile(q_at + first64 * stride, n, stride, live, 0, E1, E, MASK, PRECISION)
    dy1 = load_tile(dy_at + first64 * dy_stride, n, dy_stride, live, 0, E1, E, MASK, PRECISION)
    if E2 > 0:
        q2 = load_tile(q_at + first64 * stride, n, stride, live, E1, E2, E, MASK, PRECISION)
        dy2 = load_tile(dy_at + first64 * dy_stride, n, dy_stride, live, E1, E2, E, MASK, PRECISION)
    if MASK:  # a query that is not there: P = 0
        level = tl.load(lse_at + first + n, mask=live, other=float("inf"))
        delta = tl.load(delta_at + first + n, mask=live, other=0.0)
    else:
        level, delta = tl.load(lse_at + first + n), tl.load(delta_at + first + n)
    s = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)
    if E2 > 0:
        s = tl.dot(k2, tl.trans(q2), s, input_precision=PRECISION)
    if bias_at is not None:
        at = bias_at + first64 * bias_row + n[None, :] * bias_row + tl.arange(0, BM)[:, None]
        mask = keys_live[:, None] & live[None, :] if MASK else keys_live[:, None]
        bias = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        p = _power(s, bias, level[None, :], scale, True)
    else:
        p = _power(s, 0.0, (level * LOG2E)[None, :], scale, False)
    if shares_at is not None:
        p *= tl.load(shares_at + first + n, mask=live, other=0.0)[None, :]
    kept = p
    if DROP:
        column = (key + tl.arange(0, BM))[:, None]
        index = (head * S + first + n)[None, :] * S + column  # of (B, H, S, S)
        keep = philox.keep(seed, index, limit, philox.ELEMENTS)
        kept = tl.where(keep, p * keep_scale, 0.0)
    kept = rounded(kept.to(q1.dtype), PRECISION)
    dv1 = tl.dot(kept, dy1, dv1, input_precision=PRECISION)
    if E2 > 0:
        dv2 = tl.dot(kept, dy2, dv2, input_precision=PRECISION)
    dp = tl.dot(v1, tl.trans(dy1), input_precision=PRECISION)
    if E2 > 0:
        dp = tl.dot(v2, tl.trans(dy2), dp, input_precision=PRECISION)
    if DROP:
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = rounded((p * (dp - delta[None, :])).to(q1.dtype), PRECISION)
    dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    if E2 > 0:
        dk2 = tl.dot(ds, q2, dk2, input_precision=PRECISION)
    return dk1, dk2, dv1, dv2


@triton.jit(do_not_specialize=_SIZES)
def attention_backward_keys(
    qkv, bias, dy, lse, delta, shares, seed, offsets, dqkv,
    b_stride, s_stride, part_stride, h_stride, dy_b, dy_s, dy_h, bias_b, bias_h, bias_s,
    sequences, S, H, tiles, scale, limit, keep_scale,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, UNIT: tl.constexpr,
    BIAS_UNIT: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """dk and dv of BM keys, into dqkv (B, S, 3, H, E)."""
    head = (tl.program_id(0) // tiles).to(tl.int64)  # of the B * H
    b, h = head // H, head % H
    key, keys_end, begin, end = span(tl.program_id(0) % tiles, offsets, sequences, S, S, BM)
    m = tl.arange(0, BM)
    live = m < keys_end - key
    key64 = tl.cast(key, tl.int64)
    stride, dy_stride = s_stride * UNIT, dy_s * UNIT
    q_at = qkv + (b * b_stride + h * h_stride) * UNIT
    k_at = q_at + (part_stride.to(tl.int64) + key64 * s_stride) * UNIT
    v_at = k_at + part_stride.to(tl.int64) * UNIT
    dy_at = dy + (b * dy_b + h * dy_h) * UNIT
    k1 = load_tile(k_at, m, stride, live, 0, E1, E, True, PRECISION)
    v1 = load_tile(v_at, m, stride, live, 0, E1, E, True, PRECISION)
    k2, v2 = k1, v1
    if E2 > 0:
        k2 = load_tile(k_at, m, stride, live, E1, E2, E, True, PRECISION)
        v2 = load_tile(v_at, m, stride, live, E1, E2, E, True, PRECISION)
    bias_at = None
    if bias is not None:
        bias_at = bias + (b * bias_b + h * bias_h) * BIAS_UNIT + key
    factor = scale if bias is not None else scale * LOG2E
    lse_at, delta_at, shares_at = lse + head * S, delta + head * S, None
    if shares is not None:
        shares_at = shares + head * S
    dk1, dv1 = tl.zeros((BM, E1), tl.float32), tl.zeros((BM, E1), tl.float32)
    dk2 = tl.zeros((BM, E2 if E2 > 0 else 16), tl.float32)
    dv2 = tl.zeros((BM, E2 if E2 > 0 else 16), tl.float32)
    full = begin + (end - begin) // BN * BN
    for first in range(begin, full, BN):
        dk1, dk2, dv1, dv2 = _keys_step(
            k1, k2, v1, v2, dk1, dk2, dv1, dv2, q_at, stride, dy_at, dy_stride, bias_at,
            bias_s * BIAS_UNIT, lse_at, delta_at, shares_at, key, live, first, end, S, factor,
            seed, limit, keep_scale, head, E, E1, E2, BM, BN, False, DROP, PRECISION,
        )  # fmt: skip
    for first in tl.range(full, end, BT, num_stages=1):
        dk1, dk2, dv1, dv2 = _keys_step(
            k1, k2, v1, v2, dk1, dk2, dv1, dv2, q_at, stride, dy_at, dy_stride, bias_at,
            bias_s * BIAS_UNIT, lse_at, delta_at, shares_at, key, live, first, end, S, factor,
            seed, limit, keep_scale, head, E, E1, E2, BM, BT, True, DROP, PRECISION,
        )  # fmt: skip
    dk_at = dqkv + (((b * S + key64) * 3 + 1) * H + h) * E
    dv_at, width = dk_at + H * E, 3 * H * E
    store_tile(dk_at, m, width, live, dk1 * scale, 0, E1, E)
    store_tile(dv_at, m, width, live, dv1, 0, E1, E)
    if E2 > 0:
        store_tile(dk_at, m, width, live, dk2 * scale, E1, E2, E)
        store_tile(dv_at, m, width, live, dv2, E1, E2, E)


@triton.jit(do_not_specialize=[*_SIZES, "HB", "h_count", "repeats"])
def attention_backward_bias(
    qkv, bias, dy, lse, delta, shares, seed, dbias,
    b_stride, s_stride, part_stride, h_stride, dy_b, dy_s, dy_h, bias_b, bias_h, bias_s,
    S, H, HB, tiles, h_count, repeats, scale, limit, keep_scale,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, UNIT: tl.constexpr,
    BIAS_UNIT: tl.constexpr, DROP: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of dbias (B or 1, HB, S, S): dscores of `repeats` heads, h_count of each sample."""
    across = tl.cdiv(S, BN)
    tile = tl.program_id(0) % tiles
    kept = (tl.program_id(0) // tiles).to(tl.int64)  # of the bias' samples and heads
    row, key = tile // across * BM, tile % across * BN
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    rows_live, keys_live = m < S - row, n < S - key
    live = rows_live[:, None] & keys_live[None, :]
    row64, key64 = row.to(tl.int64), key.to(tl.int64)
    at = (kept // HB * bias_b + kept % HB * bias_h + row64 * bias_s) * BIAS_UNIT + key
    at = bias + at + m[:, None] * (bias_s * BIAS_UNIT) + n[None, :]
    shift = tl.load(at, mask=live, other=0.0).to(tl.float32)
    stride, dy_stride = s_stride * UNIT, dy_s * UNIT
    part = part_stride.to(tl.int64)
    sums = tl.zeros((BM, BN), tl.float32)
    for i in range(repeats):
        b, h = kept // HB + i // h_count, kept % HB + i % h_count
        q_at = qkv + (b * b_stride + h * h_stride + row64 * s_stride) * UNIT
        k_at = qkv + (b * b_stride + h * h_stride + part + key64 * s_stride) * UNIT
        v_at = k_at + part * UNIT
        dy_at = dy + (b * dy_b + h * dy_h + row64 * dy_s) * UNIT
        q = load_tile(q_at, m, stride, rows_live, 0, E1, E, True, PRECISION)
        k = load_tile(k_at, n, stride, keys_live, 0, E1, E, True, PRECISION)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BM, BN)
        g = load_tile(dy_at, m, dy_stride, rows_live, 0, E1, E, True, PRECISION)
        v = load_tile(v_at, n, stride, keys_live, 0, E1, E, True, PRECISION)
        dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        if E2 > 0:
            q = load_tile(q_at, m, stride, rows_live, E1, E2, E, True, PRECISION)
            k = load_tile(k_at, n, stride, keys_live, E1, E2, E, True, PRECISION)
            s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
            g = load_tile(dy_at, m, dy_stride, rows_live, E1, E2, E, True, PRECISION)
            v = load_tile(v_at, n, stride, keys_live, E1, E2, E, True, PRECISION)
            dp = tl.dot(g, tl.trans(v), dp, input_precision=PRECISION)
        rows = (b * H + h) * S + row + m  # of (B, H, S)
        level = tl.load(lse + rows, mask=rows_live, other=0.0)[:, None]
        mean = tl.load(delta + rows, mask=rows_live, other=0.0)[:, None]
        if DROP:
            keep = philox.keep_tile(seed, rows, key, S, limit, philox.ELEMENTS, BN, QUADS)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        share = tl.load(shares + rows, mask=rows_live, other=0.0)[:, None]
        sums += _power(s, shift, level, scale, True) * share * (dp - mean)
    at = dbias + (kept * S + row64) * S + key + m[:, None] * S + n[None, :]
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
    steps = [*attention.strides(qkv, 0, 1, 2, 3), *attention.strides(dy, 0, 1, 2)]
    size = attention.unit(steps)
    names = ("b_stride", "s_stride", "part_stride", "h_stride", "dy_b", "dy_s", "dy_h")
    E1, E2 = attention.parts(E)
    given = dict(
        qkv=qkv, dy=dy, lse=lse, delta=delta, shares=shares, S=S, H=H, scale=float(scale), E=E,
        E1=E1, E2=E2, UNIT=size, PRECISION=precision_of(qkv), **attention.bias_arguments(bias),
        **attention.dropout_arguments(p, seed, offsets, S),
        **{name: step // size for name, step in zip(names, steps, strict=True)},
    )  # fmt: skip

    def rowwise(kernel, *writes: str) -> None:
        row = attention.row_for(kernel.__name__, qkv, max(S, 1), bias is not None or p > 0)
        tiles, sequences = attention.tiles_of(offsets, S, row.blocks["BM"])
        launch(
            kernel, (tiles * H * B,), row, writes=writes, offsets=attention.plain(offsets),
            sequences=sequences, tiles=tiles, dqkv=dqkv, **given,
        )  # fmt: skip

    results = {"dqkv": dqkv, "delta": delta, "shares": shares}
    rowwise(attention_backward_queries, *(name for name, t in results.items() if t is not None))
    if dqkv is not None:
        rowwise(attention_backward_keys, "dqkv")
    if dbias is not None:
        row = attention.row_for("attention_backward_bias", qkv, max(S, 1), True)
        tiles = cdiv(S, row.blocks["BM"]) * cdiv(S, row.blocks["BN"])
        BB, HB = bias.shape[:2]
        h_count = H if HB == 1 else 1
        launch(
            attention_backward_bias, (tiles * BB * HB,), row, writes=("dbias",), dbias=dbias,
            HB=HB, tiles=tiles, h_count=h_count, repeats=(B if BB == 1 else 1) * h_count, **given,
        )  # fmt: skip
    return [g for g in (dqkv, dbias) if g is not None]
