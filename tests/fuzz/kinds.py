"""The surfaces that are fuzzed, and the generators of each; a case's number picks one of them."""

from __future__ import annotations

import importlib
import pathlib
import random

from .outcome import Case

# kind -> generators: modules of this package with case(rng, folder) -> Case
KINDS: dict[str, tuple[str, ...]] = {
    "api": ("operators", "configurations", "models"),
    "native": ("bindings", "packed_engine", "launcher"),
    "files": ("weight_files", "image_files", "checkpoints"),
    "folders": ("kernel_folders",),
}
DELIBERATE = "deliberate"  # faults on purpose: the fuzzer's own test


def make(kind: str, seed: int, index: int, folder: pathlib.Path) -> Case:
    """Case `index` of a kind; the same three always make the same case. `folder` is its own."""
    generators = KINDS.get(kind, (kind,))
    name = generators[index % len(generators)]
    module = importlib.import_module(f"{__package__}.{name}")
    return module.case(random.Random(f"{kind} {seed} {index}"), folder)
