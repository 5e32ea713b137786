"""Sequences of changes to a small model; after each one all paths must agree with the modules.

The reference path calls every module in plain PyTorch, so it is the truth about whatever was done
to a model. Where it refuses, the other paths must refuse, too.
"""

from __future__ import annotations

import copy
import pathlib
import random
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

import vitkern
from tests.model.tiny_models import OPTIONS, tiny
from vitkern import ViT
from vitkern.precision import CHOICES, PRECISIONS

from . import images, model_changes, odd
from .outcome import OK, REFUSED, TOLERANCE, Case, Wrong, check_close, judge

PACKAGE = str(pathlib.Path(vitkern.__file__).parent)
CHOSEN = (None, None, None, *CHOICES)
DTYPES = ("float32", "float32", "float32", "bfloat16", "float64", "float16")


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    option = rng.choice(list(OPTIONS))
    dtype, precision = rng.choice(DTYPES), rng.choice(CHOSEN)
    extra = {"depth": rng.choice((1, 2))} if "depth" not in OPTIONS[option] else {}
    if rng.random() < 0.3:
        extra["dynamic_image_size"] = True
    if rng.random() < 0.3 and option != "one-channel":
        extra |= {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    seed = rng.randrange(2**31)
    steps: list[tuple[str, Callable[[ViT], None]]] = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        steps.append(rng.choice(model_changes.CHANGES)(rng))
    pictures = [images.draw(rng) for _ in range(rng.choice((1, 2)))]
    threads, gradients = rng.choice((1, 2, 3)), rng.random() < 0.2
    about = [f"{option} {dtype} {extra or ''} precision={precision} {threads} threads"]
    about += [name for name, _ in steps] + [f"image {name}" for name, _ in pictures]
    about += ["with gradients"] if gradients else []

    def run() -> str:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        model = tiny(getattr(torch, dtype), seed, **{**OPTIONS[option], **extra})
        model.precision = precision
        return play(model, steps, [make for _, make in pictures], gradients)

    return Case("; ".join(about), run)


def play(model: ViT, steps, pictures, gradients: bool) -> str:
    """Change by change: whether it is refused or not, the model must stay consistent."""
    outcome = check(model, pictures[0], gradients)
    for name, change in steps:
        try:
            changed = change(model)
            model = changed if isinstance(changed, ViT) else model
        except Exception as error:
            if judge(error) != REFUSED and is_ours(error):
                raise
            outcome = REFUSED
        try:
            again = check(model, pictures[-1], gradients)
        except Wrong as error:
            raise Wrong(f"after {name}: {error}") from None
        outcome = REFUSED if REFUSED in (outcome, again) else OK
    return outcome


def is_ours(error: BaseException) -> bool:
    """Whether vitkern's code raised or passed it on: many changes are torch's business alone."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.startswith(PACKAGE) for frame in frames)


def check(model: ViT, picture: Callable[[ViT], Tensor], gradients: bool) -> str:
    """The automatic path against the modules, for logits and for tokens."""
    image = picture(model)
    outcome = OK
    for name in ("forward", "forward_features"):
        truth = references(model, image, name)
        with torch.set_grad_enabled(gradients):
            try:
                got = getattr(model, name)(image)
            except Exception as error:
                if judge(error) != REFUSED:
                    raise
                outcome = REFUSED
                continue
        if isinstance(truth, Exception):
            text = f"{type(truth).__name__}: {truth}"
            raise Wrong(f"{name} gives {describe(got)} where the modules refuse: {text[:300]}")
        if truth is not None:
            check_close(got, *truth, name, coarsest(model))
    return outcome


def coarsest(model: ViT) -> torch.dtype:
    """The narrowest dtype that a forward may round to on its way."""
    kinds = {p.dtype for p in model.parameters()}
    if model.precision is not None:
        kinds.add(PRECISIONS[model.precision].dtype)
    return max(kinds & TOLERANCE.keys(), key=TOLERANCE.get, default=torch.float32)


def describe(got: object) -> str:
    return f"{tuple(got.shape)}" if isinstance(got, Tensor) else type(got).__name__


def references(model: ViT, image: Tensor, name: str) -> tuple[Tensor, Tensor] | Exception | None:
    """(in its own dtype, in float64) by the modules, or how they refuse; None: cannot be told."""
    try:
        torchs = by_modules(model, image, name)
    except Exception as error:
        torchs = error
    if isinstance(torchs, Tensor) and torchs.device.type == "meta":
        return None
    try:
        double = copy.deepcopy(model).double()
        double.precision = None
        pixels = image.dtype == torch.uint8
        truth = by_modules(double, image if pixels else odd.plain(image).double(), name)
    except Exception:  # nothing finer to compare with
        return torchs if isinstance(torchs, Exception) else (torchs, torchs)
    if isinstance(torchs, Exception):
        # The modules cannot mix these dtypes and a kernel may: then one rounding to bf16 is allowed
        torchs = truth.bfloat16().to(model.dtype)
    return torchs, truth


def by_modules(model: ViT, image: Tensor, name: str) -> Tensor:
    path, model.path = model.path, "reference"
    try:
        with torch.no_grad():
            return getattr(model, name)(image)
    finally:
        model.path = path
