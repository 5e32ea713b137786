"""What the GPU engine holds of a model, the tensors that its launches read, and is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..gpu import norm_linear
from ..precision import PRECISIONS

if TYPE_CHECKING:
    from ..model import ViT


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
    pixel_filters: Tensor  # the same, channels last: for images whose pixels are stored so
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
    turns: tuple[Tensor | None, ...]  # of each block's queries and keys, by rotary.by_pairs

    def of(self, block: int) -> Places:
        return self.biases[block], self.turns[block]


Places = tuple[Tensor | None, Tensor | None]  # what a block adds to scores, and turns q and k by


class Wanted(NamedTuple):
    """The rows after some blocks: y is (len(take) + 1, B, S, D), the last ones after `stop`."""

    take: tuple[int, ...]
    stop: int
    norm: bool  # of those of `take`


class Fold(NamedTuple):
    """Makes these of a model's modules, for a precision and the dtype of the residual stream."""

    precision: str
    stream: torch.dtype

    def norm_linear(self, norm: nn.Module, weight: Tensor, bias: Tensor | None) -> Folded:
        own = (*_norm(norm), weight.detach(), None if bias is None else bias.detach())
        return Folded(*norm_linear.fold(*own, PRECISIONS[self.precision], self.stream))

    def linear(self, linear: nn.Linear, scale: nn.Module) -> Linear:
        """The parameters themselves where the dtype is theirs: a change makes the engine stale."""
        return self._matrix(linear), rows_of(linear.bias), rows_of(getattr(scale, "gamma", None))

    def block(self, block: Any) -> Block:
        attn, mlp = block.attn, block.mlp
        return Block(
            self.norm_linear(block.norm1, *_qkv(attn)),
            _qk_norm(attn),
            _norm_or_none(attn.norm),
            self.linear(attn.proj, block.ls1),
            self.norm_linear(block.norm2, mlp.fc1_weight(), mlp.fc1_bias()),
            _norm_or_none(mlp.norm),
            self.linear(mlp.fc2, block.ls2),
        )

    def ends(self, model: ViT, whole: bool, last: nn.LayerNorm | None) -> Ends:
        """whole: with the head; last: the norm before it."""
        proj, head = model.patch_embed.proj, None
        if whole and last is not None and isinstance(model.head, nn.Linear):
            head = self.norm_linear(last, model.head.weight, model.head.bias)
        before, after, of_class = map(_norm_or_none, (model.norm_pre, model.norm, last))
        filters = self._matrix(proj)
        by_pixels = filters.contiguous(memory_format=torch.channels_last)
        return Ends(filters, by_pixels, rows_of(proj.bias), before, after, of_class, head)

    def _matrix(self, layer: nn.Linear | nn.Conv2d) -> Tensor:
        return layer.weight.detach().to(PRECISIONS[self.precision].dtype).contiguous()


def _qkv(attn: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, so that channels which rotary positions turn together are neighbours.

    The order of a head's channels changes no score, as long as queries and keys have the same.
    """
    weight, bias = attn.qkv_weight(), attn.qkv_bias()
    order = _order(attn, weight)
    if order is None:
        return weight, bias
    first = torch.arange(2 * attn.heads, device=weight.device)[:, None] * len(order)
    values = torch.arange(first.numel() * len(order), len(weight), device=weight.device)
    rows = torch.cat([(first + order).flatten(), values])
    return weight[rows], None if bias is None else bias[rows]


def _qk_norm(attn: Any) -> tuple[Norm, Norm] | None:
    q_norm, k_norm = _norm_or_none(attn.q_norm), _norm_or_none(attn.k_norm)
    if q_norm is None or k_norm is None:
        return None
    order = _order(attn, q_norm[0])
    if order is None:
        return q_norm, k_norm
    return (q_norm[0][order], q_norm[1][order]), (k_norm[0][order], k_norm[1][order])


def _order(attn: Any, like: Tensor) -> Tensor | None:
    """The channels of a head, 0, E/2, 1, E/2 + 1, ...; None: neighbours turn together already."""
    if attn.rope == "none" or not attn.rope_half:
        return None
    E = attn.proj.in_features // attn.heads
    return torch.arange(E, device=like.device).view(2, E // 2).T.flatten()


def _norm(norm: Any) -> Norm:
    return norm.weight.detach().contiguous(), norm.bias.detach().contiguous()


def _norm_or_none(norm: nn.Module | None) -> Norm | None:
    return _norm(norm) if isinstance(norm, nn.LayerNorm) else None


def rows_of(t: Tensor | None) -> Tensor | None:
    """As kernels read it: itself where it is contiguous."""
    return None if t is None else t.detach().contiguous()
