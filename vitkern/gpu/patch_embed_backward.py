"""Gradients of patch_embed: each of them only when asked for, all deterministic.

  dweight    G^T unfold(pixels): tiles of (D, P), cut along the rows into shares that are summed in
             a fixed order; the pixels are gathered from the image again, nothing was saved
  dimage     fold(G W) / std: patches do not overlap, so every pixel is written once
  dposition, dprefix, dbias
             sums of G over the batch, one read of it; dbias from the sums of its positions
G is grad with the forward's dropout mask, recomputed from the seed; its scale waits for the end, so
that G enters the tensor cores without another rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs, gemm, launch, philox, pixels
from .sums import sum_parts


@triton.jit(do_not_specialize=["M", "patches", "T", "span", "dropout", "seed"])
def patch_embed_weight_gradient(
    grad,  # (B, T + N, D) by rows
    image,  # (B, C, Y, X) by strides (pixels.py)
    mean, std,  # (C,) or None
    seed,  # (1,) or None: no dropout
    out,  # (shares, D, P): dweight itself if there is one share, else fp32
    M, T, D, span,  # a share has `span` of the M = B * N patches
    patches, strides, grad_stride,
    dropout,  # (threshold, scale)
    PATCH: tl.constexpr, ORDER: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = PATCH[0] * PATCH[1] * PATCH[2]
    DTYPE: tl.constexpr = grad.dtype.element_ty  # of the weight, too
    across = tl.cdiv(P, BP)
    part = tl.program_id(0) // across
    columns = part * BN + tl.arange(0, BN)
    k = (tl.program_id(0) % across) * BP + tl.arange(0, BP)
    limit, scale = dropout
    N = patches[0]
    at, channel = pixels.pixel_of(k, strides, PATCH, ORDER)
    inside, live = (columns < D)[:, None], (k < P)[None, :]
    sums = tl.zeros((BN, BP), tl.float32)
    first = tl.program_id(1) * span
    for start in range(first, tl.minimum(first + span, M), BM):
        rows = start + tl.arange(0, BM)
        real = rows < M  # a row that is none is 0 in both factors: 0 * Inf is NaN
        b, n, _, _ = pixels.patch_of(rows, patches)
        tokens = b * (T + N) + T + n
        g_at = grad + tokens.to(tl.int64)[None, :] * grad_stride + columns[:, None]
        g = tl.load(g_at, mask=real[None, :] & inside, other=0.0)  # (BN, BM)
        if seed is not None:
            kept = philox.keep_tile(seed, tokens, part * BN, D, limit, philox.ELEMENTS, BN, QUADS)
            g = tl.where(tl.trans(kept), g, 0.0).to(DTYPE)
        patch = pixels.first_pixel(rows, patches, strides, PATCH, ORDER)
        x = tl.load(image + (patch[:, None] + at[None, :]), mask=real[:, None] & live, other=0)
        x = pixels.converted(x, channel[None, :], mean, std, DTYPE)  # (BM, BP)
        g, x = gemm.rounded(g, PRECISION), gemm.rounded(x, PRECISION)
        sums = tl.dot(g, x, sums, input_precision=PRECISION)
    out += tl.program_id(1).to(tl.int64) * D * P
    out_at = out + columns.to(tl.int64)[:, None] * P
    out_at += pixels.in_filter(k, PATCH, ORDER)[None, :]
    tl.store(out_at, (sums * scale).to(out.dtype.element_ty), mask=inside & live)


@triton.jit(do_not_specialize=["M", "patches", "T", "dropout", "seed"])
def patch_embed_image_gradient(
    grad,  # (B, T + N, D) by rows
    weight,  # (D, P)
    std,  # (C,) or None
    seed,  # (1,) or None: no dropout
    dimage,  # (B, C, Y, X), contiguous
    M, T, D, patches, strides, grad_stride,
    dropout,  # (threshold, scale)
    PATCH: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = PATCH[0] * PATCH[1] * PATCH[2]
    across = tl.cdiv(P, BN)
    rows = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    real = rows < M
    rows = tl.minimum(rows, M - 1)
    k = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    limit, scale = dropout
    N = patches[0]
    b, n, _, _ = pixels.patch_of(rows, patches)
    tokens = b * (T + N) + T + n
    d = tl.arange(0, BK)
    g_at = grad + tokens.to(tl.int64)[:, None] * grad_stride + d[None, :]
    w_at = weight + d.to(tl.int64)[:, None] * P + k[None, :]
    inside = (k < P)[None, :]
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, D, BK):
        if EVEN:
            g = tl.load(g_at)
            w = tl.load(w_at) if P % BN == 0 else tl.load(w_at, mask=inside, other=0.0)
        else:
            live = d < D - start
            g = tl.load(g_at, mask=live[None, :], other=0.0)
            w = tl.load(w_at, mask=live[:, None] & inside, other=0.0)
        if seed is not None:
            kept = philox.keep_tile(seed, tokens, start, D, limit, philox.ELEMENTS, BK, QUADS)
            g = tl.where(kept, g, 0.0)
        g, w = gemm.rounded(g.to(w.dtype), PRECISION), gemm.rounded(w, PRECISION)
        sums = tl.dot(g, w, sums, input_precision=PRECISION)
        g_at += BK
        w_at += BK * P
    sums *= scale
    at, channel = pixels.pixel_of(k, strides, PATCH, "planes")
    if std is not None:
        sums = sums / tl.load(std + channel).to(tl.float32)[None, :]
    patch = pixels.first_pixel(rows, patches, strides, PATCH, "planes")
    out = sums.to(dimage.dtype.element_ty)
    tl.store(dimage + (patch[:, None] + at[None, :]), out, mask=real[:, None] & inside)


@triton.jit(do_not_specialize=["B", "S", "T", "first", "dropout", "seed"])
def patch_embed_token_sums(
    grad,  # (B, S, D) by rows
    seed,  # (1,) or None: no dropout
    dprefix,  # (T, D) or None
    dposition,  # (S - T, D) or None
    parts,  # (S - T, D) fp32: shares of dbias, or None
    B, S, T, D, first, grad_stride,
    dropout,  # (threshold, scale)
    QUADS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One token of all samples: BB of them at once, so that enough loads are on their way."""
    limit, scale = dropout
    token = first + tl.program_id(0)
    part = tl.program_id(1)
    columns = part * BN + tl.arange(0, BN)
    inside = columns < D
    sums = tl.zeros((BB, BN), tl.float32)
    for start in range(0, B, BB):
        b = start + tl.arange(0, BB)
        rows = b * S + token
        at = grad + rows.to(tl.int64)[:, None] * grad_stride + columns[None, :]
        g = tl.load(at, mask=(b < B)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if seed is not None:
            kept = philox.keep_tile(seed, rows, part * BN, D, limit, philox.ELEMENTS, BN, QUADS)
            g = tl.where(kept, g, 0.0)
        sums += g
    total = tl.sum(sums, 0) * scale
    if dprefix is not None:
        at = dprefix + token.to(tl.int64) * D + columns
        tl.store(at, total.to(dprefix.dtype.element_ty), mask=inside & (token < T))
    at = (token - T).to(tl.int64) * D + columns
    mask = inside & (token >= T)
    if dposition is not None:
        tl.store(dposition + at, total.to(dposition.dtype.element_ty), mask=mask)
    if parts is not None:
        tl.store(parts + at, total, mask=mask)


def backward(grad, args, saved, needs) -> list[Tensor]:
    image, weight, bias, prefix, position, mean, std, dropout_p, seed = args
    given = {
        "image": image, "weight": weight, "bias": bias, "prefix": prefix, "position": position
    }  # fmt: skip
    S, D = grad.shape[1:]
    grad, grad_stride = gemm.rows_of(grad)
    shared = {
        "grad": grad, "grad_stride": grad_stride, "seed": seed if dropout_p else None,
        "T": 0 if prefix is None else prefix.shape[0], "D": D,
        "dropout": philox.limits(dropout_p), "QUADS": bool(dropout_p) and D % 4 == 0,
    }  # fmt: skip
    grads = {
        name: t.new_empty(t.shape, dtype=t.dtype) for name, t in given.items() if name in needs
    }
    if "image" in needs:
        _image_gradient(grads["image"], weight, std, shared)
    if "weight" in needs:
        _weight_gradient(grads["weight"], image, mean, std, shared)
    if {"bias", "prefix", "position"} & needs:
        _token_sums(grads, image.shape[0], S, shared)
    return list(grads.values())


def _image_gradient(dimage: Tensor, weight: Tensor, std: Tensor | None, shared: dict) -> None:
    seen = pixels.arguments(dimage, *weight.shape[2:])
    del seen["image"], seen["ORDER"]  # contiguous: planes
    M, P, D = dimage.shape[0] * seen["patches"][0], weight.shape[1:].numel(), shared["D"]
    row = gemm.row_for("patch_embed_image_gradient", weight, M=M)
    launch.launch(
        patch_embed_image_gradient, gemm.grid(M, P, row), row, ("dimage",),
        dimage=dimage, weight=weight.contiguous(), std=None if std is None else std.contiguous(),
        M=M, EVEN=gemm.even(D, row), PRECISION=gemm.precision_of(weight), **seen, **shared,
    )  # fmt: skip


def _weight_gradient(
    dweight: Tensor, image: Tensor, mean: Tensor | None, std: Tensor | None, shared: dict
) -> None:
    D, P = dweight.shape[0], dweight.shape[1:].numel()
    seen = pixels.arguments(image, *dweight.shape[2:])
    M = image.shape[0] * seen["patches"][0]
    row = gemm.row_for("patch_embed_weight_gradient", dweight, M=M)
    tiles = launch.cdiv(D, row.blocks["BN"]) * launch.cdiv(P, row.blocks["BP"])
    shares, span = _shares(M, tiles, row)
    out = dweight if shares == 1 else dweight.new_empty(shares, D, P, dtype=torch.float32)
    launch.launch(
        patch_embed_weight_gradient, (tiles, shares), row, ("out",),
        mean=None if mean is None else mean.contiguous(),
        std=None if std is None else std.contiguous(), out=out, M=M, span=span,
        PRECISION=gemm.precision_of(dweight), **seen, **shared,
    )  # fmt: skip
    if shares > 1:
        sum_parts(out, dweight)


def _shares(M: int, tiles: int, row: configs.Row) -> tuple[int, int]:
    """Shares of the rows, and rows of each: enough programs, each with at least four steps."""
    step = row.blocks["BM"]
    shares = max(1, min(launch.cdiv(row.blocks["PROGRAMS"], max(tiles, 1)), M // (4 * step)))
    span = launch.cdiv(launch.cdiv(M, shares), step) * step
    return max(1, launch.cdiv(M, span or 1)), span


def _token_sums(grads: dict[str, Tensor], B: int, S: int, shared: dict) -> None:
    T, D, grad = shared["T"], shared["D"], shared["grad"]
    dbias = grads.get("bias")
    parts = None if dbias is None else grad.new_empty(S - T, D, dtype=torch.float32)
    first = 0 if "prefix" in grads else T
    last = S if {"bias", "position"} & grads.keys() else T
    row = gemm.row_for("patch_embed_token_sums", grad)
    launch.launch(
        patch_embed_token_sums, (last - first, launch.cdiv(D, row.blocks["BN"])), row,
        ("dprefix", "dposition", "parts"), dprefix=grads.get("prefix"),
        dposition=grads.get("position"), parts=parts, B=B, S=S, first=first, **shared,
    )  # fmt: skip
    if dbias is not None and parts is not None:
        sum_parts(parts, dbias)
