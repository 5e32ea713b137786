"""The layouts that vitkern reads, one file each, and which of them a checkpoint has."""

from __future__ import annotations

from collections.abc import Collection

from .base import Layout
from .beit import Beit
from .dino import Dino
from .dinov2 import Dinov2
from .eva import Eva
from .hf_beit import HfBeit
from .hf_clip import HfClip
from .hf_dinov2 import HfDinov2
from .hf_dinov3 import HfDinov3
from .hf_siglip import HfSiglip
from .hf_vit import HfDeiT, HfViT
from .jax import Jax
from .mae import Mae
from .open_clip import OpenClip
from .timm import Timm
from .torchvision import Torchvision

LAYOUTS: tuple[Layout, ...] = (
    Timm(), Torchvision(), HfViT(), HfDeiT(), HfDinov2(), HfBeit(), HfClip(), HfSiglip(),
    HfDinov3(), Jax(), Eva(), Beit(), Dino(), Dinov2(), Mae(), OpenClip(),
)  # fmt: skip
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def detect(names: Collection[str]) -> tuple[Layout, str] | None:
    """The layout that has these names, and what the model's names begin with; None if none has."""
    for layout in LAYOUTS:
        prefix = layout.prefix(names)
        if prefix is not None:
            return layout, prefix
    return None


def nearest(names: Collection[str]) -> tuple[Layout, float]:
    """The layout that most of the names look like, and their share."""
    best = max(LAYOUTS, key=lambda layout: layout.likeness(names))
    return best, best.likeness(names)
