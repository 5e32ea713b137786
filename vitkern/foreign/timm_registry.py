"""vitkern's models by timm.create_model: `vitkern.register_with_timm()` makes timm know them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..model import ViT
from ..names import timm_names


def register_with_timm() -> None:
    """Make `timm.create_model("vitkern.vit_base_patch16_224", ...)` build a `vitkern.ViT`.

    After "vitkern." comes a name of timm's, with its pretrained tag or without; arguments are
    timm's: pretrained (loaded by timm), num_classes, img_size, features_only, checkpoint_path, ...
    """
    from timm.models import is_model, register_model

    if not is_model("vitkern"):
        register_model(vitkern)


def vitkern(pretrained: bool = False, pretrained_cfg: Any = None, **options: Any) -> nn.Module:
    """timm's entry point: what follows "vitkern." in a name arrives as its pretrained tag."""
    from timm.models import build_model_with_cfg
    from timm.models.vision_transformer import checkpoint_filter_fn

    if not isinstance(pretrained_cfg, str) or not pretrained_cfg:
        known = ", ".join(f"vitkern.{name}" for name in timm_names()[:3])
        raise ValueError(f'timm.create_model: "vitkern" needs a model\'s name after it: {known}')
    name, _, tag = pretrained_cfg.partition(".")
    of_tag: Any = tag or None

    def build(**changes: Any) -> ViT:
        return ViT(name, **changes)

    return build_model_with_cfg(
        build, name, pretrained, pretrained_cfg=of_tag,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"}, **options,
    )  # fmt: skip
