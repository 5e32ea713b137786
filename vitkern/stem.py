"""The hybrids: convolutions first, and patches cut from their feature map.

A stem is an entry of `config.STEMS`, with its stride and channels, and a module here. It sits at
`patch_embed.backbone`, timm's name for it, and always runs in PyTorch: the engines and the fused
operators begin at the feature map.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from . import resnets
from .config import STEMS, ViTConfig

_GROUPS = 8
# Blocks of each stage: the paper's R50 without its last stage, whose blocks the third one has; the
# others are those of "How to train your ViT" and timm.
_V2 = {"r50": (3, 4, 9), "r50_s32": (3, 4, 6, 3), "r26_s32": (2, 2, 2, 2)}
_D = {"resnet26d": (2, 2, 2, 2), "resnet50d": (3, 4, 6, 3), "resnet50d_s16": (3, 4, 6)}


def build(c: ViTConfig, **made: Any) -> nn.Module:
    """From images (B, C, Y, X) to maps (B, map_channels, Y/stride, X/stride)."""
    if c.stem in _V2:
        return resnets.ResNetV2(c.channels, _V2[c.stem], **made)
    if c.stem in _D:
        return resnets.ResNetD(c.channels, _D[c.stem], **made)
    if c.stem == "r":
        return resnets.root(c.channels, **made)
    return _patches(c, **made) if c.stem == "mci" else _convolutions(c, **made)


def _convolutions(c: ViTConfig, **made: Any) -> nn.Sequential:
    """ "conv": stages of a 3x3 convolution, GroupNorm, ReLU and overlapping max-pooling, which
    halves the sides."""
    count = STEMS[c.stem].stride.bit_length() - 1
    after = [c.map_channels >> i for i in reversed(range(count))]
    layers: list[nn.Module] = []
    for n, m in zip([c.channels, *after], after, strict=False):
        layers += [
            nn.Conv2d(n, m, 3, padding=1, bias=False, **made),
            nn.GroupNorm(_GROUPS, m, **made),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        ]
    return nn.Sequential(*layers)


def _patches(c: ViTConfig, **made: Any) -> nn.Sequential:
    """ "mci": two convolutions of adjacent patches with BatchNorm and GELU (MobileCLIP); the third
    one is the patch projection itself."""
    stages = []
    for before, size in ((c.channels, 4), (c.map_channels, 2)):
        conv = nn.Conv2d(before, c.map_channels, size, size, bias=False, **made)
        norm = nn.BatchNorm2d(c.map_channels, **made)
        stages.append(nn.Sequential(OrderedDict(conv=conv, bn=norm, act=nn.GELU())))
    return nn.Sequential(*stages)


@torch.no_grad()
def multiply_adds(c: ViTConfig) -> int:
    """Of the convolutions, for one image of the configuration's size."""
    found: list[int] = []

    def count(conv: nn.Module, _: object, y: Tensor) -> None:
        weight = next(conv.parameters())
        found.append(y.shape[2] * y.shape[3] * weight.numel())

    backbone = build(c, device="meta").eval()
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    backbone(torch.empty(1, c.channels, *c.pixels, device="meta"))
    return sum(found)
