"""Open a model for photographs: the package's own, or that of weights, with what its file says."""

from __future__ import annotations

import os
import pathlib
from typing import Any, NamedTuple

import torch

from . import packed_file, trained_file
from .config import ViTConfig
from .image_files import CROP_SHARE
from .loading import load
from .model import ViT
from .weights import files

# Fields that tensors do not show: the first four as the name has them, others where it is special.
_UNTOLD = ("heads", "activation", "norm_eps", "pool")
_SPECIAL = (
    "stem", "block", "rope", "rope_temperature", "rope_offset", "rope_x_first", "rope_grid",
    "rope_half", "pool_heads", "pool_mlp_width", "pool_prefix",
)  # fmt: skip
_SHOWN = ("width", "depth", "patch_size")


class Opened(NamedTuple):
    """A model in eval mode, in fp32 unless its file is packed."""

    model: ViT
    names: list[str] | None  # of the classes, where the file says them
    crop: float  # share of an image's short side that it was evaluated on
    source: str  # for errors


def opened(
    weights: str | os.PathLike[str] | None,
    name: str | None = None,
    *,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> Opened:
    """The model of what `vitkern.load` reads; None is the package's own.

    name: the architecture, for what tensors do not tell. classes, image_size: as of `vitkern.load`.
    """
    if weights is None:
        if name is not None:
            raise ValueError("--model names the architecture of --weights: give both")
        trained: trained_file.Trained | None = trained_file.shipped()
        weights = trained_file.SHIPPED
    else:
        own = name is None and trained_file.is_one(weights)
        trained = trained_file.read(weights) if own else None
    source = os.fspath(weights)
    names, crop = (trained.classes, trained.eval_crop) if trained else (None, CROP_SHARE)
    if trained is not None and classes is None and image_size is None:
        return Opened(trained.model, names, crop, source)
    if packed_file.is_packed(files.metadata(pathlib.Path(weights))):
        model = load(weights)  # whole as it is: it refuses every choice
        if image_size not in (None, model.config.image_size):
            raise ValueError(f"{weights} is packed for images of {model.config.image_size}")
        return Opened(model, names, crop, source)
    asked = {} if name is None else _untold(name, source)
    model = load(weights, classes=classes, image_size=image_size, dtype=torch.float32, **asked)
    if name is not None:
        wanted = ViTConfig.named(name)
        for field in _SHOWN:
            found, right = getattr(model.config, field), getattr(wanted, field)
            if found != right:
                raise ValueError(f"{source} is no {name}: its {field} is {found}, not {right}")
    return Opened(model, names, crop, source)


def _untold(name: str, source: str) -> dict[str, Any]:
    try:
        named, plain = ViTConfig.named(name), ViTConfig()
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    special = [key for key in _SPECIAL if getattr(named, key) != getattr(plain, key)]
    return {key: getattr(named, key) for key in (*_UNTOLD, *special)}
