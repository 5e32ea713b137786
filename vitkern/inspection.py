"""What a Vision Transformer learnt, as tensors: the quantities behind the paper's figures.

Attention maps are recomputed beside the forward: the rows that enter each block come from the path
that the model takes anyway, so that nothing is switched to a slower one, and a block of queries is
held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import layers as modules

if TYPE_CHECKING:
    from .model import ViT

QUERIES = 256  # rows of a map that are computed at once
LARGEST_MAPS = 8 << 30  # bytes of one answer; more is a mistake


@torch.no_grad()
def attention_maps(
    model: ViT,
    images: Tensor,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
) -> Tensor:
    """Attention weights (L, B, H, S, S): of the chosen blocks and heads, queries before keys.

    layers, heads: one number, several, or None for all; negative ones count from the end. Each row
    sums to 1. Dropout is left out, also in training mode.
    """
    c = model.config
    chosen = _chosen(layers, len(model.blocks), "layers")
    kept = _chosen(heads, c.heads, "heads")
    B, (down, across) = images.shape[0], model.grid_of(images)
    S = c.prefix_tokens + down * across
    size = len(chosen) * B * len(kept) * S * S * 4
    if size > LARGEST_MAPS:
        raise ValueError(
            f"attention_maps: {size / 2**30:.1f} GiB of maps (L {len(chosen)}, B {B},"
            f" H {len(kept)}, S {S}): ask for fewer layers, heads or images"
        )
    found = images.new_empty(len(chosen), B, len(kept), S, S, dtype=torch.float32)
    places = {layer: [i for i, one in enumerate(chosen) if one == layer] for layer in chosen}
    for layer, maps in each_map(model, images, sorted(places)):
        for i in places[layer]:
            found[i] = maps[:, kept]
    return found


@torch.no_grad()
def each_map(
    model: ViT, images: Tensor, layers: Sequence[int] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """(block, its maps (B, H, S, S)), one block after the other, so that one is held at a time."""
    chosen = range(len(model.blocks)) if layers is None else layers
    if not chosen:
        return
    model.check_weights("attention_maps")
    training = [module for module in model.modules() if module.training]
    model.eval()  # no dropout in the rows between blocks
    try:
        entering = _entering_rows(model, images, chosen)
    finally:
        for module in training:
            module.training = True
    for layer, x in zip(chosen, entering, strict=True):
        yield layer, _weights(model, layer, x, model.grid_of(images))


def _entering_rows(model: ViT, images: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """The rows (B, S, D) that enter each block."""
    before = [layer - 1 for layer in layers if layer]
    first, kept = model.forward_blocks(images, before, max(layers, default=0))
    if 0 not in layers:
        return kept
    if before:
        first, _ = model.forward_blocks(images, [], 0)
    return [first, *kept]


def _weights(model: ViT, layer: int, x: Tensor, grid: tuple[int, int]) -> Tensor:
    block: Any = model.blocks[layer]
    if not hasattr(block, "queries_and_keys"):
        raise ValueError(
            f"attention_maps: blocks.{layer} is a {type(block).__name__}, whose attention is"
            f" unknown"
        )
    q, k = block.queries_and_keys(x, model.rotation(layer, grid))
    q, k, bias = q.float(), k.float(), model.attention_bias(layer, *grid)
    S = q.shape[2]
    maps = q.new_empty(*q.shape[:3], S)
    for start in range(0, S, QUERIES):
        rows = slice(start, start + QUERIES)
        own = None if bias is None else bias[:, rows]
        maps[:, :, rows] = modules.attention_weights(q[:, :, rows], k, own)
    return maps


@torch.no_grad()
def attention_distances(model: ViT, images: Tensor) -> Tensor:
    """Mean distance in pixels between a patch and what it attends to: (L, H).

    Weights of class and register tokens are left out, and the others scaled to sum to 1.
    """
    c = model.config
    T, p = c.prefix_tokens, c.patch_pixels
    down, across = model.grid_of(images)
    y, x = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
    places = p * torch.stack([y, x], -1).flatten(0, 1).to(images.device, torch.float32)
    apart = torch.cdist(places, places)  # (N, N)
    found = []
    for _, maps in each_map(model, images):
        weights = maps[:, :, T:, T:]
        total = weights.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        found.append(((weights * apart).sum(-1) / total).mean((0, 2)))
    return torch.stack(found) if found else torch.empty(0, c.heads)


@torch.no_grad()
def rollout(model: ViT, images: Tensor) -> Tensor:
    """Where the output looks, through all blocks: (B, y, x), the largest of an image is 1.

    Attention rollout: each block's maps, averaged over heads, with as much of the token itself for
    the residual, multiplied from the first block to the last. The output's row is the class
    token's, or the mean of the patches where they are pooled.
    """
    c, T = model.config, model.config.prefix_tokens
    down, across = model.grid_of(images)
    joint: Tensor | None = None
    for _, maps in each_map(model, images):
        step = (maps.mean(1) + torch.eye(maps.shape[-1], device=maps.device)) / 2
        joint = step if joint is None else step @ joint
    if joint is None:
        raise ValueError("rollout: the model has no blocks")
    row = joint[:, 0] if c.pool == "token" else joint[:, T:].mean(1)
    seen = row[:, T:]
    return (seen / seen.amax(1, keepdim=True)).view(-1, down, across)


@torch.no_grad()
def filters(model: ViT, count: int = 28) -> Tensor:
    """Principal components (count, C, py, px) of the patch embedding's filters, largest first."""
    weight = model.patch_embed_weight.detach().float().cpu()
    flat = weight.flatten(1)
    *_, components = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    return components[:count].view(-1, *weight.shape[1:])


@torch.no_grad()
def position_similarity(model: ViT) -> Tensor | None:
    """Cosine similarity (y, x, y, x) of every patch's position with every other's, or None."""
    down, across = model.config.grid
    _, position = model.position_rows(down, across)
    if position is None:
        return None
    rows = torch.nn.functional.normalize(position.float().cpu(), dim=-1)
    return (rows @ rows.mT).view(down, across, down, across)


def _chosen(given: int | Sequence[int] | None, count: int, what: str) -> list[int]:
    if given is None:
        return list(range(count))
    numbers = [given] if isinstance(given, int) else list(given)
    for number in numbers:
        if not isinstance(number, int) or not -count <= number < count:
            raise ValueError(f"attention_maps: {what} {number!r:.40}: there are {count}, from 0")
    return [number % count for number in numbers]
