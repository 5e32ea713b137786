"""DINOv2's positions: of class token and patches, while its registers have none.

Where ViTConfig has registers without positions, no prefix row has one: the class token's is added
to the token itself, once, on loading.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...config import ViTConfig
from .base import Rule, Shape


def folded(config: ViTConfig, token: str, positions: str) -> list[Rule]:
    """The rules of cls_token and pos_embed."""
    if config.position_covers_prefix:
        return [Rule("cls_token", (token,)), Rule("pos_embed", (positions,))]

    def with_position(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        return parts[0] + parts[1][:, :1]

    def of_patches(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        return parts[0][:, 1:]

    def with_zero(ours: Tensor) -> Sequence[Tensor]:
        return [torch.cat([torch.zeros_like(ours[:, :1]), ours], 1)]

    return [
        Rule("cls_token", (token, positions), with_position, lambda ours: [ours, None]),
        Rule("pos_embed", (positions,), of_patches, with_zero),
    ]
