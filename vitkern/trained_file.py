"""Model files of vitkern's own: safetensors that also say what the model is and names its classes.

`vitkern train` writes them, and the package brings one (pretrained/), which `shipped` reads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from .config import ViTConfig
from .model import ViT
from .weights import timm

SHIPPED = pathlib.Path(__file__).parent / "pretrained" / "cifar10.safetensors"
ENTRY = "vitkern"  # of the metadata


class Trained(NamedTuple):
    """A model in eval mode with what its training knew."""

    model: ViT
    classes: list[str]
    eval_crop: float  # share of an image's short side that was evaluated


def metadata(config: ViTConfig, classes: Sequence[str], eval_crop: float) -> dict[str, str]:
    """What a file says besides its tensors.

    In one entry: safetensors writes several in a random order, and files could not be compared.
    """
    about = {
        "config": dataclasses.asdict(config),
        "classes": list(classes),
        "eval_crop": eval_crop,
    }
    return {ENTRY: json.dumps(about)}


def is_one(path: str | os.PathLike[str]) -> bool:
    """Whether a file is of this kind, by its contents."""
    try:
        return "classes" in json.loads(_metadata(path)[ENTRY])
    except (ValueError, OSError, KeyError, TypeError):
        return False


def read(path: str | os.PathLike[str]) -> Trained:
    """The model of a file, in float32 whatever the file's dtype is."""
    try:
        about = json.loads(_metadata(path)[ENTRY])
        config, names = ViTConfig(**about["config"]), [str(name) for name in about["classes"]]
        eval_crop = float(about.get("eval_crop", 1.0))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a model that vitkern train wrote ({error})") from error
    if len(names) != config.classes:
        raise ValueError(f"{path}: {len(names)} names for the model's {config.classes} classes")
    tensors = timm.read(path)
    model = ViT(config, device="meta")  # compared before anything of its size is allocated
    wanted = {name: p.shape for name, p in model.named_parameters()}
    odd = sorted(wanted.keys() ^ tensors.keys())
    odd = odd or [name for name, shape in wanted.items() if tensors[name].shape != shape]
    if odd:
        raise ValueError(f"{path}: its tensors are not its model's: {', '.join(odd[:3])}, ...")
    model.load_state_dict({name: t.float() for name, t in tensors.items()}, assign=True)
    return Trained(model.eval().requires_grad_(), names, eval_crop)


def shipped() -> Trained:
    """The package's own model: CIFAR-10's ten classes on 32x32 pixels (pretrained/README.md)."""
    if not SHIPPED.is_file():
        raise FileNotFoundError(f"this installation lacks {SHIPPED.name}: name weights yourself")
    return read(SHIPPED)


def _metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        needs = f"{path}: reading it needs safetensors: pip install 'vitkern[weights]'"
        raise ImportError(needs) from error
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged, or not safetensors: {error}") from error
    except (RuntimeError, MemoryError) as error:  # torch cannot map that much
        raise ValueError(f"{path}: does not fit into memory: {error}") from error
