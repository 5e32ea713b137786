"""The hybrid of the paper: convolutions first, and patches cut from their feature map.

A stem is an entry of `config.STEMS`, with its stride, and a module here. It sits at
`patch_embed.backbone`, timm's name for it, and always runs in PyTorch: the engines and the fused
operators begin at the feature map.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .config import STEMS, ViTConfig

_GROUPS = 8


def build(c: ViTConfig, **made: Any) -> nn.Sequential:
    """From images (B, C, Y, X) to maps (B, map_channels, Y/stride, X/stride).

    "conv": stages of a 3x3 convolution, GroupNorm, ReLU and overlapping max-pooling, which halves
    the sides.
    """
    layers: list[nn.Module] = []
    for before, after in _stages(c):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False, **made),
            nn.GroupNorm(_GROUPS, after, **made),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        ]
    return nn.Sequential(*layers)


def multiply_adds(c: ViTConfig) -> int:
    """Of the convolutions, for one image of the configuration's size."""
    y, x = c.pixels
    return sum(y * x // 4**i * 9 * n * m for i, (n, m) in enumerate(_stages(c)))


def _stages(c: ViTConfig) -> list[tuple[int, int]]:
    """Channels before and after each convolution."""
    count = STEMS[c.stem].bit_length() - 1
    after = [c.map_channels >> i for i in reversed(range(count))]
    return list(zip([c.channels, *after], after, strict=False))
