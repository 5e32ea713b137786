"""PyTorch as a yardstick that is the same on every CPU.

The error contract compares with the error that PyTorch itself makes at a dtype. On one CPU that is
MKL's, on the next oneDNN's or ATen's own, by vector width. `FixedOrder` replaces whatever sums or
approximates by plain fp32 arithmetic in a fixed order, whose error is that of MKL with AVX2: under
it a test has one verdict everywhere. What rounds as IEEE 754 says passes through; an operator that
is neither is refused, so that none is missed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from vitkern.registry import REGISTRY
from vitkern.verification.tf32 import rounded_operands

from . import matmul

aten = torch.ops.aten
NARROW = {torch.float32, torch.float16, torch.bfloat16}
# One IEEE operation an element, or none: the same bits on every CPU.
EXACT = set(
    """_local_scalar_dense _reshape_alias _to_copy _unsafe_view abs add add_ alias all amax any
    arange argmax as_strided bitwise_and bitwise_right_shift bucketize cat clamp clamp_min clone
    constant_pad_nd copy_ detach diagonal div div_ embedding empty empty_like empty_strided eq
    equal expand fill_ full full_like ge gt index index_put index_select isfinite isinf isnan le
    lift_fresh logical_and logical_not logical_or lt masked_fill max max_pool2d_with_indices
    maximum min minimum mul mul_ ne neg new_empty new_empty_strided new_zeros nll_loss_backward
    nll_loss_forward ones_like permute pow reciprocal relu repeat rsub scalar_tensor
    select select_backward sign slice slice_backward split split_with_sizes square squeeze
    stack sub t transpose unbind unsqueeze view where zero_ zeros zeros_like""".split()
)
HANDLERS: dict[object, Callable] = {}


class FixedOrder(TorchDispatchMode):
    """Within it, PyTorch's fp32, fp16 and bf16 results do not depend on the CPU.

    tf32: fp32 products round their operands as a TF32 unit does, in both directions.
    """

    def __init__(self, tf32: bool = False) -> None:
        super().__init__()
        self.tf32 = tf32
        self._math: list[contextlib.AbstractContextManager] = []

    def __enter__(self):
        self._math.append(sdpa_kernel(SDPBackend.MATH))  # attention as separate operators
        self._math[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *failure):
        self._math.pop().__exit__(*failure)
        return super().__exit__(*failure)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        if not any(t.dtype in NARROW for t in tensors):
            return function(*args, **kwargs)
        packet = function.overloadpacket
        if packet in HANDLERS:
            if self.tf32:
                args = rounded_operands(packet, args)
            return HANDLERS[packet](*args, **kwargs)
        if function._can_decompose():  # in inference mode: elsewhere autograd took it apart
            with self:
                return function.decompose(*args, **kwargs)
        if packet.__name__ not in EXACT:
            raise NotImplementedError(f"FixedOrder has no fixed order for {function}: add it")
        return function(*args, **kwargs)


def handles(*packets) -> Callable:
    def register(function: Callable) -> Callable:
        HANDLERS.update(dict.fromkeys(packets, function))
        return function

    return register


# ---- roots: MKL's, which PyTorch takes on Intel's CPUs, are not those of IEEE 754 ----


@handles(aten.sqrt)
def _sqrt(x):
    return torch.from_numpy(np.sqrt(x.detach().float().numpy())).to(x.dtype)


@handles(aten.rsqrt)
def _rsqrt(x):
    return (1 / _sqrt(x.float())).to(x.dtype)


# ---- products ----


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (..., M, K) @ b (..., K, N), in fp32."""
    return torch.from_numpy(matmul(a.detach().float().numpy(), b.detach().float().numpy()))


@handles(aten.mm, aten.bmm)
def _product(a, b):
    return product(a, b).to(a.dtype)


@handles(aten.addmm, aten.baddbmm)
def _add_product(c, a, b, *, beta=1, alpha=1):
    return (c.float() * beta + product(a, b) * alpha).to(a.dtype)


