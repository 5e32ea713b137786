"""The precisions: what matrices are multiplied in, by name, and how exact that is.

Sums, norms, softmax and activations are fp32 in all of them.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import NamedTuple

import torch
from torch import Tensor


class Precision(NamedTuple):
    """One row of the table."""

    name: str
    dtype: torch.dtype  # what matrices are held in
    unit: float  # spacing, relative, of the values that a GEMM's operands keep
    # What the error contract's factors are multiplied by on GPUs, where contract.on_gpu says so.
    # fp32 is three tf32 GEMMs there, which keep 21 to 22 bits of an operand instead of 24.
    gpu_room: float = 1.0


PRECISIONS = {
    row.name: row
    for row in (
        Precision("fp32", torch.float32, 2**-21, 1.5),
        Precision("tf32", torch.float32, 2**-10),
        Precision("bf16", torch.bfloat16, 2**-7),
        Precision("fp16", torch.float16, 2**-10),
    )
}
# What `model.precision` may be: the ones that every device has. A model held in another dtype
# computes in that.
CHOICES = ("fp32", "tf32", "bf16")
# Integers (int8.py), which only the packed engine of a CPU has, for inference.
ON_CPU_ENGINE = {row.name: row for row in (Precision("int8", torch.int8, 2**-7),)}


# The most exact precision whose matrices have a dtype; float64 has references only.
_NAMES = {row.dtype: row.name for row in reversed(PRECISIONS.values())} | {torch.float64: "fp64"}


def name_of(dtype: torch.dtype) -> str:
    """The precision of matrices that are held in a dtype: "fp32" for float32."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def torch_allows_tf32() -> bool:
    """What torch.set_float32_matmul_precision or its newer switches say of fp32 on GPUs."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # since torch 2.9
    return (newer or torch.get_float32_matmul_precision()) in ("tf32", "high", "medium")


# How the GPU's operators multiply fp32 in this context: whether as tf32; None: as torch's switches
# say. A backward, which runs in another thread, is given what its forward had (ops/_library.py).
_tf32: contextvars.ContextVar[bool | None] = contextvars.ContextVar("vitkern_tf32", default=None)


class fp32_as:
    """What fp32 is multiplied as inside, by the GPU's operators: `as_tf32` or not, None: by torch's
    switches."""

    __slots__ = ("_before", "_tf32")

    def __init__(self, as_tf32: bool | None) -> None:
        self._tf32 = as_tf32

    def __enter__(self) -> None:
        self._before = _tf32.set(self._tf32)

    def __exit__(self, *_: object) -> None:
        _tf32.reset(self._before)


def chosen_tf32() -> bool | None:
    """What `fp32_as` says here; None: nothing."""
    return _tf32.get()


def multiplies_tf32() -> bool:
    """Whether the GPU's operators multiply fp32 as tf32 here."""
    chosen = _tf32.get()
    return torch_allows_tf32() if chosen is None else chosen


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """What follows is computed in its tensors' dtypes, on this one's device."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()  # on meta, say, where launches are recorded


def check_choice(owner: str, precision: str | None) -> None:
    """A ValueError unless it can be a model's precision, or None: the model's own dtype."""
    known = (*CHOICES, *ON_CPU_ENGINE)
    if precision is not None and precision not in known:
        raise ValueError(f"{owner} must be {', '.join(known)} or None, not {precision!r}")
