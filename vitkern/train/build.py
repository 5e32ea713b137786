"""The model and the optimizer that the settings ask for."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import RATES, ViTConfig
from ..image_files import NORMALISATIONS
from ..loading import load
from ..model import ViT
from ..weights import layouts, source
from .settings import Model, Optimizer, Schedule

# Layouts whose tensors alone leave much open: there the name of the architecture decides.
OPEN_LAYOUTS = ("timm", "eva", "beit")
# What is of the file or of the data, whatever architecture was named; and what both must agree on.
NOT_NAMED = ("image_size", "classes", "head", "representation_size", "mean", "std")
SHOWN = ("width", "depth", "patch_size", "channels")


def model(settings: Model, normalisation: str, classes: int) -> ViT:
    """A ViT that takes bytes; from a checkpoint, if one is named, whose positions are resized."""
    options: dict[str, Any] = dict(settings.options)
    if settings.weights:
        new = classes if settings.new_head else None
        made = from_weights(settings.weights, settings.name, options, normalisation, new)
        if made.config.classes != classes:
            raise ValueError(
                f"{settings.weights} has {made.config.classes} classes, the data {classes}:"
                f" set new_head = true"
            )
    else:
        pixels = pixels_of(normalisation, options.get("channels", 3))
        made = ViT(settings.name, classes=classes, **options, **pixels)
    made.set_grad_checkpointing(settings.checkpointing)
    return made


def pixels_of(normalisation: str, channels: int) -> dict[str, Any]:
    """mean and std for a model of so many channels."""
    if channels not in (1, 3):
        raise ValueError(f"[model] channels must be 1 (grey) or 3 (RGB), not {channels!r:.80}")
    both = zip(("mean", "std"), NORMALISATIONS[normalisation], strict=True)
    return {name: three if channels == 3 else (sum(three) / 3,) for name, three in both}


def from_weights(
    path: str | os.PathLike[str],
    name: str | None,
    options: Mapping[str, Any],
    normalisation: str | None = None,
    new_classes: int | None = None,
) -> ViT:
    """The model of a checkpoint that `vitkern.load` reads, in fp32 and in memory of its own.

    name: the architecture; it decides what the tensors do not tell and must be the file's in what
    they do. None: the file tells everything. Positions are moved to the image size of options or
    name. normalisation: None is the checkpoint's own, else ImageNet's. new_classes: those of a new
    head of zeros; None keeps the checkpoint's.
    """
    wanted = ViTConfig() if name is None else ViTConfig.named(name)
    wanted = wanted.replace(**options)
    told, size = dict(options), options.get("image_size")
    if name is not None:
        size = wanted.image_size
        told |= {rate: getattr(wanted, rate) for rate in RATES}
        if _leaves_open(path):
            fields = dataclasses.asdict(wanted)
            told |= {field: v for field, v in fields.items() if field not in NOT_NAMED}
    told.pop("image_size", None)
    try:
        found = load(path, classes=new_classes, image_size=size, dtype=torch.float32, **told)
    except ValueError as error:
        raise ValueError(f"{error} (read as {name})" if name else error) from error
    for field in SHOWN if name is not None else ():
        theirs, ours = getattr(found.config, field), getattr(wanted, field)
        if theirs != ours:
            raise ValueError(f"{path} is no {name}: its {field} is {theirs}, not {ours}")
    config = found.config
    if normalisation is not None or config.mean is None:
        config = config.replace(**pixels_of(normalisation or "imagenet", config.channels))
    made = ViT(config)  # `load` leaves tensors in the mapped file
    made.load_state_dict(found.state_dict())
    if new_classes is not None:
        made.reset_classifier(new_classes)  # `load` keeps a head of as many classes
    return made


def _leaves_open(path: str | os.PathLike[str]) -> bool:
    """Whether a file is of timm's names and has nothing beside its tensors that says more."""
    found = source.find(path)
    layout = layouts.detect(found.tensors)
    says = found.own_fields() is not None or "architecture" in found.config
    return layout is not None and layout[0].name in OPEN_LAYOUTS and not says


def optimizer(settings: Optimizer, module: nn.Module, undecayed: set[str]) -> torch.optim.Optimizer:
    """PyTorch's fused one; matrices decay, and the rest only with decay_all.

    undecayed: names of parameters that are never matrices to decay (tokens and positions).
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            spared = parameter.ndim < 2 or name in undecayed
            groups[settings.decay_all or not spared].append(parameter)
    rows = [
        {"params": parameters, "weight_decay": settings.weight_decay if decayed else 0.0}
        for decayed, parameters in groups.items()
        if parameters
    ]
    if settings.optimizer == "sgd":
        fused = not any(hasattr(p, "device_mesh") for p in module.parameters())
        # PyTorch has no fused SGD of sharded parameters.
        return torch.optim.SGD(rows, lr=settings.lr, momentum=settings.momentum, fused=fused)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(rows, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True)


def total_steps(settings: Schedule, each_epoch: int) -> int:
    """Steps of the whole run."""
    return settings.steps or settings.epochs * each_epoch


def learning_rate(settings: Schedule, highest: float, step: int, total: int, each: int) -> float:
    """Of step 0, 1, ...: a linear rise, then a decay that ends at final_lr with the last step."""
    warmup = settings.warmup or round(settings.warmup_epochs * each)
    if step < warmup:
        return highest * (step + 1) / warmup
    if settings.decay == "constant":
        return highest
    done = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    left = 1 - done if settings.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.final_lr + (highest - settings.final_lr) * left
