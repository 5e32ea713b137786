"""From one decoded image to a (C, Y, X) array of bytes: random for training, a crop for evaluation.

Pillow's operations throughout: torchvision's transforms of Pillow images are the same calls, but
it cannot be imported beside every build of PyTorch. What is random comes from a generator that is
a function of seed, epoch and image, so that it does not depend on workers, processes or a restart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .settings import Data

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[int, int, int, int]  # top, left, bottom, right
ASPECT = (3 / 4, 4 / 3)  # of a random crop, as Inception's
TRIES = 10  # before a random crop falls back to the whole image


def random_view(
    image: Image, size: tuple[int, int], channels: int, data: Data, rng: np.random.Generator
) -> np.ndarray:
    """Crop, flip, rotate and colour by the settings' chances."""
    from PIL import Image, ImageOps

    image = image.convert("RGB" if channels == 3 else "L")
    box: tuple[float, float, float, float] | None = None
    if data.crop == "resized":
        box = _random_box(image.width, image.height, data.crop_least, rng)
        image = _resized(image, size, box)
    else:
        image = _resized(image, size, _centre(image.width, image.height, size, 1.0))
        if data.crop == "pad" and data.crop_padding:
            image = _padded_crop(image, data.crop_padding, rng)
    if data.flip and rng.random() < data.flip:
        image = ImageOps.mirror(image)
    if data.rotation:
        image = image.rotate(rng.uniform(-data.rotation, data.rotation), Image.Resampling.BILINEAR)
    if data.brightness or data.contrast or data.saturation or data.hue:
        image = _coloured(image, data, rng)
    return planes(image)


def plain_view(image: Image, size: tuple[int, int], channels: int, share: float) -> np.ndarray:
    """The middle of the image: `share` of its short side, resized to the model's size."""
    image = image.convert("RGB" if channels == 3 else "L")
    return planes(_resized(image, size, _centre(image.width, image.height, size, share)))


def planes(image: Image) -> np.ndarray:
    """(C, Y, X) bytes."""
    pixels = np.asarray(image, np.uint8)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def mixed(one: np.ndarray, other: np.ndarray, share: float, box: Box | None) -> np.ndarray:
    """`share` of one image and the rest of another: blended, or the other's pixels in the box."""
    if box is None:
        blend = one.astype(np.float32) * share + other.astype(np.float32) * (1 - share)
        return blend.round().astype(np.uint8)
    top, left, bottom, right = box
    result = one.copy()
    result[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    return result


def cut_box(size: tuple[int, int], share: float, rng: np.random.Generator) -> Box:
    """A box of 1 - share of the image, somewhere in it: top, left, bottom, right."""
    side = math.sqrt(1 - share)
    y, x = (int(rng.integers(length)) for length in size)
    half = [round(length * side / 2) for length in size]
    return (
        max(0, y - half[0]), max(0, x - half[1]),
        min(size[0], y + half[0]), min(size[1], x + half[1]),
    )  # fmt: skip


def _resized(image: Image, size: tuple[int, int], box: tuple[float, float, float, float]) -> Image:
    from PIL import Image

    y, x = size
    if box == (0, 0, image.width, image.height) and (image.height, image.width) == size:
        return image
    return image.resize((x, y), Image.Resampling.BICUBIC, box=box)


def _centre(
    width: int, height: int, size: tuple[int, int], share: float
) -> tuple[float, float, float, float]:
    """The largest box of the wanted shape in the middle, scaled by share."""
    scale = min(width / size[1], height / size[0]) * share
    wide, high = size[1] * scale, size[0] * scale
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, min(width, left + wide), min(height, top + high)


def _random_box(
    width: int, height: int, least: float, rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """A part of the image of random area and aspect."""
    for _ in range(TRIES):
        area = width * height * rng.uniform(least, 1)
        aspect = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        wide, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if wide <= width and high <= height:
            left, top = rng.uniform(0, width - wide), rng.uniform(0, height - high)
            return left, top, min(width, left + wide), min(height, top + high)
    return 0, 0, width, height


def _padded_crop(image: Image, padding: int, rng: np.random.Generator) -> Image:
    """Moved by up to `padding` pixels each way, black where nothing was."""
    right, down = (int(v) for v in rng.integers(-padding, padding + 1, 2))
    return image.crop((right, down, right + image.width, down + image.height))


def _coloured(image: Image, data: Data, rng: np.random.Generator) -> Image:
    """Brightness, contrast, saturation and hue in a random order, as torchvision's ColorJitter."""
    from PIL import Image, ImageEnhance

    changes = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "saturation": ImageEnhance.Color,
    }
    for name in rng.permutation([*changes, "hue"]):
        most = getattr(data, name)
        if not most:
            continue
        if name != "hue":
            image = changes[name](image).enhance(rng.uniform(1 - most, 1 + most))
        elif image.mode == "RGB":
            turn = round(rng.uniform(-most, most) * 255)
            hue, *rest = image.convert("HSV").split()
            turned = (np.asarray(hue).astype(np.int32) + turn) % 256
            bands = (Image.fromarray(turned.astype(np.uint8)), *rest)
            image = Image.merge("HSV", bands).convert("RGB")
    return image
