"""ViTConfig and ViT(...) with absurd fields, names and devices."""

from __future__ import annotations

import dataclasses
import pathlib
import random

import torch

from tests.model.tiny_models import BASE, OPTIONS
from vitkern import ViT, ViTConfig
from vitkern.config import ACTIVATIONS, FINAL_NORMS, HEADS, POOLS, POSITIONS

from . import odd
from .outcome import OK, REFUSED, Case, refused

FIELDS = [field.name for field in dataclasses.fields(ViTConfig)]
SIZES = (0, 1, 3, 4, 8, 12, 5, 16)
WORDS = {
    "pool": POOLS, "position": POSITIONS, "final_norm": FINAL_NORMS, "head": HEADS,
    "activation": ACTIVATIONS,
}  # fmt: skip
NAMES = (
    "", "/", "B", "B/", "/16", "B/16/16", "B/0", "B/-16", "Q/16", "b/16", "B/1e1", "B/٣",
    "vit_base_patch16", "vit_base_patch16_0", "vit_base_patch16_225", "vit_base_patch0_224",
    "vit_giant_patch14_dinov2", "timm/", "timm/vit_tiny_patch16_224.augreg", "../B/16", "B/16\0",
    "vit_base_patch99999999999999999999_224", "x" * 5000, "vit_tiny_patch16_" + "9" * 5000,
)  # fmt: skip
DTYPES = (None, "float32", "bfloat16", "float16", "float64", "int64", "bool", "complex64")
DEVICES = (None, "cpu", "meta", "nonesuch", "cpu:7")


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    if rng.random() < 0.15:
        return named(rng)
    fields = {**BASE_FIELDS, **rng.choice(list(OPTIONS.values()))}
    changes = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(FIELDS)
        changes[name] = field(rng, name)
    device = rng.choice(DEVICES) if rng.random() < 0.3 else None
    dtype = rng.choice(DTYPES) if rng.random() < 0.2 else None
    where = f", device={device!r}" * (device is not None) + f", dtype={dtype}" * (dtype is not None)
    about = f"ViT(ViTConfig({', '.join(f'{k}={short(v)}' for k, v in changes.items())}){where})"
    return Case(about, lambda: build({**fields, **changes}, device, dtype))


BASE_FIELDS = {field.name: getattr(BASE, field.name) for field in dataclasses.fields(ViTConfig)}


def short(value: object) -> str:
    text = f"10**{len(str(value)) - 1}" if isinstance(value, int) and value > 1e20 else repr(value)
    return text[:100]


def field(rng: random.Random, name: str) -> object:
    """A value for a field: of its kind or not, in range or not."""
    default, chance = BASE_FIELDS[name], rng.random()
    if chance < 0.6:
        if isinstance(default, bool):
            return rng.random() < 0.5
        if isinstance(default, float):
            return rng.choice((0.0, 0.1, 0.5))
        return rng.choice(WORDS.get(name, SIZES))
    if chance < 0.7:
        return rng.choice([*sum(WORDS.values(), ()), *SIZES])
    if name in ("mean", "std", "image_size") and chance < 0.9:
        return tuple(odd.number(rng) for _ in range(rng.choice((0, 1, 2, 3, 3))))
    return odd.number(rng)


def build(fields: dict[str, object], device: str | None, dtype: str | None) -> str:
    configs = []
    if refused(lambda: configs.append(ViTConfig(**fields))):
        return REFUSED
    (config,) = configs
    # What was accepted must be usable: these must not fail.
    assert isinstance(repr(config), str)
    assert config.replace() == config
    hash(config)
    models = []
    made = {"device": device, "dtype": None if dtype is None else getattr(torch, dtype)}
    if refused(lambda: models.append(ViT(config, **made))):
        return REFUSED
    (model,) = models
    if refused(lambda: model.summary(show=False)):
        return REFUSED
    c = model.config
    if c.patches * c.width > 2**16 or c.patches > 256 or model.device.type == "meta":
        return OK
    side = c.pixels
    with torch.no_grad():
        image = torch.zeros(1, c.channels, *side, dtype=model.dtype)
        return REFUSED if refused(lambda: model.eval()(image)) else OK


def named(rng: random.Random) -> Case:
    name = rng.choice((*NAMES, *odd.OBJECTS))
    change = rng.choice(({}, {"classes": 3}, {"nonesuch": 1}, {"image_size": 7}))
    return Case(
        f"ViT({short(name)}, device='meta', **{change})",
        lambda: REFUSED if refused(lambda: ViT(name, device="meta", **change)) else OK,
    )
