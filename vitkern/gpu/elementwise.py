"""Gradients that pass through masks and activations alone: one read, one write.

Where a GEMM follows or precedes, the same is done in its epilogue instead (gemm_backward.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, philox
from .activations import derivative
from .gemm import row_for, rows_of


@triton.jit(do_not_specialize=["M", "S", "dropout", "drop_path", "element_seed", "path_seed"])
def masked_gradient_kernel(
    grad,  # (M, N) by rows
    out,  # (M, N)
    element_seed,  # (1,) int64 or None
    path_seed,  # (1,) int64 or None
    M, N, S, grad_stride,
    dropout, drop_path,  # (threshold, scale) each
    QUADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    g = tl.load(grad + rows[:, None] * grad_stride + columns[None, :], mask=mask, other=0.0)
    g = g.to(tl.float32)
    if path_seed is not None:
        path_limit, path_scale = drop_path
        kept = philox.keep(path_seed, rows // S, path_limit, philox.PATH)
        g = tl.where(kept[:, None], g * path_scale, 0.0)
    if element_seed is not None:
        limit, keep_scale = dropout
        first = tl.program_id(1) * BN
        kept = philox.keep_tile(element_seed, rows, first, N, limit, philox.ELEMENTS, BN, QUADS)
        g = tl.where(kept, g * keep_scale, 0.0)
    tl.store(out + rows[:, None] * N + columns[None, :], g.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def activation_gradient_kernel(
    grad,  # (M, N) by rows
    pre,  # (M, N)
    out,  # (M, N)
    M, N, grad_stride,
    ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    g = tl.load(grad + rows[:, None] * grad_stride + columns[None, :], mask=mask, other=0.0)
    x = tl.load(pre + at, mask=mask, other=0.0).to(tl.float32)
    g = g.to(tl.float32) * derivative(x, ACTIVATION)
    tl.store(out + at, g.to(out.dtype.element_ty), mask=mask)


def masked_gradient(
    grad: Tensor, dtype: torch.dtype, dropout_p: float, drop_path_p: float, seed: Tensor | None
) -> Tensor:
    """Gradient (B, S, N) before dropout and drop-path, in `dtype`; grad itself without masks."""
    if not (dropout_p or drop_path_p):
        return grad
    S = grad.shape[1]
    rows, stride = rows_of(grad)
    out = grad.new_empty(grad.shape, dtype=dtype)
    _launch(
        masked_gradient_kernel, grad=rows, out=out,
        element_seed=seed if dropout_p else None, path_seed=seed if drop_path_p else None,
        S=S, grad_stride=stride, dropout=philox.limits(dropout_p),
        drop_path=philox.limits(drop_path_p), QUADS=grad.shape[-1] % 4 == 0,
    )  # fmt: skip
    return out


def activation_gradient(grad: Tensor, pre: Tensor, activation: str) -> Tensor:
    """grad * activation'(pre), in pre's dtype."""
    rows, stride = rows_of(grad)
    out = torch.empty_like(pre)
    _launch(
        activation_gradient_kernel, grad=rows, pre=pre, out=out, grad_stride=stride,
        ACTIVATION=activation,
    )  # fmt: skip
    return out


def _launch(kernel, grad: Tensor, out: Tensor, **arguments) -> None:
    M, N = grad.shape
    row = row_for("elementwise", out)
    grid = (launch.cdiv(M, row.blocks["BM"]), launch.cdiv(N, row.blocks["BN"]))
    launch.launch(kernel, grid, row, ("out",), grad=grad, out=out, M=M, N=N, **arguments)
