"""A model together with what it wants of images and what its classes are called."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, NamedTuple

from .image_files import Statistics, prepare

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from .model import ViT


class Predictor(NamedTuple):
    """A model and what it wants of images; `source` is named in errors."""

    model: ViT
    names: list[str]
    normalisation: Statistics
    crop: float  # share of the short side
    source: str

    @property
    def title(self) -> str:
        """The source without its folders, which are nobody else's business."""
        return pathlib.PurePath(self.source).name

    def prepared(self, image: Image) -> Tensor:
        """The pixels (3, Y, X) that the model takes."""
        return prepare(image, self.model.config.pixels, self.normalisation, self.crop)
