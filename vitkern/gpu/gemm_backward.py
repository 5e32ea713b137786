"""Gradients of a Linear: dx = G W (no transposes in memory) and dW = G^T x, dbias = sum G.

Where the tiles of dW are too few for a GPU, the rows of G may be split among programs
(tiles.share), each of which leaves its share of dW and dbias in fp32; a second launch sums the
shares in a fixed order and applies LayerScale: with G taken before gamma, dW = gamma G^T x, and
dgamma = rowsum(W * G^T x) + bias * sum G needs nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gemm, launch, philox, tiles
from .activations import activate, derivative


@triton.jit(do_not_specialize=["M", "dropout", "seed"])
def input_gradient_kernel(
    grad,  # (M, N) by rows
    weight,  # (N, K)
    gamma,  # (N,) or None: scales grad
    pre,  # (M, K): dx is multiplied by ACTIVATION'(pre), or None
    dx,  # (M, K)
    hidden,  # (M, K): dropout(ACTIVATION(pre)), or None
    seed,  # (1,) int64: dropout of hidden, or None
    M, N, K, grad_stride,
    dropout,  # (threshold, scale)
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A BM x BN tile of dx; BK is the step along N, the inner axis here."""
    rows, columns, block_k = gemm.own_tile(M, K, BM, BN, GROUP)
    n = tl.arange(0, BK)
    g_at = grad + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * grad_stride + n[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * K + columns[None, :]
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, N, BK):
        if EVEN:
            g, w = tl.load(g_at), tl.load(w_at)
        else:
            live = n < N - start
            g = tl.load(g_at, mask=live[None, :], other=0.0)
            # Columns behind the last are masked: clamped ones would not be seen to be contiguous.
            w = tl.load(w_at, mask=live[:, None] & (columns < K)[None, :], other=0.0)
        if gamma is not None:
            scale = tl.load(gamma + start + n, mask=n < N - start, other=0.0).to(tl.float32)
            g = g.to(tl.float32) * scale[None, :]
        g, w = gemm.rounded(g.to(w.dtype), PRECISION), gemm.rounded(w, PRECISION)
        sums = tl.dot(g, w, sums, input_precision=PRECISION)
        g_at += BK
        w_at += BK * K
    at, mask = gemm.elements_of(rows, columns, M, K)
    if pre is not None:
        x = tl.load(pre + at, mask=mask, other=0.0).to(tl.float32)
        h = activate(x, ACTIVATION)
        if seed is not None:
            limit, keep_scale = dropout
            kept = philox.keep_tile(seed, rows, block_k * BN, K, limit, philox.HIDDEN, BN, QUADS)
            h = tl.where(kept, h * keep_scale, 0.0)
            sums = tl.where(kept, sums * keep_scale, 0.0)
        tl.store(hidden + at, h.to(hidden.dtype.element_ty), mask=mask)
        sums *= derivative(x, ACTIVATION)
    tl.store(dx + at, sums.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "rows_each"])
