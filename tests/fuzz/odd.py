"""Odd numbers, sizes and tensors: what every generator draws from."""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from torch import Tensor

SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 64, 67)
HUGE = (2**31, 2**40, 2**61, 2**63 - 1)
NUMBERS = (
    0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63),
    0.0, -0.0, 0.5, 1.0, 1.5, -1e-3, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
OBJECTS = (None, True, False, "", "1", "token", b"1", (), (3,), [1, 2], {}, {"a": 1}, object, 1j)
FLOATS = ("float32", "float32", "bfloat16", "float64", "float16")
DTYPES = (*FLOATS, "uint8", "int64", "int32", "bool", "complex64", "float8_e4m3fn")

# Ways to hold the same numbers that every operator must understand or refuse.
LAYOUTS = (
    "packed", "sliced", "transposed", "offset", "strided", "expanded", "overlapping", "negative",
    "zero", "parameter", "inference",
)  # fmt: skip
FOREIGN_LAYOUTS = ("sparse", "csr", "mkldnn", "nested", "quantized", "subclass", "conjugate")
VALUES = ("normal", "zeros", "ones", "nan", "inf", "mixed", "huge", "tiny", "all-nan")


def number(rng: random.Random) -> object:
    """A number or something in its place."""
    return rng.choice(OBJECTS) if rng.random() < 0.25 else rng.choice(NUMBERS)


class Subclass(Tensor):
    """A tensor type of someone else's, which does nothing special."""


@dataclasses.dataclass
class Odd:
    """A tensor to be: shape, dtype and how it lies in memory. make() builds it."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "packed"
    values: str = "normal"
    device: str = "cpu"
    grad: bool = False
    seed: int = 0
    scale: float = 1.0

    def __repr__(self) -> str:
        words = [str(self.shape), self.dtype]
        words += [self.layout] if self.layout != "packed" else []
        words += [self.values] if self.values != "normal" else []
        words += [self.device] if self.device != "cpu" else []
        words += ["grad"] if self.grad else []
        return f"<{' '.join(words)}>"

    def make(self) -> Tensor:
        t = self._filled()
        if t.numel() <= 2**24:  # torch takes minutes to make others sparse
            t = _laid_out(t, self.layout)
        if self.device != "cpu":
            t = t.to(self.device)
        if self.grad and t.is_floating_point() and not t.is_inference():
            t.requires_grad_()
        return t

    def _filled(self) -> Tensor:
        dtype = getattr(torch, self.dtype)
        if math.prod(self.shape) > 2**24:  # only as an expanded view: the memory is one number's
            return torch.full((), 0.5).to(dtype).expand(self.shape)
        g = torch.Generator().manual_seed(self.seed)
        if not dtype.is_floating_point or self.dtype.startswith("float8"):
            return torch.randint(0, 200, self.shape, generator=g).to(dtype)
        t = torch.randn(self.shape, generator=g) * self.scale
        if self.values in ("zeros", "ones"):
            t = torch.full_like(t, self.values == "ones")
        factor = {"huge": 1e30, "tiny": 1e-40, "all-nan": float("nan")}.get(self.values, 1.0)
        t = t * factor
        if t.numel() and self.values in ("nan", "inf", "mixed"):
            special = {"nan": [math.nan], "inf": [math.inf], "mixed": [math.nan, -math.inf, 3e38]}
            for value in special[self.values]:
                t.view(-1)[int(torch.randint(t.numel(), (), generator=g))] = value
        return t.to(dtype)


def _laid_out(t: Tensor, layout: str) -> Tensor:
    """The same numbers, held in another way (but for "zero", "overlapping", "expanded")."""
    last = t.shape[-1] if t.ndim else 0
    if layout == "sliced" and t.ndim:
        return torch.cat([t, t], -1)[..., :last]
    if layout == "strided" and t.ndim:
        return torch.stack([t, t], -1).flatten(-2)[..., ::2]
    if layout == "transposed" and t.ndim > 1:
        return t.mT.contiguous().mT
    if layout == "offset":
        padded = torch.cat([t.new_zeros(1), t.reshape(-1)])
        return padded[1:].view(t.shape)
    if layout == "expanded" and t.ndim and t.shape[0]:
        return t[:1].expand(t.shape)
    if layout == "overlapping" and t.ndim > 1 and t.numel():
        return t.as_strided(t.shape, [1] * t.ndim)
    if layout == "negative" and t.is_floating_point():
        return torch._neg_view(t.neg())
    if layout == "zero":
        return torch._efficientzerotensor(t.shape, dtype=t.dtype)
    if layout == "parameter":
        return torch.nn.Parameter(t, requires_grad=False)
    if layout == "inference":
        with torch.inference_mode():
            return t.clone()
    return _foreign(t, layout)


def _foreign(t: Tensor, layout: str) -> Tensor:
    if layout == "sparse":
        return t.to_sparse()
    if layout == "csr" and t.ndim == 2:
        return t.to_sparse_csr()
    if layout == "mkldnn" and t.dtype == torch.float32:
        return t.to_mkldnn()
    if layout == "nested" and t.ndim > 1 and t.shape[0]:
        return torch.nested.nested_tensor(list(t))
    if layout == "quantized" and t.dtype == torch.float32:
        return torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)
    if layout == "subclass":
        return t.as_subclass(Subclass)
    if layout == "conjugate" and t.is_floating_point() and t.dtype == torch.float32:
        return torch.complex(t, -t).conj().imag  # a real tensor with a lazy minus, strided
    return t


def plain(value: object) -> object:
    """The numbers of a tensor in the plainest of tensors, for the reference."""
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return value
    grad = value.requires_grad
    value = value.detach().as_subclass(Tensor)
    if value.is_quantized:
        value = value.dequantize()
    if value.layout != torch.strided or value.is_mkldnn:
        value = value.to_dense()
    return value.resolve_neg().resolve_conj().clone().contiguous().requires_grad_(grad)
