"""What the GPU engine holds of a model, as its kernels read it, and what is asked of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Folded(NamedTuple):
    """A Linear with the LayerNorm before it folded in (gpu/norm_linear.py)."""

    weight: Tensor  # (N, K)
    sums: Tensor | None  # (N,)
    bias: Tensor  # (N,)


Norm = tuple[Tensor, Tensor]  # weight, bias
Linear = tuple[Tensor, Tensor | None, Tensor | None]  # weight, bias, LayerScale's gamma


class Block(NamedTuple):
    qkv: Folded
    qk_norm: tuple[Norm, Norm] | None  # of queries and keys
    projection: Linear
    fc1: Folded
    fc2: Linear


class Ends(NamedTuple):
    """What comes before and after the blocks."""

    filters: Tensor
    filter_bias: Tensor | None
    norm_pre: Norm | None
    norm: Norm | None  # of all tokens
    last_norm: Norm | None  # of the class token's row
    head: Folded | None


class Positions(NamedTuple):
    """What depends on an image's grid of patches."""

    prefix: Tensor | None
    position: Tensor | None
    biases: tuple[Tensor | None, ...]  # of each block's scores


class Wanted(NamedTuple):
    """The rows after some blocks: y is (len(take) + 1, B, S, D), the last ones after `stop`."""

    take: tuple[int, ...]
    stop: int
    norm: bool  # of those of `take`


def norm_of(norm: nn.LayerNorm) -> Norm:
    return norm.weight.detach().contiguous(), norm.bias.detach().contiguous()


def norm_or_none(norm: nn.Module | None) -> Norm | None:
    return norm_of(norm) if isinstance(norm, nn.LayerNorm) else None


def rows_of(t: Tensor | None) -> Tensor | None:
    """As kernels read it: itself where it is contiguous."""
    return None if t is None else t.detach().contiguous()
