"""Small kernels that the tests of the ahead-of-time build compile, and their variants."""

import torch
import triton
import triton.language as tl

from vitkern.gpu import configs
from vitkern.gpu.launch import Recorder, executing, launch


@triton.jit(do_not_specialize=["M"])
def matmul(
    x, w, bias, y, M, N, K, x_stride,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (M, N) = x (M, K) w (N, K)^T + bias: what every kernel with a matmul looks like."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    sums = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        sums = tl.dot(tl.load(x_at), tl.trans(tl.load(w_at)), sums, input_precision=PRECISION)
        x_at += BK
        w_at += BK
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def scaled(x, y, D, BLOCK: tl.constexpr):
    """A kernel without matmuls: y = 2 x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < D, other=0.0) * 2, mask=at < D)


@triton.jit
def refused(x, y, D, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "this kernel never compiles")
    tl.store(y, tl.load(x))


def matmul_variant(arch, dtype=torch.bfloat16, K=768, warps=4, stages=3, precision="tf32", **tile):
    row = configs.Row({"BM": 128, "BN": 128, "BK": 32, **tile}, warps, stages, "")
    x, w, y = (torch.empty(768, n, dtype=dtype, device="meta") for n in (K, K, 768))
    bias = torch.empty(768, dtype=dtype, device="meta")
    with executing(Recorder(arch)) as recorder:
        launch(
            matmul, (6, 6), row, ("y",),
            x=x, w=w, bias=bias, y=y, M=768, N=768, K=K, x_stride=K, PRECISION=precision,
        )  # fmt: skip
    return recorder.launches[0].variant


def plain_variant(arch, kernel=scaled):
    x, y = (torch.empty(4096, dtype=torch.float32, device="meta") for _ in range(2))
    with executing(Recorder(arch)) as recorder:
        launch(kernel, (4,), configs.Row({"BLOCK": 1024}, 4, 1, ""), ("y",), x=x, y=y, D=4096)
    return recorder.launches[0].variant
