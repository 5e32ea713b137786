"""swiglu: silu(first half) * second half of each row: one read, one write, in both directions."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .activations import activate, derivative
from .gemm import row_for, rows_of


@triton.jit(do_not_specialize=["M"])
def swiglu_forward(
    x,  # (M, 2F) by rows
    y,  # (M, F)
    M, F, x_stride,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (columns < F)[None, :]
    at = x + rows[:, None] * x_stride + columns[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    out = activate(gate, "silu") * value
    tl.store(y + rows[:, None] * F + columns[None, :], out.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def swiglu_backward(
    grad,  # (M, F) by rows
    x,  # (M, 2F) by rows
    dx,  # (M, 2F)
    M, F, grad_stride, x_stride,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (columns < F)[None, :]
    g = tl.load(grad + rows[:, None] * grad_stride + columns[None, :], mask=mask, other=0.0)
    at = x + rows[:, None] * x_stride + columns[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    g = g.to(tl.float32)
    to = dx + rows[:, None] * (2 * F) + columns[None, :]
    tl.store(to, (g * value * derivative(gate, "silu")).to(dx.dtype.element_ty), mask=mask)
    tl.store(to + F, (g * activate(gate, "silu")).to(dx.dtype.element_ty), mask=mask)


def forward(n, results, x) -> None:
    gated(x, results[0])


def gated(x: Tensor, y: Tensor) -> None:
    """y (..., F) of rows x (..., 2F)."""
    rows, stride = rows_of(x)
    M, F = rows.shape[0], rows.shape[1] // 2
    row = row_for("elementwise", x)
    launch.launch(
        swiglu_forward, _grid(M, F, row), row, ("y",), x=rows, y=y, M=M, F=F, x_stride=stride
    )


def backward(grad, args, saved, needs) -> list[Tensor]:
    if "x" not in needs:
        return []
    (x,) = args
    (rows, stride), (grad, grad_stride) = rows_of(x), rows_of(grad)
    M, F = rows.shape[0], rows.shape[1] // 2
    dx, row = x.new_empty(x.shape), row_for("elementwise", x)
    launch.launch(
        swiglu_backward, _grid(M, F, row), row, ("dx",), grad=grad, x=rows, dx=dx, M=M, F=F,
        grad_stride=grad_stride, x_stride=stride,
    )  # fmt: skip
    return [dx]


def _grid(M: int, F: int, row) -> tuple[int, int]:
    return launch.cdiv(M, row.blocks["BM"]), launch.cdiv(F, row.blocks["BN"])
