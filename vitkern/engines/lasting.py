"""Folded weights stay where they are: plans and captured CUDA graphs read them by address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Tensors made inside can be written later, in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def refill(old: Any, new: Any) -> None:
    """Put new values into the tensors of a tuple of tuples; parameters themselves have them."""
    if isinstance(old, tuple):
        for one, value in zip(old, new, strict=True):
            refill(one, value)
    elif old is not None and old.data_ptr() != new.data_ptr():
        old.copy_(new)
