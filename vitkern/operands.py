"""Tensors as the CPU kernels take them: rows, vectors, addresses, enums and dropout's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from . import _C, packing, philox

DTYPES = packing.DTYPES
IMAGE_DTYPES = {**DTYPES, torch.uint8: _C.DType.u8}
ACTIVATIONS = {name: getattr(_C.Activation, name) for name in _C.Activation.__members__}
OFF = (0, 0, 1.0)

Sizes = Mapping[str, int]  # axis letters
Results = Sequence[Tensor]
Maybe = Tensor | None
Needs = frozenset[str]  # arguments whose gradients are asked for


def rows(t: Tensor) -> tuple[Tensor, int]:
    """t as (M, last axis) with contiguous rows, in place if possible, and its row stride."""
    if t.is_contiguous():
        return t, t.shape[-1]
    flat = t.reshape(-1, t.shape[-1])
    if flat.stride(1) != 1 and flat.shape[1] > 1:
        flat = flat.contiguous()
    return flat, flat.stride(0)


@overload
def vector(t: Tensor) -> Tensor: ...
@overload
def vector(t: None) -> None: ...
@overload
def vector(t: Maybe) -> Maybe: ...
def vector(t: Maybe) -> Maybe:
    """t in contiguous fp32, itself when it is that already."""
    if t is None or (t.dtype is torch.float32 and t.is_contiguous()):
        return t
    return t.to(torch.float32).contiguous()


def address(t: Tensor | None) -> int:
    """What C++ gets for a tensor: keep t alive until the call returns."""
    return 0 if t is None else t.data_ptr()  # 0 of an empty tensor, too


def dropout(p: float, seed: Tensor | None) -> tuple[int, int, float]:
    """(seed, threshold, scale) of csrc/cpu/kernels.hpp's Dropout."""
    if not p:
        return OFF
    key = int(philox.given(seed).item()) & (2**64 - 1)
    return key, philox.threshold(p), philox.scale(p)
