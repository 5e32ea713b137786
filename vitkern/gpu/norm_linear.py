"""norm_linear: LayerNorm in a GEMM's prologue, bias, activation and dropout in its epilogue.

Two kernels. As an operator: one pass over x for the row statistics, then a GEMM that normalises x
on its way to the tensor cores. In a plan (inference) LayerNorm is folded into the GEMM,
y = rstd (x W'^T - mean rowsum(W')) + b' with W' = W gamma and b' = b + W beta, and the moments come
from the kernel that wrote x: no pass over x and no prologue at all. Where x has more bits than the
tensor cores take, rounding it would cost mean / sigma times LayerNorm's own error: there the loop,
which has to convert x in any case, multiplies (x - mean) rstd with W'. Where y is qkv of a model
with rotary positions, the epilogue turns its queries and keys as well.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..precision import Precision
from . import gemm, launch, moments, philox, rotary
from .activations import activate
from .elementwise import activation_gradient
from .gemm_backward import input_gradient, weight_gradient
from .layernorm import norm_backward, row_stats


@triton.jit(do_not_specialize=["M", "dropout", "seed"])
def norm_linear_forward(
    x,  # (M, K) by rows
    stats,  # (M, 2) fp32: mean, rstd
    norm_weight,  # (K,)
    norm_bias,  # (K,)
    weight,  # (N, K)
    bias,  # (N,) or None
    y,  # (M, N)
    pre,  # (M, N) before the activation, or None
    seed,  # (1,) int64: dropout after the activation, or None
    M, N, K, x_stride,
    dropout,  # (threshold, scale)
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    rows, columns, block_n = gemm.own_tile(M, N, BM, BN, GROUP)
    out = gemm.normalised_matmul(
        x, stats, norm_weight, norm_bias, weight, rows, columns, M, N, K, x_stride,
        EVEN, PRECISION, BM, BN, BK,
    )  # fmt: skip
    if bias is not None:
        out += gemm.channel(bias, columns, N)
    at, mask = gemm.elements_of(rows, columns, M, N)
    if pre is not None:
        tl.store(pre + at, out.to(pre.dtype.element_ty), mask=mask)
    out = activate(out, ACTIVATION)
    if seed is not None:
        limit, keep_scale = dropout
        kept = philox.keep_tile(seed, rows, block_n * BN, N, limit, philox.HIDDEN, BN, QUADS)
        out = tl.where(kept, out * keep_scale, 0.0)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "S"])
def folded_linear_forward(
    x,  # (M, K) by rows
    parts,  # (ceil(K / PART), M, 2) fp32: moments of x
    weight,  # (N, K): W gamma
    sums,  # (N,) fp32: row sums of it, as it is stored; None: x is normalised before it is rounded
    bias,  # (N,) fp32: b + W beta
    turns,  # (H or 1, S, E) fp32: y is qkv (M, 3, H, E), and this its rotary.by_pairs; or None
    y,  # (M, N)
    M, N, K, S, x_stride, eps,
    HEAD: tl.constexpr, SHARED: tl.constexpr,  # of turns: E, and whether all heads have the same
    PART: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    rows, columns, block_n = gemm.own_tile(M, N, BM, BN, GROUP)
    if sums is None:
        mean, rstd = moments.load(parts, rows, rows < M, M, K, eps, PART)
        out = gemm.matmul(
            x, weight, mean, rstd, rows, columns, M, N, K, x_stride, EVEN, PRECISION, BM, BN, BK
        )
    else:
        out = gemm.matmul(
            x, weight, None, None, rows, columns, M, N, K, x_stride, EVEN, PRECISION, BM, BN, BK
        )
        mean, rstd = moments.load(parts, rows, rows < M, M, K, eps, PART)
        out = rstd[:, None] * (out - mean[:, None] * gemm.channel(sums, columns, N))
    out = activate(out + gemm.channel(bias, columns, N), ACTIVATION)
    if turns is not None:
        rotary.store_turned(y, out, turns, rows, block_n, M, N, S, HEAD, SHARED, BM, BN)
    else:
        at, mask = gemm.elements_of(rows, columns, M, N)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


def forward(n, results, x, norm_weight, norm_bias, weight, bias, activation, eps, save) -> None:
    y, stats, pre = results
    stats = row_stats(x, eps, stats if save else None)
    keep_pre = save and activation != "none"
    normalised_linear(
        x, stats, norm_weight, norm_bias, weight, bias, y, pre if keep_pre else None, activation
    )


def normalised_linear(
    x: Tensor,
    stats: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    pre: Tensor | None,
    activation: str,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> None:
    """y = dropout(activation(pre)), pre = layernorm(x) weight^T + bias, for known statistics."""
    (x, x_stride), weight = gemm.rows_of(x), weight.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    row = gemm.tile_for("norm_linear", x, weight, M, N)
    launch.launch(
        norm_linear_forward, gemm.grid(M, N, row), row, ("y", "pre"),
        x=x, stats=stats, norm_weight=gemm.vector(norm_weight), norm_bias=gemm.vector(norm_bias),
        weight=weight, bias=gemm.vector(bias), y=y, pre=pre, seed=seed if dropout_p else None,
        M=M, N=N, K=K, x_stride=x_stride, dropout=philox.limits(dropout_p),
        ACTIVATION=activation, EVEN=gemm.even(K, row), QUADS=N % 4 == 0,
        PRECISION=gemm.precision_of(weight),
    )  # fmt: skip


def fold(
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: Precision,
    rows: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(W gamma as `precision` holds it, its row sums, b + W beta) for x in dtype `rows`.

    In float64, so that W gamma is rounded once. The sums are None, and x is normalised in the loop,
    unless the tensor cores take all bits of x and W gamma, whose products are exact in fp32.
    """
    wide = weight.double()
    scaled = (wide * norm_weight.double()).to(precision.dtype).contiguous()
    exact = rows == precision.dtype != torch.float32
    if precision.name == "tf32":
        scaled, exact = _nearest_tf32(scaled), rows != torch.float32
    shift = wide @ norm_bias.double()
    if bias is not None:
        shift = shift + bias.double()
    return scaled, scaled.double().sum(1).float() if exact else None, shift.float()


