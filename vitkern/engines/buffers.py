"""What a GPU forward holds besides weights: the memory of a stream, and how one forward uses it.

Forwards on one stream run one after the other, so all plans of a stream share an arena, which is as
large as the largest of them needs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import cdiv

Sizes = Mapping[str, tuple[int, torch.dtype]]  # buffer -> elements, dtype


class Stream(NamedTuple):
    """Rows of the residual stream, and the moments that their writer left."""

    x: Tensor  # (B, rows, D)
    parts: Tensor  # (parts, B * rows, 2)
    width: int  # columns of a part


class Arena:
    """The buffers of one stream; whoever starts launches on them holds `lock` meanwhile."""

    def __init__(self, like: Tensor, sizes: Sizes) -> None:
        self.sizes = sizes
        self.buffers = {n: like.new_empty(count, dtype=kind) for n, (count, kind) in sizes.items()}
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def holds(self, sizes: Sizes) -> bool:
        return all(count <= self.sizes[name][0] for name, (count, _) in sizes.items())


def sizes_of(
    rows: int, D: int, F: int, parts: int, stream: torch.dtype, matmul: torch.dtype,
    gated: int = 0, normalised: int = 0,
) -> Sizes:  # fmt: skip
    """Of `rows` tokens of D channels; F: outputs of the MLP's first layer, parts: rows of moments.

    gated: columns of what a gate lets through; normalised: of rows before proj or fc2 with a norm.
    """
    return {
        "x": (rows * D, stream), "other x": (rows * D, stream),
        "parts": (parts * 2, torch.float32), "other parts": (parts * 2, torch.float32),
        "qkv": (rows * 3 * D, matmul), "heads": (rows * D, matmul), "hidden": (rows * F, matmul),
        "gated": (rows * gated, matmul), "normalised": (rows * normalised, matmul),
    }  # fmt: skip


def larger(a: Sizes, b: Sizes) -> Sizes:
    """What holds both."""
    return {name: max(a[name], b[name], key=lambda size: size[0]) for name in a}


class Buffers:
    """An arena as one forward of (B, S, D) uses it.

    Two residual streams are written in turn, so a kernel never reads what it writes.
    """

    def __init__(self, arena: Arena, B: int, S: int, D: int) -> None:
        self.B, self.S, self.D = B, S, D
        self._of, self._turn = arena.buffers, 0

    def stream(self, rows: int, width: int, x: Tensor | None = None) -> Stream:
        """The next stream of B * rows rows (in `x` if given), with its moments."""
        self._turn ^= 1
        turn = "" if self._turn else "other "
        if x is None:
            x = self._view(turn + "x", self.B, rows, self.D)
        return Stream(x, self._view(turn + "parts", cdiv(self.D, width), self.B * rows, 2), width)

    def qkv(self, heads: int) -> Tensor:
        return self._view("qkv", self.B, self.S, 3, heads, self.D // heads)

    def heads(self, heads: int, queries: int) -> Tensor:
        return self._view("heads", self.B, queries, heads, self.D // heads)

    def hidden(self, F: int, queries: int) -> Tensor:
        return self._view("hidden", self.B, queries, F)

    def gated(self, F: int, queries: int) -> Tensor:
        return self._view("gated", self.B, queries, F)

    def normalised(self, like: Tensor) -> Tensor:
        """Room for rows after a norm before proj or fc2, in the shape of those before it."""
        return self._view("normalised", *like.shape)

    def _view(self, name: str, *shape: int) -> Tensor:
        return self._of[name][: torch.Size(shape).numel()].view(shape)
