"""Patches of an image as rows of a matrix (B*N, P): where each pixel is, and what number it is.

Nothing is unfolded in memory: kernels gather a patch's P = C * PY * PX pixels by the image's own
strides. The order of a row's pixels (ORDER) is the one in which they lie together:
  planes  (c, dy, dx), a filter's own; pixels of a line touch: runs of PX numbers (NCHW)
  pixels  (dy, dx, c); channels of a pixel and pixels of a line touch: runs of PX * C (NHWC)
  apart   (c, dy, dx); any strides, one number at a time
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def patch_of(rows, N, GX):
    """Row -> (sample b, patch n of it, its line and column in a grid that is GX patches wide)."""
    b = rows // N
    n = rows - b * N
    line = n // GX
    return b, n, line, n - line * GX


@triton.jit
def first_pixel(
    rows, N, GX, b_stride, y_stride, x_stride,
    C: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Offset of each row's first pixel in the image, int64."""
    b, _, line, column = patch_of(rows, N, GX)
    start = b.to(tl.int64) * b_stride + (line * PY).to(tl.int64) * y_stride
    if ORDER == "planes":
        return start + column * PX
    elif ORDER == "pixels":
        return start + column * (PX * C)
    else:
        return start + (column * PX).to(tl.int64) * x_stride


@triton.jit
def pixel_of(
    k, c_stride, y_stride, x_stride,
    C: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Of a row's pixels k: offset from its first one, and channel (in range also beyond P)."""
    if ORDER == "pixels":
        return (k // (PX * C)) * y_stride + k % (PX * C), k % C
    else:
        c, dy, dx = k // (PY * PX), (k // PX) % PY, k % PX
        at = c * c_stride + dy * y_stride + (dx if ORDER == "planes" else dx * x_stride)
        return at, tl.minimum(c, C - 1)


@triton.jit
def in_filter(k, C: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, ORDER: tl.constexpr):
    """The place of a row's pixels k in a flattened (C, PY, PX) filter."""
    if ORDER == "pixels":
        return (k % C) * (PY * PX) + k // C
    else:
        return k


@triton.jit
def numbers(x, channel, mean, std, dtype: tl.constexpr):
    """Loaded pixels in `dtype`: bytes / 255, then (x - mean) / std, in fp32 up to the end."""
    if mean is not None:
        center = tl.load(mean + channel).to(tl.float32)
        rate = 1.0 / tl.load(std + channel).to(tl.float32)
        if x.dtype == tl.uint8:
            x = x.to(tl.float32) * (rate * (1.0 / 255)) - center * rate  # one multiply-add
        else:
            x = (x.to(tl.float32) - center) * rate  # large means cancel before anything is rounded
    elif x.dtype == tl.uint8:
        x = x.to(tl.float32) * (1.0 / 255)
    return x.to(dtype)


def order_of(image: Tensor) -> str:
    _, C, _, X = image.shape
    _, c_stride, _, x_stride = image.stride()
    if x_stride == 1 or X == 1:
        return "planes"
    return "pixels" if c_stride == 1 and x_stride == C else "apart"


def readable(image: Tensor, py: int, px: int) -> Tensor:
    """The image itself, or a copy if a patch's pixels are more than 2**31 numbers apart."""
    _, c_stride, y_stride, x_stride = image.stride()
    span = image.shape[1] * c_stride + py * y_stride + px * x_stride
    return image if span < 2**31 else image.contiguous()


def arguments(image: Tensor, py: int, px: int) -> dict[str, object]:
    """What every kernel that reads patches of this image takes."""
    image = readable(image, py, px)
    b_stride, c_stride, y_stride, x_stride = image.stride()
    return {
        "image": image, "N": (image.shape[2] // py) * (image.shape[3] // px),
        "GX": image.shape[3] // px, "b_stride": b_stride, "c_stride": c_stride,
        "y_stride": y_stride, "x_stride": x_stride, "C": image.shape[1], "PY": py, "PX": px,
        "ORDER": order_of(image),
    }  # fmt: skip
