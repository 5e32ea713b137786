"""Measures what a block keeps between forward and backward, beside timm's: docs/training.md.

    python -m tools.saved_memory            # writes the table between the page's markers
    python -m tools.saved_memory --check    # status 1 if the page is old

Autograd's hooks see every tensor that a forward saves. Storages count once, however many views of
them are saved, and parameters do not count. A middle block's share is what a model of three blocks
keeps beyond one of two; what it keeps for an image, what two images add to one. The rest is kept
once for all images of a step: weights that autocast has cast to bf16. Bytes do not depend on the
machine or its load.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tools import page_table
from vitkern import ViT, ViTConfig
from vitkern.bench.timm_import import prepare

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "training.md"
BEGIN, END = "<!-- saved memory -->", "<!-- end of saved memory -->"
MODELS = ("Ti/16", "S/16", "B/16")
CONTESTANTS = ("vitkern", "eager PyTorch")
PRECISIONS = {
    "fp32": "fp32",
    "autocast": "bf16 by autocast",
    "bf16": "bf16 weights",
}  # and their names in the table


class Kept(NamedTuple):
    """Bytes of a middle block."""

    an_image: int
    a_step: int  # for all images together


def kept(contestant: str, name: str, precision: str) -> Kept:
    """What a block of a model keeps; precision: one of PRECISIONS."""
    config = ViTConfig.named(name)
    models = [made(contestant, config.replace(depth=depth), precision) for depth in (2, 3)]
    one, two = (
        saved_bytes(models[1], images, precision) - saved_bytes(models[0], images, precision)
        for images in (1, 2)
    )
    return Kept(two - one, one - (two - one))


def made(contestant: str, config: ViTConfig, precision: str) -> nn.Module:
    """A model in training mode."""
    torch.manual_seed(0)
    model: nn.Module = ViT(config) if contestant == "vitkern" else _timm_model(config)
    return model.train().to(torch.bfloat16 if precision == "bf16" else torch.float32)


def _timm_model(config: ViTConfig) -> nn.Module:
    prepare()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=config.image_size, patch_size=config.patch_size, num_classes=config.classes,
        embed_dim=config.width, depth=config.depth, num_heads=config.heads,
        mlp_ratio=config.mlp_width / config.width,
    )  # fmt: skip


def saved_bytes(model: nn.Module, images: int, precision: str) -> int:
    """Bytes of all storages that a forward of so many images saves, without the parameters'."""
    first = next(model.parameters())
    pixels = torch.zeros(images, 3, 224, 224, dtype=first.dtype)
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:  # autograd holds it, so that no address comes twice
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            result = model(pixels)
    for parameter in model.parameters():
        held.pop(parameter.untyped_storage().data_ptr(), None)
    del result
    return sum(held.values())


def lines(models: Iterable[str]) -> list[str]:
    """Rows of the table."""
    found = []
    for name, precision in itertools.product(models, PRECISIONS):
        ours, theirs = (kept(contestant, name, precision) for contestant in CONTESTANTS)
        cells = [name, PRECISIONS[precision]]
        cells += [_megabytes(it.an_image) for it in (ours, theirs)]
        cells += [f"{ours.an_image / theirs.an_image:.2f}"]
        cells += [_megabytes(it.a_step) for it in (ours, theirs)]
        found.append("| " + " | ".join(cells) + " |\n")
    return found


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 5000 else "–"


def table() -> str:
    """Markdown, a row for each model and precision."""
    head = "| a block of | precision | an image: vitkern | eager PyTorch | share |"
    head += " once a step: vitkern | eager PyTorch |\n|---|---|" + "--:|" * 5 + "\n"
    return head + "".join(lines(MODELS))


def main(arguments: list[str] | None = None) -> int:
    return page_table.main(__doc__, PAGE, (BEGIN, END), table, arguments)


if __name__ == "__main__":
    sys.exit(main())
