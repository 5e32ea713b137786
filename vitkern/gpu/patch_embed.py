"""patch_embed in one launch: a GEMM whose left operand is gathered from the image as it is.

y[b, T + n] = W unfold(pixels)[b, n] + bias + position[n], y[b, :T] = prefix. A program computes BM
patches times BN channels and walks along a patch's P pixels in steps of BK; the programs after the
last tile copy the prefix. Reads the image once from memory (column tiles run side by side and meet
in L2), W from L2, and writes y once; with `moments` also its rows' statistics, so that the first
LayerNorm needs no pass.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import gemm, launch, philox, pixels
from . import moments as row_moments
from .patch_embed_backward import backward

__all__ = ["backward", "embed", "forward"]


@triton.jit
def _matmul(
    image, weight, mean, std, rows, columns, patches, strides, D,
    PATCH: tl.constexpr, ORDER: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """pixels[rows] weight[columns]^T in fp32, (BM, BN)."""
    PLANE: tl.constexpr = PATCH[1] * PATCH[2]
    P: tl.constexpr = PATCH[0] * PLANE
    first = pixels.first_pixel(rows, patches, strides, PATCH, ORDER)
    filters = weight + tl.minimum(columns, D - 1).to(tl.int64)[:, None] * P
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, P, BK):
        k = start + tl.arange(0, BK)
        at, channel = pixels.pixel_of(k, strides, PATCH, ORDER)
        x_at = image + (first[:, None] + at[None, :])
        w_at = filters + k[None, :]
        if P % BK == 0:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            live = (k < P)[None, :]
            x, w = tl.load(x_at, mask=live, other=0), tl.load(w_at, mask=live, other=0)
        if ORDER != "pixels" and PLANE % BK == 0:  # a step stays in one plane
            x = pixels.converted(x, start // PLANE, mean, std, w.dtype)
        else:
            x = pixels.converted(x, channel[None, :], mean, std, w.dtype)
        x, w = gemm.rounded(x, PRECISION), gemm.rounded(w, PRECISION)
        sums = tl.dot(x, tl.trans(w), sums, input_precision=PRECISION)
    return sums


@triton.jit
def _finish(
    out, y, moments, seed, rows, live, columns, block, M, D, dropout,
    QUADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Dropout, then the tile's place in y, and what the first LayerNorm wants to know of it."""
    if seed is not None:
        limit, scale = dropout
        kept = philox.keep_tile(seed, rows, block * BN, D, limit, philox.ELEMENTS, BN, QUADS)
        out = tl.where(kept, out * scale, 0.0)
    out = out.to(y.dtype.element_ty)
    at = y + rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(at, out, mask=live[:, None] & (columns < D)[None, :])
    if moments is not None:
        row_moments.store(moments, block, rows, live, out, columns, M, D, BM, BN)


@triton.jit(do_not_specialize=["B", "patches", "T", "dropout", "seed"])
def patch_embed_forward(
    image,  # (B, C, Y, X) by strides (pixels.py)
    weight,  # (D, P) in the order of a row's pixels
    bias,  # (D,) or None
    prefix,  # (T, D) by rows, or None
    position,  # (N, D) by rows, or None
    mean, std,  # (C,) or None
    seed,  # (1,) or None: no dropout
    y,  # (B, T + N, D)
    moments,  # (parts, B * (T + N), 2) fp32, or None
    B, T, D, patches, strides,
    row_strides,  # of prefix and position
    dropout,  # (threshold, scale)
    PATCH: tl.constexpr, ORDER: tl.constexpr,
    QUADS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    blocks_n = tl.cdiv(D, BN)
    block, block_n = tl.program_id(0) // blocks_n, tl.program_id(0) % blocks_n
    columns = block_n * BN + tl.arange(0, BN)
    inside = (columns < D)[None, :]
    prefix_stride, position_stride = row_strides
    N = patches[0]
    S = T + N
    blocks = tl.cdiv(B * N, BM)
    if block < blocks:
        rows = block * BM + tl.arange(0, BM)
        live = rows < B * N
        rows = tl.minimum(rows, B * N - 1)  # reads stay unconditional, the store is masked
        out = _matmul(
            image, weight, mean, std, rows, columns, patches, strides, D,
            PATCH, ORDER, PRECISION, BM, BN, BK,
        )  # fmt: skip
        b, n, _, _ = pixels.patch_of(rows, patches)
        if bias is not None:
            out += gemm.channel(bias, columns, D)
        if position is not None:
            at = position + n.to(tl.int64)[:, None] * position_stride + columns[None, :]
            out += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        rows = b * S + T + n
        _finish(
            out, y, moments, seed, rows, live, columns, block_n, B * S, D, dropout,
            QUADS, BM, BN,
        )  # fmt: skip
    elif prefix is not None:
        rows = (block - blocks) * BM + tl.arange(0, BM)
        live = rows < B * T
        rows = tl.minimum(rows, B * T - 1)
        at = prefix + (rows % T).to(tl.int64)[:, None] * prefix_stride + columns[None, :]
        out = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        rows = (rows // T) * S + rows % T
        _finish(
            out, y, moments, seed, rows, live, columns, block_n, B * S, D, dropout,
            QUADS, BM, BN,
        )  # fmt: skip


def _filters(weight: Tensor, order: str) -> Tensor:
    """The filters (D, C, PY, PX) in the order of the image's pixels, themselves where they are."""
    return (weight.permute(0, 2, 3, 1) if order == "pixels" else weight).contiguous()


def embed(
    y: Tensor,
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix: Tensor | None,
    position: Tensor | None,
    mean: Tensor | None,
    std: Tensor | None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    moments: Tensor | None = None,
) -> None:
    """patch_embed into y (B, S, D), and its rows' statistics into `moments`, if given.

    moments is (ceil(D / WIDTH), B * S, 2) fp32 with gpu/moments.py's WIDTH.
    Channels-last images want channels-last filters (weight.to(memory_format=torch.channels_last)).
    Others are brought into order here, by a copy: what records launches must have them in order.
    """
    (D, _, py, px), B = weight.shape, image.shape[0]
    seen = pixels.arguments(image, py, px)
    T = 0 if prefix is None else prefix.shape[0]
    M = B * seen["patches"][0]
    weight = _filters(weight, seen["ORDER"])
    row = gemm.row_for("patch_embed_forward", weight, M=M)
    blocks = launch.cdiv(M, row.blocks["BM"]) + launch.cdiv(B * T, row.blocks["BM"])
    (prefix, prefix_stride), (position, position_stride) = map(_rows, (prefix, position))
    launch.launch(
        patch_embed_forward, (blocks * launch.cdiv(D, row.blocks["BN"]),), row, ("y", "moments"),
        **seen, weight=weight, bias=gemm.vector(bias), prefix=prefix, position=position,
        mean=gemm.vector(mean), std=gemm.vector(std), seed=seed if dropout_p else None, y=y,
        moments=moments, B=B, T=T, D=D, row_strides=(prefix_stride, position_stride),
        dropout=philox.limits(dropout_p),
        QUADS=bool(dropout_p) and D % 4 == 0, PRECISION=gemm.precision_of(weight),
    )  # fmt: skip


def _rows(t: Tensor | None) -> tuple[Tensor | None, int]:
    return (None, 0) if t is None or not t.numel() else gemm.rows_of(t)


def forward(n, results, image, weight, bias, prefix, position, mean, std, dropout_p, seed) -> None:
    embed(
        results[0], image, weight, bias, prefix, position, mean, std, dropout_p=dropout_p, seed=seed
    )
