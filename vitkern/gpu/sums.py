"""Sums of partial results in a fixed order: what atomics would do, but the same in every run."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .gemm import row_for


@triton.jit(do_not_specialize=["P"])
def sum_parts_kernel(
    parts,  # (1 or 2, P, L) fp32
    out,  # (L,)
    second,  # (L,) or None: of the other P parts
    P, L,
    BP: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0).to(tl.int64) * BL + tl.arange(0, BL)
    inside = columns < L
    first = tl.program_id(1).to(tl.int64) * P
    total = tl.zeros((BL,), tl.float32)
    for start in range(0, P, BP):
        part = start + tl.arange(0, BP)
        mask = (part < P)[:, None] & inside[None, :]
        at = (first + part)[:, None] * L + columns[None, :]
        total += tl.sum(tl.load(parts + at, mask=mask, other=0.0), 0)
    if tl.program_id(1) == 0:
        tl.store(out + columns, total.to(out.dtype.element_ty), mask=inside)
    elif second is not None:
        tl.store(second + columns, total.to(second.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, out: Tensor, second: Tensor | None = None) -> Tensor:
    """out = parts.sum(0) for contiguous parts (P, ...) in fp32; returns out.

    With `second`: parts (2, P, ...) are summed into both.
    """
    L, P = out.numel(), parts.shape[0 if second is None else 1]
    row = row_for("sum_parts", parts)
    grid = (launch.cdiv(L, row.blocks["BL"]), 1 if second is None else 2)
    launch.launch(
        sum_parts_kernel, grid, row, ("out", "second"),
        parts=parts, out=out, second=second, P=P, L=L,
    )  # fmt: skip
    return out
