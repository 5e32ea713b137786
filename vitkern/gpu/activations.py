"""Activations and their derivatives in a kernel, in fp32: the functions of ops/activations.py."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_TANH_CUBE = tl.constexpr(0.044715)
_QUICK = tl.constexpr(1.702)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """NAME(x); gelu_tanh as x sigmoid(2 u), which is the same without a tanh."""
    if NAME == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * _SQRT_HALF))
    elif NAME == "gelu_tanh":
        return x * tl.sigmoid(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))
    elif NAME == "quick_gelu":
        return x * tl.sigmoid(_QUICK * x)
    elif NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "tanh":
        return libdevice.tanh(x)
    else:
        tl.static_assert(NAME == "none", "unknown activation")
        return x


@triton.jit
def _sigmoid_and_slope(x):
    """sigmoid(x) and sigmoid'(x) = e / (1 + e)^2 with e = exp(-|x|), where 1 - sigmoid cancels."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e), e / ((1.0 + e) * (1.0 + e))


@triton.jit
def derivative(x, NAME: tl.constexpr):
    """d NAME(x) / dx."""
    if NAME == "gelu":
        return 0.5 * (1.0 + tl.math.erf(x * _SQRT_HALF)) + x * _DENSITY * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        s, slope = _sigmoid_and_slope(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))
        return s + x * slope * _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBE * x * x)
    elif NAME == "quick_gelu":
        s, slope = _sigmoid_and_slope(_QUICK * x)
        return s + _QUICK * x * slope
    elif NAME == "silu":
        s, slope = _sigmoid_and_slope(x)
        return s + x * slope
    elif NAME == "tanh":
        y = libdevice.tanh(x)
        return 1.0 - y * y
    else:
        tl.static_assert(NAME == "none", "unknown activation")
        return tl.full(x.shape, 1.0, tl.float32)
