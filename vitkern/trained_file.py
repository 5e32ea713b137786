"""Model files of vitkern's own: safetensors that also say what the model is and names its classes.

`vitkern train` writes them, and the package brings one (pretrained/), which `shipped` reads.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .config import ViTConfig
from .loading import load
from .model import ViT
from .weights import files
from .weights.layouts.base import OWN_ENTRY, own_metadata

SHIPPED = pathlib.Path(__file__).parent / "pretrained" / "cifar10.safetensors"
PHOTOGRAPH = SHIPPED.with_name("cat.jpg")  # something to show it


class Trained(NamedTuple):
    """A model in eval mode with what its training knew."""

    model: ViT
    classes: list[str]
    eval_crop: float  # share of an image's short side that was evaluated


def metadata(config: ViTConfig, classes: Sequence[str], eval_crop: float) -> dict[str, str]:
    """What a file says besides its tensors."""
    return own_metadata(config, classes=list(classes), eval_crop=eval_crop)


def is_one(path: str | os.PathLike[str]) -> bool:
    """Whether a file is of this kind, by its contents."""
    try:
        return "classes" in json.loads(files.metadata(pathlib.Path(path))[OWN_ENTRY])
    except (ValueError, KeyError, TypeError):
        return False


def read(path: str | os.PathLike[str]) -> Trained:
    """The model of a file, in float32 whatever the file's dtype is."""
    path = pathlib.Path(path)
    files.read(path, "trained_file.read")  # which says what is wrong with a file, and maps it only
    try:
        about = json.loads(files.metadata(path)[OWN_ENTRY])
        config, names = ViTConfig(**about["config"]), [str(name) for name in about["classes"]]
        eval_crop = float(about.get("eval_crop", 1.0))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a model that vitkern train wrote ({error})") from error
    if len(names) != config.classes:
        raise ValueError(f"{path}: {len(names)} names for the model's {config.classes} classes")
    try:
        model = load(path, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(f"{path}: its tensors are not its model's: {error}") from error
    return Trained(model, names, eval_crop)


def shipped() -> Trained:
    """The package's own model: CIFAR-10's ten classes on 32x32 pixels (pretrained/README.md)."""
    if not SHIPPED.is_file():
        raise FileNotFoundError(f"this installation lacks {SHIPPED.name}: name weights yourself")
    return read(SHIPPED)
