"""The GEMM that the operators share: tiles of A (M, K) times W (N, K) transposed.

A program computes a BM x BN tile in BM * BN fp32 accumulators and walks along K in steps of BK.
Rows and columns beyond the matrix are clamped to its last one instead of masked, so that the loop's
loads stay unconditional 128-bit asynchronous copies; the epilogue masks what it stores.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..precision import multiplies_tf32
from . import configs, launch, tiles


@triton.jit
def own_tile(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(rows, columns, column block) of this program's tile of an (M, N) matrix.

    GROUP row blocks run side by side, so that W stays in L2.
    """
    pid = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * blocks_n)
    first = group * GROUP
    size = tl.minimum(blocks_m - first, GROUP)
    inside = pid % (GROUP * blocks_n)
    block_m, block_n = first + inside % size, inside // size
    return block_m * BM + tl.arange(0, BM), block_n * BN + tl.arange(0, BN), block_n


@triton.jit
def elements_of(rows, columns, M, N):
    """Where a tile's elements are in a contiguous (M, N) matrix, and which of them are in it."""
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    return at, (rows < M)[:, None] & (columns < N)[None, :]


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """An operand of tl.dot, to the nearest tf32 where the tensor cores would cut its low bits off.

    Half a unit is added and the rest left to them, as CUTLASS does: half of truncation's error, and
    no bias towards zero. Inf and NaN pass as they are (adding would change what they are).
    """
    if x.dtype == tl.float32 and PRECISION == "tf32":
        nearest = (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(x) < float("inf"), nearest, x)
    return x


@triton.jit
def matmul(
    x, weight, mean, rstd, rows, columns, M, N, K, x_stride,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """x[rows] weight[columns]^T in fp32, (BM, BN): x (M, K) by rows, weight (N, K) contiguous.

    With mean and rstd (BM,), else None, of (x - mean) rstd: before it is cast or rounded.
    """
    k = tl.arange(0, BK)
    x_at = x + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            a, w = tl.load(x_at), tl.load(w_at)
        else:
            live = (k < K - start)[None, :]
            a, w = tl.load(x_at, mask=live, other=0.0), tl.load(w_at, mask=live, other=0.0)
        if mean is not None:
            a = (a.to(tl.float32) - mean[:, None]) * rstd[:, None]
        a, w = rounded(a.to(w.dtype), PRECISION), rounded(w, PRECISION)
        sums = tl.dot(a, tl.trans(w), sums, input_precision=PRECISION)
        x_at += BK
        w_at += BK
    return sums


@triton.jit
def normalised_matmul(
    x, stats, norm_weight, norm_bias, weight, rows, columns, M, N, K, x_stride,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The same with layernorm(x) for x, normalised on its way to the tensor cores."""
    k = tl.arange(0, BK)
    row = tl.minimum(rows, M - 1).to(tl.int64)
    mean, rstd = tl.load(stats + row * 2)[:, None], tl.load(stats + row * 2 + 1)[:, None]
    x_at = x + row[:, None] * x_stride + k[None, :]
    w_at = weight + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    scale_at, shift_at = norm_weight + k, norm_bias + k
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            a, w = tl.load(x_at), tl.load(w_at)
            scale, shift = tl.load(scale_at), tl.load(shift_at)
        else:
            live = k < K - start
            a = tl.load(x_at, mask=live[None, :], other=0.0)
            w = tl.load(w_at, mask=live[None, :], other=0.0)
            scale = tl.load(scale_at, mask=live, other=0.0)
            shift = tl.load(shift_at, mask=live, other=0.0)
        xhat = (a.to(tl.float32) - mean) * rstd
        h = xhat * scale.to(tl.float32)[None, :] + shift.to(tl.float32)[None, :]
        h, w = rounded(h.to(w.dtype), PRECISION), rounded(w, PRECISION)
        sums = tl.dot(h, tl.trans(w), sums, input_precision=PRECISION)
        x_at += BK
        w_at += BK
        scale_at += BK
        shift_at += BK
    return sums


@triton.jit
def channel(vector, columns, N):
    """vector[columns] in fp32 as a row (1, BN); 0 beyond N."""
    return tl.load(vector + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]


def rows_of(t: Tensor) -> tuple[Tensor, int]:
    """t as (M, last axis) with contiguous rows, in place if possible, and its row stride."""
    flat = t.reshape(t.shape[:-1].numel(), t.shape[-1])
    if flat.stride(1) != 1 and flat.shape[1] > 1:
        flat = flat.contiguous()
    return flat, flat.stride(0) if flat.shape[0] > 1 else flat.shape[1]


def vector(t: Tensor | None) -> Tensor | None:
    """A per-channel vector as kernels read it: contiguous, itself where it is that already."""
    return None if t is None else t.contiguous()


def precision_of(weight: Tensor) -> str:
    """tl.dot's input_precision for this weight: what executor, model or torch's switches ask."""
    executor, bits = launch.executor_of(weight), 8 * weight.element_size()
    tf32 = executor.tf32
    if tf32 is None and bits == 32:
        tf32 = multiplies_tf32()
    return configs.dot_precision(executor.arch, bits, bool(tf32))


def row_for(kernel: str, t: Tensor, **sizes: int) -> configs.Row:
    """The launch table's row for a kernel on `t`: a GEMM's weight, else what it reads."""
    return configs.pick(kernel, launch.arch_of(t), 8 * t.element_size(), **sizes)


def tile_for(kernel: str, x: Tensor, weight: Tensor, M: int, N: int) -> configs.Row:
    """The launch table's tile for x times weight with an (M, N) result: see tiles.py."""
    executor, bits, odd = launch.executor_of(weight), _bits(x, weight), is_odd(*weight.shape)
    if executor.tile is not None:
        rows = tiles.fitting(kernel, executor.arch, bits, odd)
        return rows[min(executor.tile, len(rows) - 1)]
    return tiles.choose(kernel, executor.arch, bits, M, N, executor.processors, odd)


def shares_for(grad: Tensor, weight: Tensor, M: int) -> tiles.Shared:
    """The tile of a weight gradient over M rows, and among how many programs these are shared."""
    executor, bits, odd = launch.executor_of(weight), _bits(grad, weight), is_odd(*weight.shape)
    if executor.tile is not None:
        every = tiles.sharings(executor.arch, bits, odd)
        return every[min(executor.tile, len(every) - 1)]
    return tiles.share(executor.arch, bits, M, *weight.shape, executor.processors, odd)


def is_odd(*sizes: int) -> bool:
    """Whether rows of such sizes are read by narrow loads, which take more registers."""
    return any(size % launch.ALIGNMENT for size in sizes)


def _bits(x: Tensor, weight: Tensor) -> int:
    """What x times weight multiplies, as tiles.py calls it."""
    if weight.element_size() == 4:
        return tiles.TF32 if precision_of(weight) == "tf32" else 32
    return tiles.MIXED if x.element_size() == 4 else 16


def grid(M: int, N: int, row: configs.Row) -> tuple[int]:
    return (tiles.programs(row, M, N),)


def even(K: int, row: configs.Row) -> bool:
    return K % row.blocks["BK"] == 0
