"""What every contestant of a case is given: the model's configuration, weights and images."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..config import ViTConfig
from ..model import ViT
from . import timm_import

CASE_FILE = "case.pt"  # in the folder of a case: config, state, images, truth


class LeftOut(Exception):
    """Why a contestant does not take part, in words. `missing`: it is not installed."""

    def __init__(self, why: str, missing: bool = False) -> None:
        super().__init__(why)
        self.missing = missing


class Task(NamedTuple):
    """One case for one contestant."""

    config: ViTConfig
    state: dict[str, Tensor]
    images: Tensor  # (B, C, Y, X), fp32
    truth: Tensor  # logits of the first images in float64
    precision: str
    threads: int
    folder: pathlib.Path  # for files that contestants of a case share

    @property
    def modules(self) -> str:
        """Whose modules peers compute: "timm" or "vitkern"."""
        return "timm" if importlib.util.find_spec("timm") else "vitkern"

    @classmethod
    def read(cls, folder: pathlib.Path, precision: str, threads: int) -> Task:
        case = torch.load(folder / CASE_FILE, weights_only=True)
        config = ViTConfig(**case.pop("config"))
        return cls(config, **case, precision=precision, threads=threads, folder=folder)

    def plain_model(self) -> nn.Module:
        """The weights of this task in plain PyTorch: timm's model or, without timm, vitkern's own
        modules by their reference path. `modules` says which.
        """
        if self.modules != "timm":
            model = ViT(self.config)
            model.path = "reference"
            model.load_state_dict(self.state)
            return model.eval()
        timm_import.prepare()
        timm = imported("timm.models.vision_transformer", "timm")
        c = self.config
        model = timm.VisionTransformer(
            img_size=c.image_size, patch_size=c.patch_size, embed_dim=c.width, depth=c.depth,
            num_heads=c.heads, mlp_ratio=c.mlp_width / c.width, num_classes=c.classes,
        )  # fmt: skip
        model.load_state_dict(self.state)
        return model.eval()


def imported(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LeftOut(
            f"{package} cannot be imported ({error}): pip install {package}", missing=True
        ) from error


def require(package: str) -> None:
    """The same without importing it: its memory would be held against whoever asks."""
    if importlib.util.find_spec(package) is None:
        raise LeftOut(f"{package} is not installed: pip install {package}", missing=True)
