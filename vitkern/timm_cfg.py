"""A model's `pretrained_cfg`: how timm's tools are told to prepare images for it."""

from __future__ import annotations

import sys
from typing import Any

from .config import ViTConfig


def described(c: ViTConfig, name: str) -> dict[str, Any]:
    """What timm says of `name`, if timm is loaded and knows it, with the sizes of `c`.

    timm is not imported for it: whoever reads a `pretrained_cfg` has it loaded.
    """
    size = (c.channels, *c.pixels)
    known = _timms(name.removeprefix("timm/"))
    own: dict[str, Any] = {
        "input_size": size,
        "num_classes": c.classes,
        "fixed_input_size": not c.dynamic_image_size,
        "first_conv": "patch_embed.proj" if c.stem == "none" else "patch_embed.backbone.0",
        "classifier": "head",
    }
    if c.mean is not None:
        own |= {"mean": c.mean, "std": c.std}
    if tuple(known.get("input_size") or size) != size:
        known.pop("test_input_size", None)
    return {**known, **own}


def _timms(name: str) -> dict[str, Any]:
    timm = sys.modules.get("timm.models")
    found = timm and timm.get_pretrained_cfg(name)
    return found.to_dict() if found else {}