def _nearest_tf32(x: Tensor) -> Tensor:
    """As gemm.rounded does it, with the rest cut off; Inf and NaN as they are."""
    nearest = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite(), nearest, x)


def folded_linear(
    x: Tensor,
    parts: Tensor,
    part_width: int,
    weight: Tensor,
    sums: Tensor | None,
    bias: Tensor,
    y: Tensor,
    activation: str,
    eps: float,
    turns: Tensor | None = None,
) -> None:
    """y (M, N) of x (M, K) by rows, whose moments its writer left (see the file's header).

    turns: of rotary.by_pairs, where y is qkv (B, S, 3, H, E).
    """
    x, x_stride = gemm.rows_of(x)
    (M, K), N = x.shape, weight.shape[0]
    row = gemm.tile_for("folded_linear", x, weight, M, N)
    launch.launch(
        folded_linear_forward, gemm.grid(M, N, row), row, ("y",),
        x=x, parts=parts, weight=weight, sums=sums, bias=bias, y=y, M=M, N=N, K=K,
        x_stride=x_stride, eps=eps, PART=part_width, ACTIVATION=activation, EVEN=gemm.even(K, row),
        PRECISION=gemm.precision_of(weight), **rotary.arguments(turns),
    )  # fmt: skip


def backward(grad, args, saved, needs) -> list[Tensor]:
    x, norm_weight, norm_bias, weight, bias, activation, _, _ = args
    stats, pre = saved
    dpre = grad if activation == "none" else activation_gradient(grad, pre, activation)
    names = ("x", "norm_weight", "norm_bias", "weight", "bias")
    grads = normalised_linear_backward(
        dpre, x, stats, norm_weight, norm_bias, weight, bias, needs, names
    )
    return [grads[name] for name in names if name in needs]


def normalised_linear_backward(
    dpre: Tensor,
    x: Tensor,
    stats: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: frozenset[str],
    names: tuple[str, str, str, str, str],
    residual: Tensor | None = None,
) -> dict[str, Any]:
    """Gradients of layernorm(x) weight^T + bias, by `names`; `residual` is added to dx."""
    linear = needs & set(names[3:])
    h = x.new_empty(x.shape, dtype=weight.dtype) if linear else None
    dh, _ = input_gradient(dpre, weight, None)
    grads: dict[str, Any] = {}
    grads |= norm_backward(dh, x, stats, norm_weight, norm_bias, needs, names[:3], residual, h)
    if h is not None:
        dweight, dbias, _ = weight_gradient(dpre, h, weight, bias, None)
        grads |= {names[3]: dweight, names[4]: dbias}
    return grads
