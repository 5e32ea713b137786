"""Images of mixed sizes in one call, without padding: `ViT.forward_packed`.

The CPU's packed engine takes them in one native call. Otherwise, on GPUs and with gradients, the
fused operators take the rows of all images as one sequence with offsets, each operator in one call.
What belongs to an image and not to its rows (relative positions; drop-path and other dropouts while
training) makes them run image by image, as the module-by-module path always does. An image has the
bits that it has alone, wherever kernels are batch-invariant: on CPUs, all of vitkern's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import dispatch, layers

if TYPE_CHECKING:
    from .model import ViT

_WHO = "ViT.forward_packed"


def forward(model: ViT, images: Sequence[Tensor], features: bool) -> Tensor | list[Tensor]:
    """What `ViT.forward_packed` returns."""
    batches, each = _checked(model, images), features or model.config.pool == "none"
    if not batches:
        return [] if each else model(_nothing(model))
    found = _results(model, batches, features)
    if not features:
        found = [model.outward(y) for y in found]
    return [y[0] for y in found] if each else torch.cat(found)


def _checked(model: ViT, images: Sequence[Tensor]) -> list[Tensor]:
    """The images as batches of one, (1, C, Y, X); an error names the image that is bad."""
    if not isinstance(images, (list, tuple)):
        hint = "; pass list(images)" if isinstance(images, Tensor) else ""
        raise TypeError(
            f"{_WHO}: images must be a list or tuple of (C, Y, X) tensors, not a"
            f" {type(images).__name__}{hint}"
        )
    batches, weight = [], model.patch_embed_weight
    for i, image in enumerate(images):
        name = f"images[{i}]"
        if not isinstance(image, Tensor):
            raise TypeError(f"{_WHO}: {name} must be a torch.Tensor, got {type(image).__name__}")
        _check_shape(model, name, image)
        for what in ("dtype", "device"):
            ours, first = getattr(image, what), getattr(images[0], what)
            if ours != first:
                raise ValueError(
                    f"{_WHO}: {name} has {what} {ours}, images[0] {first}; one call takes one"
                    f" {what}: convert them with .to()"
                )
        batches.append(image[None])
        dispatch.check_image(model, batches[-1], weight, name)
    return batches


def _check_shape(model: ViT, name: str, image: Tensor) -> None:
    shape, channels = tuple(image.shape), model.config.channels
    if image.layout is not torch.strided:
        raise TypeError(f"{_WHO}: {name} has layout {image.layout}; pass {name}.to_dense()")
    if len(shape) != 3:
        hint = f"; pass its images one by one, as in [*{name}]" if len(shape) == 4 else ""
        raise ValueError(f"{_WHO}: {name} has shape {shape}, expected (C, Y, X){hint}")
    if model.has_own_embedding and shape[0] != channels:
        hint = ""
        if shape[2] == channels:
            hint = f"; it looks like (Y, X, C): pass {name}.permute(2, 0, 1), which copies nothing"
        raise ValueError(
            f"{_WHO}: {name} has {shape[0]} channels, the model takes {channels}{hint}"
        )


def _results(model: ViT, batches: list[Tensor], features: bool) -> list[Tensor]:
    """Of images (1, C, Y, X) in order: logits in parts of one or more images, or rows (1, S, D)."""
    # One tensor of another class decides for all; dtype and device are the same.
    first = next((image for image in batches if type(image) is not Tensor), batches[0])
    route = dispatch.choose(model, first, "mixed")
    if route.engine is not None:
        if features:
            return route.engine.mixed_tokens(batches)
        if model.config.pool == "none":
            return [model.forward_head(rows) for rows in route.engine.mixed_tokens(batches)]
        return [route.engine.mixed_logits(batches)]
    if route.path == "fused" and _by_offsets(model):
        return fused_forward(model, batches, features)
    return [model.forward_features(image) if features else model(image) for image in batches]


def _nothing(model: ViT) -> Tensor:
    c = model.config
    return model.patch_embed_weight.new_empty(0, c.channels, *c.pixels)


def _by_offsets(model: ViT) -> bool:
    """Whether all images can go through a block as one sequence."""
    if torch.compiler.is_compiling() or "relative" in model.config.position:
        return False
    dropped = any(isinstance(m, layers.Dropout) and m.rate for m in model.modules())
    return not dropped and not (model.training and model.grad_checkpointing)


@dispatch.at_precision
def fused_forward(model: ViT, batches: list[Tensor], features: bool) -> list[Tensor]:
    """`_results` by the fused operators, whatever `path` says: all rows are one (1, rows, D)."""
    dtype = dispatch.compute_dtype(model)
    embedded = [model.fused_embed(image, None) for image in batches]
    tokens = [rows.shape[1] for rows in embedded]
    grids, rope = [model.grid_of(image) for image in batches], model.rope
    x = torch.cat(embedded, 1)
    offsets = torch.tensor([0, *accumulate(tokens)], dtype=torch.int32, device=x.device)
    for i, block in enumerate(model.blocks):
        one: Any = block
        turned = None
        if rope is not None:
            turned = torch.cat([rope.table(i, grid, x) for grid in grids], 1)
        x = one.fused(x, None, None, dtype, offsets, turned)
    if features:
        return list(layers.layernorm(model.norm, x).split(tokens, 1))
    # Each by itself: what is no operator of a head runs in PyTorch, whose bits depend on the batch.
    return [model.fused_head(rows, None, dtype) for rows in x.split(tokens, 1)]
