"""What a model accepts as an image: clear errors for everything else."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import ViTConfig


def check(c: ViTConfig, image: Tensor, weight: Tensor, autocast: bool) -> None:
    """Refuse an image that the patch projection `weight` cannot take, and say what to do."""
    if not isinstance(image, Tensor):
        raise TypeError(f"ViT: image must be a torch.Tensor, got {type(image).__name__}")
    if image.layout is not torch.strided:
        raise TypeError(f"ViT: image has layout {image.layout}; pass image.to_dense()")
    shape = tuple(image.shape)
    if image.ndim != 4:
        hint = "; add a batch axis with image[None]" if image.ndim == 3 else ""
        raise ValueError(f"ViT: image has shape {shape}, expected (B, C, Y, X){hint}")
    if shape[1] != c.channels:
        hint = ""
        if shape[3] == c.channels:
            hint = (
                "; it looks like (B, Y, X, C): pass image.permute(0, 3, 1, 2), which copies nothing"
            )
        raise ValueError(f"ViT: image has {shape[1]} channels, the model takes {c.channels}{hint}")
    _check_size(c, shape[2:])
    _check_dtype(c, image, weight, autocast)
    if image.device != weight.device:
        raise ValueError(
            f"ViT: image is on {image.device}, the model on {weight.device};"
            f" move one of them with .to({str(weight.device)!r})"
        )


def stored(image: Tensor) -> Tensor:
    """The image with its values in memory, where kernels read them.

    A lazy minus sign (of a conjugate's imaginary part) is not, nor are torch's lazy zeros.
    """
    return image.clone() if image.is_neg() or image._is_zerotensor() else image


def _check_size(c: ViTConfig, size: tuple[int, int]) -> None:
    if c.dynamic_image_size:
        if any(s % c.patch_size or s == 0 for s in size):
            raise ValueError(
                f"ViT: image is {size[0]}x{size[1]} pixels, each side must be a multiple of the"
                f" patch size {c.patch_size}; resize or crop it"
            )
        return
    wanted = tuple(c.patch_size * n for n in c.grid)
    if size != wanted:
        raise ValueError(
            f"ViT: image is {size[0]}x{size[1]} pixels, the model takes {wanted[0]}x{wanted[1]};"
            f" resize it, or call model.set_input_size({tuple(size)}), or build the model with"
            f" dynamic_image_size=True"
        )


def _check_dtype(c: ViTConfig, image: Tensor, weight: Tensor, autocast: bool) -> None:
    if image.dtype == torch.uint8:
        if c.mean is None:
            raise ValueError(
                "ViT: uint8 images need the pixel mean and std; build the model with them, such as"
                " mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), or pass normalised floats"
            )
        return
    if not image.is_floating_point():
        raise TypeError(f"ViT: image is {image.dtype}, expected {weight.dtype} or uint8")
    if image.dtype != weight.dtype and not (autocast and image.dtype != torch.float64):
        raise TypeError(
            f"ViT: image is {image.dtype}, the model {weight.dtype};"
            f" convert it with image.to({weight.dtype})"
        )