def weight_gradient_kernel(
    grad,  # (M, N) by rows
    x,  # (M, K) by rows
    weight,  # (N, K): its dtype is the GEMM's
    parts,  # (splits, N, K): fp32 shares, or dW itself
    bias_parts,  # (splits, N), or None
    M, N, K, grad_stride, x_stride, rows_each,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A BM x BN tile of dW (BM of N, BN of K) from rows_each rows; BK rows are one step."""
    n, k, block_k = gemm.own_tile(N, K, BM, BN, GROUP)
    split = tl.program_id(1)
    first = split.to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, M)
    steps = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    bias_sums = tl.zeros((BM,), tl.float32)
    for start in range(first, last, BK):
        rows = start + steps
        live = rows < last
        g_mask, x_mask = live[:, None] & (n < N)[None, :], live[:, None] & (k < K)[None, :]
        g = tl.load(grad + rows[:, None] * grad_stride + n[None, :], mask=g_mask, other=0.0)
        if g.dtype == tl.float32:  # a step between load and transpose keeps the load 128 bits wide
            g = tl.where(g_mask, g, 0.0)
        a = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
        a = gemm.rounded(a.to(weight.dtype.element_ty), PRECISION)
        g = gemm.rounded(g.to(weight.dtype.element_ty), PRECISION)
        sums = tl.dot(tl.trans(g), a, sums, input_precision=PRECISION)
    mask = (n < N)[:, None] & (k < K)[None, :]
    at = (split.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    tl.store(parts + at, sums.to(parts.dtype.element_ty), mask=mask)
    # A loop of its own: in the other one the sum would cost every program.
    if bias_parts is not None and block_k == 0:
        for start in range(first, last, BK):
            rows = start + steps
            g_mask = (rows < last)[:, None] & (n < N)[None, :]
            g = tl.load(grad + rows[:, None] * grad_stride + n[None, :], mask=g_mask, other=0.0)
            bias_sums += tl.sum(g.to(tl.float32), 0)
        bias_at = bias_parts + split.to(tl.int64) * N + n
        tl.store(bias_at, bias_sums.to(bias_parts.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["splits"])
def join_gradients_kernel(
    parts,  # (splits, N, K) fp32
    bias_parts,  # (splits, N) fp32
    weight,  # (N, K)
    bias,  # (N,) or None
    gamma,  # (N,) or None
    dweight,  # (N, K)
    dbias,  # (N,) or None
    dgamma,  # (N,) or None
    N, K, splits,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rows < N
    dot = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for split in range(splits):
        total += tl.load(bias_parts + tl.cast(split, tl.int64) * N + rows, mask=live, other=0.0)
    scale = tl.full((BM,), 1.0, tl.float32)
    if gamma is not None:
        scale = tl.load(gamma + rows, mask=live, other=0.0).to(tl.float32)
    for start in range(0, K, BN):
        columns = start + tl.arange(0, BN)
        mask = live[:, None] & (columns < K)[None, :]
        at = rows.to(tl.int64)[:, None] * K + columns[None, :]
        sums = tl.zeros((BM, BN), tl.float32)
        for split in range(splits):
            sums += tl.load(parts + tl.cast(split, tl.int64) * N * K + at, mask=mask, other=0.0)
        if dgamma is not None:
            w = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
            dot += tl.sum(sums * w, 1)
        sums *= scale[:, None]
        tl.store(dweight + at, sums.to(dweight.dtype.element_ty), mask=mask)
    if dgamma is not None:
        if bias is not None:
            dot += total * tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)
        tl.store(dgamma + rows, dot.to(dgamma.dtype.element_ty), mask=live)
    if dbias is not None:
        tl.store(dbias + rows, (total * scale).to(dbias.dtype.element_ty), mask=live)


def input_gradient(
    grad: Tensor,
    weight: Tensor,
    gamma: Tensor | None,
    dtype: torch.dtype | None = None,
    pre: Tensor | None = None,
    activation: str = "none",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(gamma * grad) weight, (M, K) in `dtype` (weight's if None); and None.

    With `pre` (M, K): the gradient before dropout(activation(pre)), and that `hidden` itself.
    """
    (grad, grad_stride), weight = gemm.rows_of(grad), weight.contiguous()
    (M, N), K = grad.shape, weight.shape[1]
    dx = grad.new_empty(M, K, dtype=dtype or weight.dtype)
    hidden = None if pre is None else torch.empty_like(dx)
    row = gemm.tile_for("input_gradient", grad, weight, M, K)
    launch.launch(
        input_gradient_kernel, gemm.grid(M, K, row), row, ("dx", "hidden"),
        grad=grad, weight=weight, gamma=gemm.vector(gamma), pre=pre, dx=dx, hidden=hidden,
        seed=seed if dropout_p else None, M=M, N=N, K=K, grad_stride=grad_stride,
        dropout=philox.limits(dropout_p),
        ACTIVATION=activation, EVEN=gemm.even(N, row) and K % row.blocks["BN"] == 0,
        QUADS=K % 4 == 0, PRECISION=gemm.precision_of(weight),
    )  # fmt: skip
    return dx, hidden


def weight_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dweight, dbias, dgamma) of gamma * (x weight^T + bias); None for what the layer lacks."""
    (grad, grad_stride), (x, x_stride) = gemm.rows_of(grad), gemm.rows_of(x)
    weight, bias, gamma = weight.contiguous(), gemm.vector(bias), gemm.vector(gamma)
    (M, N), K = grad.shape, x.shape[1]
    row, splits = shared = gemm.shares_for(grad, weight, M)
    dweight = torch.empty_like(weight)
    dbias, dgamma = (None if t is None else t.new_empty(t.shape) for t in (bias, gamma))
    whole = splits == 1 and gamma is None
    parts, bias_parts = dweight, dbias
    if not whole:
        parts = grad.new_empty(splits, N, K, dtype=torch.float32)
        bias_parts = grad.new_empty(splits, N, dtype=torch.float32)
    launch.launch(
        weight_gradient_kernel, (*gemm.grid(N, K, row), splits), row, ("parts", "bias_parts"),
        grad=grad, x=x, weight=weight, parts=parts, bias_parts=bias_parts, M=M, N=N, K=K,
        grad_stride=grad_stride, x_stride=x_stride, rows_each=tiles.rows_each(M, shared),
        PRECISION=gemm.precision_of(weight),
    )  # fmt: skip
    if not whole:
        row = gemm.row_for("join_gradients", weight)
        launch.launch(
            join_gradients_kernel, (launch.cdiv(N, row.blocks["BM"]),), row,
            ("dweight", "dbias", "dgamma"),
            parts=parts, bias_parts=bias_parts, weight=weight, bias=bias, gamma=gamma,
            dweight=dweight, dbias=dbias, dgamma=dgamma, N=N, K=K, splits=splits,
        )  # fmt: skip
    return dweight, dbias, dgamma
