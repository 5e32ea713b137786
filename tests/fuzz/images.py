"""Images for a model, right and wrong: each is (description, function of the model)."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from vitkern import ViT

from . import odd
from .odd import Odd

Picture = tuple[str, Callable[[ViT], Tensor]]


def draw(rng: random.Random) -> Picture:
    layout = rng.choice(odd.LAYOUTS) if rng.random() < 0.5 else "packed"
    values = rng.choice(odd.VALUES) if rng.random() < 0.1 else "normal"
    B, seed = rng.choice((1, 1, 2, 3, 5, 0)), rng.randrange(2**31)
    pixels = rng.random() < 0.15
    last = rng.random() < 0.2
    wrong = rng.choice(WRONG) if rng.random() < 0.25 else None
    words = [f"B={B}", layout, values, *(["uint8"] * pixels), *(["channels-last"] * last)]
    words += [wrong[0]] if wrong else []

    def make(model: ViT) -> Tensor:
        c = model.config
        size = (B, c.channels, *c.pixels)
        dtype = "uint8" if pixels else str(model.dtype)[6:]
        image = Odd(size, dtype, layout, values, seed=seed).make()
        if last and image.layout == torch.strided:
            image = image.contiguous(memory_format=torch.channels_last)
        return wrong[1](image) if wrong else image

    return " ".join(words), make


def _layout(name: str) -> Picture:
    return name, lambda image: odd._laid_out(image, name)


WRONG: tuple[tuple[str, Callable], ...] = (
    ("without a batch", lambda image: image[0] if len(image) else image[:, 0]),
    ("five axes", lambda image: image[None]),
    ("a number", lambda image: torch.tensor(1.0)),
    ("no channels", lambda image: image[:, :0]),
    ("one channel more", lambda image: torch.cat([image, image[:, :1]], 1)),
    ("last channels", lambda image: image.permute(0, 2, 3, 1)),
    ("a row less", lambda image: image[:, :, 1:]),
    ("no rows", lambda image: image[:, :, :0]),
    ("twice the rows", lambda image: torch.cat([image, image], 2)),
    ("twice the columns", lambda image: torch.cat([image, image], 3)),
    ("2**40 images", lambda image: image[:1, :, :1, :1].expand(2**40, *image.shape[1:])),
    ("2**40 empty rows", lambda image: torch.empty(0, image.shape[1], 2**40, image.shape[3])),
    ("half", lambda image: image.half()),
    ("double", lambda image: image.double()),
    ("int64", lambda image: image.long()),
    ("bool", lambda image: image > 0),
    ("complex", lambda image: image + 1j),
    ("bfloat16", lambda image: image.bfloat16()),
    ("float8", lambda image: image.float().to(torch.float8_e4m3fn)),
    ("on meta", lambda image: image.to("meta")),
    ("a list", lambda image: [[1.0]]),
    ("None", lambda image: None),
    ("an array", lambda image: image.float().numpy()),
    ("requires grad", lambda image: image.float().clone().requires_grad_()),
    *[_layout(name) for name in odd.FOREIGN_LAYOUTS],
)  # fmt: skip
