"""linear_residual: GEMM with bias, dropout, LayerScale, drop-path and residual in its epilogue.

One launch: reads x, weight and residual, writes y. In a plan it also leaves the moments of y's rows
for the LayerNorm that follows (moments.py).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import gemm, launch, moments, philox
from .elementwise import masked_gradient
from .gemm_backward import input_gradient, weight_gradient


@triton.jit(do_not_specialize=["M", "S", "dropout", "drop_path", "element_seed", "path_seed"])
def linear_residual_forward(
    x,  # (M, K) by rows
    weight,  # (N, K)
    bias,  # (N,) or None
    residual,  # (M, N) by rows
    gamma,  # (N,) or None
    y,  # (M, N)
    parts,  # (ceil(N / WIDTH), M, 2) fp32: moments of y, or None
    element_seed,  # (1,) int64: dropout, or None
    path_seed,  # (1,) int64: drop-path, or None
    M, N, K, S, x_stride, residual_stride,
    dropout, drop_path,  # (threshold, scale) each
    EVEN: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    rows, columns, block_n = gemm.own_tile(M, N, BM, BN, GROUP)
    out = gemm.matmul(
        x, weight, None, None, rows, columns, M, N, K, x_stride, EVEN, PRECISION, BM, BN, BK
    )
    if bias is not None:
        out += gemm.channel(bias, columns, N)
    if element_seed is not None:
        limit, keep_scale = dropout
        kept = philox.keep_tile(
            element_seed, rows, block_n * BN, N, limit, philox.ELEMENTS, BN, QUADS
        )
        out = tl.where(kept, out * keep_scale, 0.0)
    if gamma is not None:
        out *= gemm.channel(gamma, columns, N)
    if path_seed is not None:
        path_limit, path_scale = drop_path
        kept = philox.keep(path_seed, (rows // S).to(tl.int64), path_limit, philox.PATH)
        out = tl.where(kept[:, None], out * path_scale, 0.0)
    # y's offsets after the residual's load: before it they are 12 more spills on sm_90.
    row = rows.to(tl.int64)[:, None]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    at = residual + row * residual_stride + columns[None, :]
    out += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    stored = out.to(y.dtype.element_ty)
    tl.store(y + row * N + columns[None, :], stored, mask=mask)
    if parts is not None:
        moments.store(parts, block_n, rows, rows < M, stored, columns, M, N, BM, BN)


def forward(n, results, x, weight, bias, residual, gamma, dropout_p, drop_path_p, seed) -> None:
    residual_linear(
        x, weight, bias, residual, gamma, results[0], None, dropout_p, drop_path_p, seed, n["S"]
    )


def residual_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gamma: Tensor | None,
    y: Tensor,
    parts: Tensor | None = None,
    dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    seed: Tensor | None = None,
    S: int = 1,
) -> None:
    """y = residual + drop_path(gamma * dropout(x weight^T + bias)); S rows make one sample."""
    (x, x_stride), weight = gemm.rows_of(x), weight.contiguous()
    residual, residual_stride = gemm.rows_of(residual)
    (M, K), N = x.shape, weight.shape[0]
    row = gemm.tile_for("linear_residual", x, weight, M, N)
    launch.launch(
        linear_residual_forward, gemm.grid(M, N, row), row, ("y", "parts"),
        x=x, weight=weight, bias=gemm.vector(bias), residual=residual,
        gamma=gemm.vector(gamma), y=y, parts=parts,
        element_seed=seed if dropout_p else None, path_seed=seed if drop_path_p else None,
        M=M, N=N, K=K, S=S, x_stride=x_stride, residual_stride=residual_stride,
        dropout=philox.limits(dropout_p), drop_path=philox.limits(drop_path_p),
        EVEN=gemm.even(K, row), QUADS=N % 4 == 0, PRECISION=gemm.precision_of(weight),
    )  # fmt: skip


def backward(grad, args, saved, needs) -> list[Tensor]:
    x, weight, bias, _, gamma, dropout_p, drop_path_p, seed = args
    raw = masked_gradient(grad, weight.dtype, dropout_p, drop_path_p, seed)
    grads: dict[str, Any] = {}
    if "x" in needs:
        grads["x"] = input_gradient(raw, weight, gamma, x.dtype)[0].view(x.shape)
    if needs & {"weight", "bias", "gamma"}:
        found = weight_gradient(raw, x, weight, bias, gamma)
        grads |= dict(zip(("weight", "bias", "gamma"), found, strict=True))
    if "residual" in needs:
        grads["residual"] = grad.clone()  # an operator must not return its own argument
    names = ("x", "weight", "bias", "residual", "gamma")
    return [grads[name] for name in names if name in needs]
