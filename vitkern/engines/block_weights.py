"""What the GPU engine holds of a model: the tensors that its launches read, by their use."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
    attention_norm: Norm | None  # before the projection
    projection: Linear
    fc1: Folded
    mlp_norm: Norm | None  # before fc2
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
    turns: tuple[Tensor | None, ...]  # of each block's queries and keys
