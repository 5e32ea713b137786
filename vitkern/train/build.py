"""The model and the optimizer that the settings ask for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..image_files import NORMALISATIONS
from ..model import ViT
from ..weights import timm
from .settings import Model, Optimizer, Schedule


def model(settings: Model, normalisation: str, classes: int) -> ViT:
    """A ViT that takes bytes; from a checkpoint, if one is named, whose positions are resized."""
    options: dict[str, Any] = dict(settings.options)
    channels = options.get("channels", 3)
    if channels not in (1, 3):
        raise ValueError(f"[model] channels must be 1 (grey) or 3 (RGB), not {channels!r:.80}")
    for name, three in zip(("mean", "std"), NORMALISATIONS[normalisation], strict=True):
        options[name] = three if channels == 3 else (sum(three) / 3,)
    if not settings.weights:
        made = ViT(settings.name, classes=classes, **options)
    else:
        state = timm.read(settings.weights)
        theirs = timm.classes(state, settings.weights)
        if not settings.new_head and theirs != classes:
            raise ValueError(
                f"{settings.weights} has {theirs} classes, the data {classes}: set new_head = true"
            )
        made = ViT(settings.name, classes=theirs, **options)
        try:
            timm.load(made, state, resize_positions=True)
        except RuntimeError as error:
            why = " ".join(str(error).split())[:300]
            raise ValueError(f"{settings.weights} does not fit {settings.name}: {why}") from error
        if settings.new_head:
            made.reset_classifier(classes)
    made.set_grad_checkpointing(settings.checkpointing)
    return made


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
