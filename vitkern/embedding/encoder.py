"""Encoder: a model with everything that turns a photograph into its vector.

What that is can be written down (`recipe`) and followed again (`Encoder.of_recipe`): vectors can
only be compared with vectors of the same recipe.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from .. import __version__, image_files, opening, packed_file
from ..image_files import NORMALISATIONS, Statistics
from ..model import ViT

if TYPE_CHECKING:
    from PIL.Image import Image

TOKENS = ("cls", "mean", "all")
PRECISIONS = ("fp32", "tf32", "bf16", "int8")
# What two encoders must share for their vectors to be comparable; the rest of a recipe is a note.
ESSENTIAL = ("weights_sha256", "config", "mean", "std", "crop", "precision", "tokens", "normalise")


class Encoder:
    """Photographs in, vectors out; `Encoder.open` makes one.

    model: in eval mode. normalisation: mean and std of the pixels. crop: share of the short side
    that is seen. tokens: "cls", "mean" of the patches, or "all". normalise: to length 1.
    """

    def __init__(
        self, model: ViT, *, normalisation: Statistics, crop: float, tokens: str, normalise: bool,
        weights: str | None = None, variant: str | None = None,
    ) -> None:  # fmt: skip
        c = model.config
        if c.channels != 3:
            raise ValueError(f"a model of {c.channels} channels; photographs have 3")
        if tokens not in TOKENS:
            raise ValueError(f"tokens must be one of {', '.join(TOKENS)}, not {tokens!r:.40}")
        if tokens == "cls" and not c.class_token:
            raise ValueError("tokens cls: this model has no class token: take mean or all")
        self.model, self.normalisation, self.crop = model, normalisation, crop
        self.tokens, self.normalise = tokens, normalise
        self.weights, self.variant = weights, variant
        self._sha256: str | None = None

    @classmethod
    def open(
        cls,
        weights: str | os.PathLike[str] | None = None,
        *,
        model: str | None = None,
        image_size: int | None = None,
        tokens: str | None = None,
        precision: str | None = None,
        normalise: bool = False,
        normalisation: str | Statistics | None = None,
        device: str = "cpu",
    ) -> Encoder:
        """The encoder of a checkpoint that `vitkern.load` reads; None is the package's own model.

        model: a name (B/16) for what tensors do not tell, such as the number of heads.
        image_size: positions are moved to it. tokens: None is what the model itself pools.
        precision: where None "fp32", or that of a file which `save_packed` wrote.
        normalisation: "imagenet", "half" or "clip", or mean and std; None is the checkpoint's own,
        ImageNet's where it says none.
        """
        if precision is not None and precision not in PRECISIONS:
            raise ValueError(
                f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r:.40}"
            )
        if isinstance(image_size, list):
            image_size = tuple(image_size)
        vit, _, crop, source = opening.opened(weights, model, classes=0, image_size=image_size)
        packed_file.with_parameters(vit, f"embed: {source}: it")
        vit.precision = precision or vit.precision or "fp32"
        c = vit.config
        if tokens is None:
            tokens = "mean" if c.pool == "mean" or not c.class_token else "cls"
        if isinstance(normalisation, str):
            if normalisation not in NORMALISATIONS:
                names = ", ".join(NORMALISATIONS)
                raise ValueError(f"normalisation must be one of {names}, not {normalisation!r:.40}")
            normalisation = NORMALISATIONS[normalisation]
        own = (c.mean, c.std) if c.mean is not None and c.std is not None else None
        try:
            vit.to(device)
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise ValueError(f"device {device}: {str(error).splitlines()[0]}") from error
        return cls(
            vit, normalisation=normalisation or own or NORMALISATIONS["imagenet"], crop=crop,
            tokens=tokens, normalise=normalise,
            weights=None if weights is None else _place(weights), variant=model,
        )  # fmt: skip

    # ---- photographs to vectors ----

    def pixels(self, image: Image) -> np.ndarray:
        """What the model sees of an image: bytes (Y, X, 3). Safe in any thread; torch is not used.

        The same evaluation crop as `vitkern predict` takes.
        """
        return np.asarray(image_files.crop(image, self.model.config.pixels, self.crop))

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """The vectors of bytes (B, Y, X, 3): float32 (B, D), or (B, S, D) of all tokens."""
        if not len(pixels):
            return np.zeros((0, *self.shape), np.float32)
        with torch.inference_mode():
            plain = np.require(pixels, np.uint8, ["C", "W"])  # torch warns of read-only arrays
            bytes_ = torch.from_numpy(plain).to(self.model.device)
            images = image_files.normalised(bytes_, self.normalisation).to(self.model.dtype)
            vectors = self._chosen(self.model.forward_features(images)).float()
            if self.normalise:
                vectors = F.normalize(vectors, dim=-1)
            if not vectors.isfinite().all():
                raise ValueError(
                    f"{self.weights or 'the own model'}: the model answers NaN or Inf: its weights"
                    " are bad, or its precision too low"
                )
            return vectors.cpu().numpy()

    def _chosen(self, rows: torch.Tensor) -> torch.Tensor:
        """Of the rows (B, S, D); a norm that the model applies after pooling is applied."""
        if self.tokens == "all":
            return rows
        prefix = self.model.config.prefix_tokens
        return self.model.fc_norm(rows[:, 0] if self.tokens == "cls" else rows[:, prefix:].mean(1))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image's vectors: (D,), or (S, D) of all tokens."""
        c = self.model.config
        return (c.tokens, c.width) if self.tokens == "all" else (c.width,)

    # ---- written down ----

    @property
    def sha256(self) -> str:
        """Of the parameters' names, dtypes, shapes and bytes: the same in whatever layout."""
        if self._sha256 is None:
            found = hashlib.sha256()
            for name, tensor in sorted(self.model.state_dict().items()):
                if name.startswith(("head.", "head_norm.")):
                    continue  # vectors do not depend on the classifier, which may be left out
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                plain = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                found.update(plain.numpy().data)
            self._sha256 = found.hexdigest()
        return self._sha256

    @property
    def recipe(self) -> dict[str, Any]:
        """What made the vectors, as JSON has it: ESSENTIAL, and where the weights were."""
        config = dataclasses.asdict(self.model.config)
        for name in ("classes", "head", "representation_size", "mean", "std"):
            del config[name]  # the classifier's, or said below
        mean, std = ([float(value) for value in values] for values in self.normalisation)
        made = {
            "vitkern": __version__, "weights": self.weights, "model": self.variant,
            "weights_sha256": self.sha256, "config": config, "mean": mean, "std": std,
            "crop": self.crop, "precision": self.model.precision, "tokens": self.tokens,
            "normalise": self.normalise,
        }  # fmt: skip
        return json.loads(json.dumps(made))  # tuples as the lists that a file gives back

    @classmethod
    def of_recipe(
        cls,
        recipe: dict[str, Any],
        weights: str | os.PathLike[str] | None = None,
        device: str = "cpu",
    ) -> Encoder:
        """The encoder that a recipe describes; an error where the weights are not those any more.

        weights: where they are now, if not where they were.
        """
        try:
            found = cls.open(
                weights if weights is not None else recipe["weights"],
                model=recipe["model"], image_size=recipe["config"]["image_size"],
                tokens=recipe["tokens"], precision=recipe["precision"],
                normalise=recipe["normalise"], normalisation=(recipe["mean"], recipe["std"]),
                device=device,
            )  # fmt: skip
            found.crop = recipe["crop"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a recipe of vitkern embed ({error!r})") from error
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}: name the weights' place with --weights") from error
        odd = differences(recipe, found.recipe)
        if odd:
            raise ValueError(
                f"{found.weights or 'the own model'} did not make these vectors: {odd}"
            )
        return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """How two recipes differ in what counts, in words; "" where they do not."""
    said = []
    for name in ESSENTIAL:
        a, b = before.get(name), now.get(name)
        if a == b:
            continue
        if name == "config" and isinstance(a, dict) and isinstance(b, dict):
            names = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
            said += [f"{key} was {a.get(key)}, is {b.get(key)}" for key in names]
        elif name == "weights_sha256":
            said.append(
                f"the weights are others (SHA-256 {str(a)[:12]}... was, {str(b)[:12]}... is)"
            )
        else:
            said.append(f"{name} was {a}, is {b}")
    return "; ".join(said)


def _place(weights: str | os.PathLike[str]) -> str:
    """A path that stays right in another folder; a name on the Hub as it is."""
    return os.path.abspath(weights) if os.path.exists(weights) else os.fspath(weights)