def _rows(image: Tensor, weight: Tensor) -> Tensor:
    """Patches of an image as rows: (B, N, C * py * px)."""
    (B, C, Y, X), (py, px) = image.shape, weight.shape[2:]
    image = image[:, :, : Y // py * py, : X // px * px]  # what is left over is not read
    patches = image.reshape(B, C, Y // py, py, X // px, px)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * py * px)


@handles(aten.convolution)
def _convolution(image, weight, bias, stride, *rest):
    if list(stride) != list(weight.shape[2:]):  # a stem's: in float64, where no order shows
        wide = [None if t is None else t.double() for t in (image, weight, bias)]
        return aten.convolution(*wide, stride, *rest).to(image.dtype)
    B, grid = len(image), [n // s for n, s in zip(image.shape[2:], stride, strict=True)]
    y = product(_rows(image, weight), weight.flatten(1).T.expand(B, -1, -1))  # (B, N, D)
    y = y if bias is None else y + bias.float()
    return y.mT.reshape(B, len(weight), *grid).contiguous().to(image.dtype)


@handles(aten.convolution_backward)
def _convolution_backward(grad, image, weight, bias_sizes, *rest):
    mask, (B, _, Y, X), (py, px) = rest[-1], grad.shape, weight.shape[2:]
    rows = grad.flatten(2).mT  # (B, N, D)
    dx = product(rows, weight.flatten(1).expand(B, -1, -1)).reshape(B, Y, X, -1, py, px)
    dx = dx.permute(0, 3, 1, 4, 2, 5).reshape(image.shape).to(image.dtype)
    flat = _rows(image, weight).flatten(0, 1)
    dw = product(rows.flatten(0, 1).mT, flat).reshape(weight.shape).to(weight.dtype)
    db = pairwise(rows.flatten(0, 1).float(), [0]).to(grad.dtype) if mask[2] else None
    return dx if mask[0] else None, dw if mask[1] else None, db


@handles(aten.native_group_norm)
def _group_norm(x, gain, bias, *rest):
    found = aten.native_group_norm(x.double(), gain.double(), bias.double(), *rest)
    return tuple(t.to(x.dtype) for t in found)


# ---- sums ----


def pairwise(x: Tensor, dims: list[int], keep: bool = False) -> Tensor:
    """A sum in fp32 by halves: as exact as ATen's cascade of vectors."""
    dims = [d % x.ndim for d in dims] or list(range(x.ndim))
    rest = [d for d in range(x.ndim) if d not in dims]
    kept = [1 if d in dims else n for d, n in enumerate(x.shape)]
    count = math.prod(x.shape[d] for d in dims)
    t = x.float().permute(*rest, *dims).reshape(*(x.shape[d] for d in rest), count)
    while t.shape[-1] > 1:
        if t.shape[-1] % 2:
            t = torch.nn.functional.pad(t, (0, 1))
        t = t[..., : t.shape[-1] // 2] + t[..., t.shape[-1] // 2 :]
    total = t[..., 0] if t.shape[-1] else t.new_zeros(t.shape[:-1])
    return total.reshape(kept) if keep else total


@handles(aten.sum)
def _sum(x, dims=(), keepdim=False, *, dtype=None):
    return pairwise(x, list(dims or ()), keepdim).to(dtype or x.dtype)


@handles(aten.mean)
def _mean(x, dims=(), keepdim=False, *, dtype=None):
    count = math.prod(x.shape[d] for d in dims) if dims else x.numel()
    return (pairwise(x, list(dims or ()), keepdim) / count).to(dtype or x.dtype)


@handles(aten._softmax, aten._safe_softmax)
def _softmax(x, dim, *_, dtype=None):
    if not x.numel():
        return x.clone()
    e = _exact(torch.exp)(x.float() - x.float().amax(dim, keepdim=True))
    return (e / pairwise(e, [dim], keep=True)).to(x.dtype)


@handles(aten._softmax_backward_data)
def _softmax_backward(grad, y, dim, dtype):
    g = grad.float() * y.float()
    return (g - y.float() * pairwise(g, [dim], keep=True)).to(dtype)


@handles(aten.logsumexp)
def _logsumexp(x, dims, keepdim=False):
    if not x.numel():
        return aten.logsumexp(x, dims, keepdim)
    top = x.float().amax(dims, keepdim=True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    e = _exact(torch.exp)(x.float() - top)
    total = _exact(torch.log)(pairwise(e, dims, keep=True)) + top
    return (total if keepdim else total.squeeze(dims)).to(x.dtype)


@handles(aten.native_layer_norm)
def _layer_norm(x, shape, weight, bias, eps):
    assert len(shape) == 1
    wide, D = x.float(), shape[0]
    mean = pairwise(wide, [-1], keep=True) / D
    rstd = 1 / _sqrt(pairwise((wide - mean).square(), [-1], keep=True) / D + eps)
    y = (wide - mean) * rstd
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype), mean, rstd


@handles(aten.native_layer_norm_backward)
def _layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask):
    g, D = grad.float(), shape[0]
    xhat = (x.float() - mean.float()) * rstd.float()
    scaled = g if weight is None else g * weight.float()
    means = [pairwise(t, [-1], keep=True) / D for t in (scaled, scaled * xhat)]
    dx = rstd.float() * (scaled - means[0] - xhat * means[1])
    leading = list(range(x.ndim - 1))
    dw, db = (pairwise(t, leading) if leading else t for t in (g * xhat, g))
    wanted = zip(mask, (dx, dw, db), (x, weight, bias), strict=True)
    return tuple(t.to(like.dtype) if need else None for need, t, like in wanted)


# ---- elementary functions ----


def _exact(function: Callable) -> Callable:
    """Computed in fp64, whose last bits differ from CPU to CPU, and rounded, which hides them."""

    @functools.wraps(function)
    def rounded(x, *args, **kwargs):
        wide = (a.double() if torch.is_tensor(a) and a.dtype in NARROW else a for a in args)
        return function(x.double(), *wide, **kwargs).to(x.dtype)

    return rounded


for _packet in (
    aten.exp, aten.erf, aten.tanh, aten.sigmoid, aten.log, aten.sin, aten.cos, aten.exp2,
    aten._log_softmax, aten._upsample_bicubic2d_aa, aten._upsample_bicubic2d_aa_backward,
    aten.tanh_backward, aten.sigmoid_backward,
):  # fmt: skip
    HANDLERS[_packet] = _exact(_packet)


@handles(aten._log_softmax_backward_data)
def _log_softmax_backward(grad, y, dim, dtype):
    wide = aten._log_softmax_backward_data(grad.double(), y.double(), dim, torch.float64)
    return wide.to(dtype)


def _cdf(x: Tensor, approximate: str) -> Tensor:
    """What GELU multiplies x by, step by step in fp32."""
    if approximate == "tanh":
        inner = (x + 0.044715 * (x * x * x)) * math.sqrt(2 / math.pi)
        return 0.5 * (1 + _exact(torch.tanh)(inner))
    return 0.5 * (1 + _exact(torch.erf)(x * math.sqrt(0.5)))


@handles(aten.gelu)
def _gelu(x, *, approximate="none"):
    return (x.float() * _cdf(x.float(), approximate)).to(x.dtype)


@handles(aten.silu)
def _silu(x):
    return (x.float() / (1 + _exact(torch.exp)(-x.float()))).to(x.dtype)


@handles(aten.silu_backward)
def _silu_backward(grad, x):
    gate = _exact(torch.sigmoid)(x.float())
    return (grad.float() * (gate * (1 + x.float() * (1 - gate)))).to(x.dtype)


@handles(aten.gelu_backward)
def _gelu_backward(grad, x, *, approximate="none"):
    wide = aten.gelu_backward(grad.double(), x.double(), approximate=approximate)
    return wide.to(x.dtype)


@contextlib.contextmanager
def fixed_backwards():
    """The operators' backwards on the CPU, which are plain PyTorch, in a fixed order too."""
    operators = {id(spec.op): spec.op for spec in REGISTRY.values()}.values()
    own = [(op, op.backward) for op in operators]

    def fixed(backward: Callable) -> Callable:
        def call(*args):
            with FixedOrder():
                return backward(*args)

        return call

    for op, backward in own:
        object.__setattr__(op, "backward", fixed(backward))  # a frozen record
    try:
        yield
    finally:
        for op, backward in own:
            object.__setattr__(op, "backward", backward)
