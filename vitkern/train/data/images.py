"""Labelled images in memory or in files, their split and their selection."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ... import image_files

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Images:
    """N images with their labels: `pixels` (N, Y, X) or (N, Y, X, 3) uint8, or else `files`."""

    classes: tuple[str, ...]
    labels: np.ndarray  # (N,) int64
    pixels: np.ndarray | None = None
    files: Sequence[pathlib.Path] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Image:
        """One image, grey or RGB; a ValueError or OSError names the file that cannot be read."""
        if self.pixels is None:
            return image_files.read(self.files[index])
        try:
            from PIL import Image
        except ImportError as error:
            raise ImportError("training needs Pillow: pip install pillow") from error
        return Image.fromarray(self.pixels[index])

    def take(self, rows: np.ndarray) -> Images:
        """Some of the images."""
        pixels = None if self.pixels is None else self.pixels[rows]
        files = [self.files[i] for i in rows] if self.files else ()
        return Images(self.classes, self.labels[rows], pixels, files)


class Parts(NamedTuple):
    """What is trained on, and what is evaluated: None where the data does not say."""

    train: Images
    evaluation: Images | None


def split(images: Images, share: float, seed: int) -> Parts:
    """A share of every class for evaluation, the rest for training; the same for the same seed."""
    rng = np.random.default_rng([seed, 0x5911])
    held = []
    for label in range(len(images.classes)):
        rows = rng.permutation(np.flatnonzero(images.labels == label))
        held.append(rows[: round(share * len(rows))])
    chosen = np.sort(np.concatenate(held))
    rest = np.setdiff1d(np.arange(len(images)), chosen)
    if not len(chosen) or not len(rest):
        raise ValueError(
            f"{len(images)} images in {len(images.classes)} classes are too few to hold out"
            f" {share:.0%} for evaluation"
        )
    return Parts(images.take(rest), images.take(chosen))


def first_of_each_class(images: Images, count: int) -> Images:
    """About `count` images, the first of every class, in their order; all of them for 0."""
    if not count or count >= len(images):
        return images
    each = max(1, count // len(images.classes))
    rows = [np.flatnonzero(images.labels == k)[:each] for k in range(len(images.classes))]
    return images.take(np.sort(np.concatenate(rows)))
