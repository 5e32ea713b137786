"""Patches of an image as rows of a matrix (B*N, P): where each pixel is, and what its value is.

Nothing is unfolded in memory: kernels gather a patch's P = C * PY * PX pixels by the image's own
strides. The order of a row's pixels (ORDER) is the one in which they are contiguous:
  planes   (c, dy, dx), a filter's own; pixels of a line touch: runs of PX elements (NCHW)
  pixels   (dy, dx, c); channels of a pixel and pixels of a line touch: runs of PX * C (NHWC)
  strided  (c, dy, dx); any strides, one element at a time
Kernels take `patches` = (patches of an image, of a line), `strides` of B, C, Y and X, and
PATCH = (C, PY, PX).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def patch_of(rows, patches):
    """Row -> (sample b, patch n of it, its line and column in the grid of patches)."""
    N, GX = patches
    b = rows // N
    n = rows - b * N
    line = n // GX
    return b, n, line, n - line * GX


@triton.jit
def first_pixel(rows, patches, strides, PATCH: tl.constexpr, ORDER: tl.constexpr):
    """Offset of each row's first pixel in the image, int64."""
    b_stride, _, y_stride, x_stride = strides
    b, _, line, column = patch_of(rows, patches)
    start = b.to(tl.int64) * b_stride + (line * PATCH[1]).to(tl.int64) * y_stride
    if ORDER == "planes":
        return start + column * PATCH[2]
    elif ORDER == "pixels":
        return start + column * (PATCH[2] * PATCH[0])
    else:
        return start + (column * PATCH[2]).to(tl.int64) * x_stride


@triton.jit
def pixel_of(k, strides, PATCH: tl.constexpr, ORDER: tl.constexpr):
    """Of a row's pixels k: offset from its first one, and channel (in range also beyond P)."""
    C: tl.constexpr = PATCH[0]
    PY: tl.constexpr = PATCH[1]
    PX: tl.constexpr = PATCH[2]
    _, c_stride, y_stride, x_stride = strides
    if ORDER == "pixels":
        return (k // (PX * C)) * y_stride + k % (PX * C), k % C
    else:
        c, dy, dx = k // (PY * PX), (k // PX) % PY, k % PX
        at = c * c_stride + dy * y_stride + (dx if ORDER == "planes" else dx * x_stride)
        return at, tl.minimum(c, C - 1)


@triton.jit
def in_filter(k, PATCH: tl.constexpr, ORDER: tl.constexpr):
    """The place of a row's pixels k in a flattened (C, PY, PX) filter."""
    if ORDER == "pixels":
        return (k % PATCH[0]) * (PATCH[1] * PATCH[2]) + k // PATCH[0]
    else:
        return k


@triton.jit
def converted(x, channel, mean, std, dtype: tl.constexpr):
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
    return "pixels" if c_stride == 1 and x_stride == C else "strided"


def readable(image: Tensor, py: int, px: int) -> Tensor:
    """The image itself, or a copy if a patch's pixels span more than 2**31 elements."""
    _, c_stride, y_stride, x_stride = image.stride()
    span = image.shape[1] * c_stride + py * y_stride + px * x_stride
    return image if span < 2**31 else image.contiguous()


def arguments(image: Tensor, py: int, px: int) -> dict[str, Any]:
    """What every kernel that reads patches of this image takes."""
    image = readable(image, py, px)
    return {
        "image": image, "strides": image.stride(), "ORDER": order_of(image),
        "patches": ((image.shape[2] // py) * (image.shape[3] // px), image.shape[3] // px),
        "PATCH": (image.shape[1], py, px),
    }  # fmt: skip
