"""The ResNets that hybrids begin with, as far as their feature maps, with timm's names.

`ResNetV2` is the paper's: GroupNorm, weights standardised before each convolution, padding as
TensorFlow has it. `ResNetD` is the usual one with BatchNorm and the "D" stem. Both run in PyTorch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CHANNELS = (256, 512, 1024, 2048)  # of the stages' maps
_GROUPS = 32


def _padded(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """TensorFlow's "SAME": ceil(side / stride) results, the odd pixel right and below."""
    y, x_ = (max(-(-side // stride) * stride - stride + kernel - side, 0) for side in x.shape[2:])
    return F.pad(x, (x_ // 2, x_ - x_ // 2, y // 2, y - y // 2), value=value)


class StandardisedConv(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1, each."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, **made: Any) -> None:
        super().__init__(before, after, kernel, stride, bias=False, **made)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.flatten(1)
        variance, mean = torch.var_mean(rows, 1, correction=0, keepdim=True)
        filters = ((rows - mean) * (variance + 1e-8).rsqrt()).view_as(self.weight)
        return F.conv2d(_padded(x, self.kernel_size[0], self.stride[0]), filters, None, self.stride)


class SamePool(nn.Module):
    """The largest of 3x3 pixels, at every second one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(_padded(x, 3, 2, -torch.inf), 3, 2)


class NormRelu(nn.GroupNorm):
    def __init__(self, channels: int, **made: Any) -> None:
        super().__init__(_GROUPS, channels, **made)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class _Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; subclasses say which, and which norm."""

    downsample: nn.Module | None

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return (self.branch(x) + shortcut).relu()


class _V2Bottleneck(_Bottleneck):
    def __init__(self, before: int, after: int, stride: int, first: bool, **made: Any) -> None:
        super().__init__()
        middle = after // 4
        shortcut = {"conv": StandardisedConv(before, after, 1, stride, **made)} if first else {}
        whole = {**shortcut, "norm": nn.GroupNorm(_GROUPS, after, **made)}
        self.downsample = nn.Sequential(OrderedDict(whole)) if first else None
        self.conv1 = StandardisedConv(before, middle, 1, **made)
        self.norm1 = NormRelu(middle, **made)
        self.conv2 = StandardisedConv(middle, middle, 3, stride, **made)
        self.norm2 = NormRelu(middle, **made)
        self.conv3 = StandardisedConv(middle, after, 1, **made)
        self.norm3 = nn.GroupNorm(_GROUPS, after, **made)

    def branch(self, x: Tensor) -> Tensor:
        x = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        return self.norm3(self.conv3(x))


class _DBottleneck(_Bottleneck):
    def __init__(self, before: int, after: int, stride: int, first: bool, **made: Any) -> None:
        super().__init__()
        middle = after // 4
        pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False)
        shrunk = pool if stride > 1 else nn.Identity()
        conv = nn.Conv2d(before, after, 1, bias=False, **made)
        norm = nn.BatchNorm2d(after, **made)
        self.downsample = nn.Sequential(shrunk, conv, norm) if first else None
        self.conv1 = nn.Conv2d(before, middle, 1, bias=False, **made)
        self.bn1 = nn.BatchNorm2d(middle, **made)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, padding=1, bias=False, **made)
        self.bn2 = nn.BatchNorm2d(middle, **made)
        self.conv3 = nn.Conv2d(middle, after, 1, bias=False, **made)
        self.bn3 = nn.BatchNorm2d(after, **made)

    def branch(self, x: Tensor) -> Tensor:
        x = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return self.bn3(self.conv3(x))


def _stages(kind: Any, depths: Sequence[int], **made: Any) -> list[nn.Sequential]:
    """Each stage but the first halves the sides."""
    stages, before = [], 64
    for i, (depth, after) in enumerate(zip(depths, _CHANNELS, strict=False)):
        stride = 2 if i else 1
        blocks = [kind(before, after, stride, True, **made)]
        blocks += [kind(after, after, 1, False, **made) for _ in range(depth - 1)]
        stages.append(nn.Sequential(*blocks))
        before = after
    return stages


def root(channels: int, **made: Any) -> nn.Sequential:
    """The first convolution and pool of a ResNetV2: a quarter of the image's sides, 64 channels."""
    conv, norm = StandardisedConv(channels, 64, 7, 2, **made), NormRelu(64, **made)
    return nn.Sequential(OrderedDict(conv=conv, norm=norm, pool=SamePool()))


class ResNetV2(nn.Module):
    """depths: blocks of each stage."""

    def __init__(self, channels: int, depths: Sequence[int], **made: Any) -> None:
        super().__init__()
        self.stem = root(channels, **made)
        stages = _stages(_V2Bottleneck, depths, **made)
        self.stages = nn.Sequential(*(nn.Sequential(OrderedDict(blocks=s)) for s in stages))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x))


class ResNetD(nn.Module):
    """depths: blocks of each stage."""

    def __init__(self, channels: int, depths: Sequence[int], **made: Any) -> None:
        super().__init__()

        def conv(before: int, after: int, stride: int = 1) -> nn.Conv2d:
            return nn.Conv2d(before, after, 3, stride, padding=1, bias=False, **made)

        self.conv1 = nn.Sequential(
            conv(channels, 32, 2), nn.BatchNorm2d(32, **made), nn.ReLU(),
            conv(32, 32), nn.BatchNorm2d(32, **made), nn.ReLU(), conv(32, 64),
        )  # fmt: skip
        self.bn1 = nn.BatchNorm2d(64, **made)
        self.depth = len(depths)
        for i, stage in enumerate(_stages(_DBottleneck, depths, **made), 1):
            self.add_module(f"layer{i}", stage)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, padding=1)
        for i in range(1, self.depth + 1):
            x = self.get_submodule(f"layer{i}")(x)
        return x
