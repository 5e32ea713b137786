"""Sums of partial results in a fixed order: what atomics would do, but the same in every run."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import configs, launch


@triton.jit(do_not_specialize=["P"])
def sum_parts_kernel(
    parts,  # (P, L) fp32
    out,  # (L,)
    P, L,
    BP: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0).to(tl.int64) * BL + tl.arange(0, BL)
    inside = columns < L
    total = tl.zeros((BL,), tl.float32)
    for start in range(0, P, BP):
        part = start + tl.arange(0, BP)
        mask = (part < P)[:, None] & inside[None, :]
        at = part.to(tl.int64)[:, None] * L + columns[None, :]
        total += tl.sum(tl.load(parts + at, mask=mask, other=0.0), 0)
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, out: Tensor) -> Tensor:
    """out = parts.sum(0) for contiguous parts (P, ...) in fp32; returns out."""
    P, L = parts.shape[0], out.numel()
    row = configs.pick("sum_parts", launch.arch_of(parts), 32)
    launch.launch(
        sum_parts_kernel, (launch.cdiv(L, row.blocks["BL"]),), row, ("out",),
        parts=parts, out=out, P=P, L=L,
    )  # fmt: skip
    return out
