"""layernorm: one read and one write of x; a program holds BM whole rows in registers.

The backward reads grad and x once; each program leaves its rows' share of the gradients of weight
and bias in a partial buffer, which a second launch sums in a fixed order. Before a Linear it writes
the normalised rows as well, for the gradient of the Linear's weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, rotary
from .gemm import channel as channels
from .gemm import row_for, rows_of, vector
from .moments import store_row
from .sums import sum_parts

ROWS = 64  # of one backward program: D * 8 bytes of partial sums for every 64 rows of x and grad


@triton.jit(do_not_specialize=["M"])
def layernorm_forward(
    x,  # (M, D) by rows
    weight,  # (D,) or None
    bias,  # (D,) or None
    y,  # (M, D), or None: the statistics alone
    stats,  # (M, 2) fp32 mean and 1 / sqrt(var + eps), or None
    moments,  # (1, M, 2) fp32: those of y, for the LayerNorm that follows (moments.py), or None
    M, D, x_stride, eps,
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BD)
    live, inside = rows < M, columns < D
    mask = live[:, None] & inside[None, :]
    at = rows[:, None] * x_stride + columns[None, :]
    rows_in = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)  # (BM, BD)
    mean = tl.sum(rows_in, 1) / D
    away = tl.where(inside[None, :], rows_in - mean[:, None], 0.0)
    rstd = tl.math.rsqrt(tl.sum(away * away, 1) / D + eps)
    if stats is not None:
        tl.store(stats + rows * 2, mean, mask=live)
        tl.store(stats + rows * 2 + 1, rstd, mask=live)
    if y is not None:
        out = away * rstd[:, None]
        if weight is not None:
            out *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if bias is not None:
            out += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        out = out.to(y.dtype.element_ty)
        tl.store(y + rows[:, None] * D + columns[None, :], out, mask=mask)
        if moments is not None:
            store_row(moments, rows, live, out, inside, D)


@triton.jit(do_not_specialize=["M", "S"])
def heads_norm_forward(
    x,  # (tokens, 3, H, E): packed q, k, v
    q_weight, q_bias, k_weight, k_bias,  # (E,)
    turns,  # (H or 1, S, E) fp32: rotary.by_pairs of rotary positions, or None
    y,  # the same memory as x
    M,  # rows: tokens * 2 * H, the queries and keys of every head
    H, E, S, eps,
    SHARED: tl.constexpr,  # whether all heads turn alike
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BD)
    live, inside = rows < M, columns < E
    mask = live[:, None] & inside[None, :]
    token, head = rows // (2 * H), rows % (2 * H)
    at = ((token * 3 * H + head) * E)[:, None] + columns[None, :]
    rows_in = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)  # (BM, BD)
    mean = tl.sum(rows_in, 1) / E
    away = tl.where(inside[None, :], rows_in - mean[:, None], 0.0)
    rstd = tl.math.rsqrt(tl.sum(away * away, 1) / E + eps)
    is_query = (head < H)[:, None]
    scale = tl.where(is_query, channels(q_weight, columns, E), channels(k_weight, columns, E))
    shift = tl.where(is_query, channels(q_bias, columns, E), channels(k_bias, columns, E))
    out = away * rstd[:, None] * scale + shift
    if turns is not None:
        by = token % S if SHARED else head % H * S + token % S
        angles = tl.load(turns + (by * E)[:, None] + columns[None, :], mask=mask, other=0.0)
        out = rotary.turned(out, angles, BM, BD)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def layernorm_backward(
    grad,  # (M, D) by rows: of y
    x,  # (M, D) by rows
    stats,  # (M, 2)
    weight,  # (D,) or None
    bias,  # (D,) or None
    residual,  # (M, D) by rows, added to dx, or None
    dx,  # (M, D)
    h,  # (M, D): layernorm(x), or None
    parts,  # (2, programs, D) fp32: shares of dweight and dbias, or None
    M, D, grad_stride, x_stride, residual_stride,
    BM: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BD)
    inside = columns < D
    if weight is not None:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((BD,), tl.float32)
    dbias = tl.zeros((BD,), tl.float32)
    for start in range(0, ROWS, BM):
        rows = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, BM)
        live = rows < M
        mask = live[:, None] & inside[None, :]
        g = tl.load(grad + rows[:, None] * grad_stride + columns[None, :], mask=mask, other=0.0)
        g = g.to(tl.float32)  # (BM, BD)
        rows_in = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        mean = tl.load(stats + rows * 2, mask=live, other=0.0)[:, None]
        rstd = tl.load(stats + rows * 2 + 1, mask=live, other=0.0)[:, None]
        xhat = tl.where(mask, (rows_in.to(tl.float32) - mean) * rstd, 0.0)
        if parts is not None:
            dweight += tl.sum(g * xhat, 0)
            dbias += tl.sum(g, 0)
        if h is not None:
            normal = xhat
            if weight is not None:
                normal *= scale
            if bias is not None:
                normal += shift
            at = h + rows[:, None] * D + columns[None, :]
            tl.store(at, normal.to(h.dtype.element_ty), mask=mask)
        if weight is not None:
            g *= scale
        out = rstd * (g - (tl.sum(g, 1) / D)[:, None] - xhat * (tl.sum(g * xhat, 1) / D)[:, None])
        if residual is not None:
            at = residual + rows[:, None] * residual_stride + columns[None, :]
            out += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at = dx + rows[:, None] * D + columns[None, :]
        tl.store(at, out.to(dx.dtype.element_ty), mask=mask)
    if parts is not None:
        program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
        tl.store(parts + program * D + columns, dweight, mask=inside)
        tl.store(parts + (programs + program) * D + columns, dbias, mask=inside)


def forward(n, results, x, weight, bias, eps, save) -> None:
    y, stats = results
    normalise(x, weight, bias, y, eps, stats if save else None)


def row_stats(x: Tensor, eps: float, stats: Tensor | None = None) -> Tensor:
    """Mean and 1 / sqrt(var + eps) of each row: (M, 2) fp32, into `stats` if given."""
    if stats is None:
        stats = x.new_empty(x.shape[:-1].numel(), 2, dtype=torch.float32)
    normalise(x, None, None, None, eps, stats)
    return stats


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    eps: float,
    stats: Tensor | None = None,
    moments: Tensor | None = None,
) -> None:
    """y = layernorm(x); the statistics of x and the moments of y (in one part) where asked for."""
    x, x_stride = rows_of(x)
    M, D = x.shape
    if not D:
        return
    row = row_for("layernorm_forward", x, D=D)
    launch.launch(
        layernorm_forward, (launch.cdiv(M, row.blocks["BM"]),), row, ("y", "stats", "moments"),
        x=x, weight=vector(weight), bias=vector(bias), y=y, stats=stats, moments=moments, M=M, D=D,
        x_stride=x_stride, eps=eps, BD=block(D),
    )  # fmt: skip


def normalise_heads(
    qkv: Tensor,
    q_norm: tuple[Tensor, Tensor],
    k_norm: tuple[Tensor, Tensor],
    eps: float,
    turns: Tensor | None = None,
) -> None:
    """LayerNorm of every head's queries and keys, in place: packed qkv (B, S, 3, H, E).

    turns: of rotary.by_pairs, by which they are turned then.
    """
    B, S, _, H, E = qkv.shape
    M = B * S * 2 * H
    row = row_for("heads_norm", qkv)
    launch.launch(
        heads_norm_forward, (launch.cdiv(M, row.blocks["BM"]),), row, ("y",),
        x=qkv, q_weight=q_norm[0], q_bias=q_norm[1], k_weight=k_norm[0], k_bias=k_norm[1], y=qkv,
        M=M, H=H, E=E, eps=eps, BD=block(E), **rotary.arguments(turns),
    )  # fmt: skip


def block(D: int) -> int:
    """Columns that a program holds: a whole row."""
    return max(16, triton.next_power_of_2(D))


def backward(grad, args, saved, needs) -> list[Tensor]:
    x, weight, bias, _, _ = args
    grads = norm_backward(grad, x, saved[0], weight, bias, needs, ("x", "weight", "bias"))
    return [grads[name] for name in ("x", "weight", "bias") if name in needs]


def norm_backward(
    grad: Tensor,
    x: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: frozenset[str],
    names: tuple[str, str, str],
    residual: Tensor | None = None,
    h: Tensor | None = None,
) -> dict[str, Tensor]:
    """Gradients of x, weight and bias of layernorm(x), by `names`; x's always, others in needs.

    `residual` (in x's shape) is added to dx; layernorm(x) itself is written into `h` if given.
    """
    dx = x.new_empty(x.shape)
    (grad, grad_stride), (x, x_stride) = rows_of(grad), rows_of(x)
    residual, residual_stride = (None, 0) if residual is None else rows_of(residual)
    M, D = x.shape
    programs = launch.cdiv(M, ROWS)
    own = zip(names[1:], (weight, bias), strict=True)
    vectors = {n: v for n, v in own if n in needs and v is not None}
    parts: Any = x.new_empty(2, programs, D, dtype=torch.float32) if vectors else None
    row = row_for("layernorm_backward", x, D=D)
    launch.launch(
        layernorm_backward, (programs,), row, ("dx", "h", "parts"),
        grad=grad, x=x, stats=stats, weight=vector(weight),
        bias=None if h is None else vector(bias), residual=residual, dx=dx, h=h,
        parts=parts, M=M, D=D, grad_stride=grad_stride,
        x_stride=x_stride, residual_stride=residual_stride, BD=block(D), ROWS=ROWS,
    )  # fmt: skip
    grads = {names[0]: dx} | {n: v.new_empty(v.shape) for n, v in vectors.items()}
    if len(vectors) == 2:
        sum_parts(parts, grads[names[1]], grads[names[2]])
    elif vectors:
        (name,) = vectors
        sum_parts(parts[names.index(name) - 1], grads[name])
    return grads
