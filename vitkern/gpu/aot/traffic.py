"""Bytes that launches move at least: each tensor of a launch read or written once.

Tiles that are read again by other programs are assumed to come from L2; a matrix larger than that
moves more. The same rule serves for eager PyTorch, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from ..launch import Launch


class Traffic(NamedTuple):
    """Of one launch, or of many."""

    launches: int = 0
    read: int = 0
    written: int = 0

    @property
    def moved(self) -> int:
        return self.read + self.written

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


def touched(t: Tensor) -> int:
    """Bytes of the tensor's own elements: gaps between rows and repeated rows do not count."""
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * t.element_size()


def of_launch(launch: Launch) -> Traffic:
    tensors = {n: t for n, t in launch.arguments.items() if isinstance(t, Tensor)}
    written = sum(touched(t) for n, t in tensors.items() if n in launch.writes)
    return Traffic(1, sum(map(touched, tensors.values())) - written, written)


def of(launches: Iterable[Launch]) -> Traffic:
    """All of them together."""
    total = Traffic()
    for launch in launches:
        total = total.plus(of_launch(launch))
    return total
