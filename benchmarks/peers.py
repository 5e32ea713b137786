"""Eager PyTorch at its best: its own fused operators, and timm's models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkern.bench import timm_import
from vitkern.registry import OpSpec


def attention(qkv: Tensor, bias: Tensor | None, scale: float, *_) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, S, E)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return y.transpose(1, 2).contiguous()  # (B, S, H, E)


def patch_embed(
    image: Tensor, weight: Tensor, bias: Tensor, prefix: Tensor, position: Tensor, *_
) -> Tensor:
    y = F.conv2d(image, weight, bias, stride=weight.shape[2:]).flatten(2).mT + position  # (B, N, D)
    return torch.cat([prefix.expand(y.shape[0], -1, -1), y], 1)


# use of an operator -> the same arguments through PyTorch's fused operator
FUSED: dict[str, Callable[..., Tensor]] = {
    "attention": attention,
    "attention+bias": attention,
    "patch_embed": patch_embed,
}


def eager(spec: OpSpec, arguments: list) -> dict[str, Callable[[], object]]:
    """Eager PyTorch's ways to compute this row: the reference, and its fused operator if any."""
    ways = {"torch": lambda: spec.op.reference(*arguments)}
    if spec.name in FUSED:
        ways["torch_fused"] = lambda: FUSED[spec.name](*arguments)
    return ways


def timm_model(name: str, **options):
    """timm's model of this name with random weights, or None where timm cannot be imported."""
    timm_import.prepare()
    try:
        import timm
    except (ImportError, RuntimeError):
        return None
    return timm.create_model(name, **options).eval()
