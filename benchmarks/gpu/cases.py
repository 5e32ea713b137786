"""What is timed on a GPU: every operator and whole models, forward alone and with the backward."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import vitkern.ops  # noqa: F401  fills REGISTRY
from benchmarks.rows import shape_text
from vitkern import ViTConfig
from vitkern.cli.bench import DTYPES
from vitkern.registry import REGISTRY, OpSpec

MODELS = ("Ti/16", "S/16", "B/16", "L/16")
# kind -> batch sizes unless --batch says so
BATCHES = {"op": (1, 64), "op_train": (64,), "model": (1, 8, 64, 256), "train": (8, 64)}
WORDS = {
    "op": "operator",
    "op_train": "operator, forward and backward",
    "model": "model",
    "train": "training step",
}
IMAGE_SIZE = 224


class Case(NamedTuple):
    """One comparison: all competitors take turns in it."""

    kind: str  # "op", "op_train", "model", "train"
    name: str  # of a row of the operator table, or of a model
    axes: tuple[tuple[str, int], ...]
    precision: str

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.name}-{shape_text(dict(self.axes))}-{self.precision}".replace(
            " ", "_"
        )

    @property
    def text(self) -> str:
        return f"{WORDS[self.kind]} {self.name} {shape_text(dict(self.axes))} {self.precision}"


@dataclasses.dataclass(frozen=True)
class Selection:
    """What the command line asked for; empty tuples mean everything."""

    models: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    compile: str = "none"  # "default", or "max-autotune" (both)
    image_size: int = IMAGE_SIZE
    mode: str = "default"  # "quick", "default", "full"

    @classmethod
    def of(cls, given: argparse.Namespace) -> Selection:
        """From parsed options; a ValueError for what cannot be built."""
        found = cls(
            tuple(given.model or ()),
            tuple(given.batch or ()),
            tuple(given.dtype or ()),
            given.compile or ("none" if given.quick else "max-autotune"),
            given.image_size,
            "quick" if given.quick else "full" if given.full else "default",
        )
        for name in found.kept_models():
            ViTConfig.named(name, image_size=found.image_size)
        return found

    @property
    def quick(self) -> bool:
        return self.mode == "quick"

    @property
    def complete(self) -> bool:
        """Whether its results may be published: a part of the suite must not replace them."""
        parts = self.models or self.batches or self.precisions
        return not parts and not self.quick and self.image_size == IMAGE_SIZE

    def kept_precisions(self) -> tuple[str, ...]:
        return self.precisions or DTYPES[: 1 if self.quick else None]

    def kept_models(self) -> tuple[str, ...]:
        return self.models or MODELS[: 1 if self.quick else None]

    def kept_batches(self, kind: str) -> tuple[int, ...]:
        return self.batches or ((1,) if self.quick else BATCHES[kind])


def cases(selection: Selection) -> list[Case]:
    """Models first: should somebody stop the run, the most telling rows are there."""
    found = []
    for kind in ("model", "train"):
        for name in selection.kept_models():
            for precision in selection.kept_precisions():
                for batch in sorted(selection.kept_batches(kind)):
                    found.append(Case(kind, name, (("B", batch),), precision))
    if selection.models:  # a model was named: that is what is wanted
        return found
    for kind in ("op", "op_train"):
        for spec in REGISTRY.values():
            for axes in shapes(spec, selection.kept_batches(kind), selection.quick):
                for precision in selection.kept_precisions():
                    found.append(Case(kind, spec.name, tuple(axes.items()), precision))
    return found


def shapes(spec: OpSpec, batches: Iterable[int], quick: bool) -> list[dict[str, int]]:
    """The table's shapes of one image, with other numbers of images; quick keeps the smallest."""
    singles = [dict(axes) for axes in spec.bench if axes.get("B", 1) == 1]
    rows = min((axes["M"] for axes in singles if "M" in axes), default=0)  # of one image
    singles = [axes for axes in singles if axes.get("M", rows) == rows]
    singles.sort(key=lambda axes: math.prod(axes.values()))
    letter = "M" if rows else "B"
    return [
        {**axes, letter: axes[letter] * batch}
        for axes in (singles[:1] if quick else singles)
        for batch in sorted(batches)
    ]
