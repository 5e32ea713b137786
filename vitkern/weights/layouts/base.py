"""What a layout is: the names that identify it, the names it gives to vitkern's parameters, and the
configuration that its tensors and its config.json imply.

A `Layout` is a table of `Rule`s, read from left to right to load and from right to left to export.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config import VARIANTS, ViTConfig

OWN_ENTRY = "vitkern"  # of a file's metadata, where vitkern wrote the file

Shape = tuple[int, ...]
Join = Callable[[Sequence[Tensor], Shape], Tensor]  # their tensors and our shape -> ours
Split = Callable[[Tensor], Sequence[Tensor | None]]  # ours -> theirs; None: another rule's

# What most layouts cannot say, and would lose without a word: fields and their usual values.
PLAIN: dict[str, Any] = {
    "rope": "none",
    "mlp": "plain",
    "mlp_norm": False,
    "attention_norm": False,
    "key_bias": True,
    "separate_qkv": False,
    "block": "pre_norm",
    "norm": "layernorm",
}

# Widths that no variant of the paper has, as published: SigLIP So400m, OpenCLIP bigG, ViT-e.
OTHER_HEADS = {1152: 16, 1664: 16, 1792: 16}


class Refused(ValueError):
    """A checkpoint that is understood, and needs what vitkern does not have."""


@dataclass
class Checkpoint:
    """Tensors by name, and what stands beside them."""

    tensors: dict[str, Tensor]
    path: str = "the state dict"
    outside: dict[str, Tensor] = field(default_factory=dict)  # without the prefix of the model's
    said: dict[str, Any] = field(default_factory=dict)  # fields of ViTConfig that the caller gave
    config: dict[str, Any] = field(default_factory=dict)  # config.json
    pixels: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json
    metadata: dict[str, str] = field(default_factory=dict)  # of the safetensors file

    def shape(self, name: str) -> Shape:
        """Of a tensor, () where there is none."""
        found = self.tensors.get(name)
        return () if found is None else tuple(found.shape)

    def size(self, name: str, axis: int, default: int) -> int:
        """Of one axis of a tensor; the default where there is no such tensor or axis."""
        shape = self.shape(name)
        return shape[axis] if axis < len(shape) else default

    def count(self, stem: str) -> int:
        """How many blocks there are: the largest number after `stem`, plus one."""
        after = re.compile(re.escape(stem) + r"([0-9]{1,6})[./]")
        found = (after.match(name) for name in self.tensors)
        return max((int(match[1]) + 1 for match in found if match), default=0)

    def own_fields(self) -> dict[str, Any] | None:
        """The configuration that vitkern itself wrote into the file, in any layout; or None."""
        try:
            fields = json.loads(self.metadata[OWN_ENTRY])["config"]
            return {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return None


def own_metadata(config: ViTConfig, **more: Any) -> dict[str, str]:
    """What `own_fields` reads, and more, for a file that vitkern writes.

    In one entry: safetensors writes several in a random order, and files could not be compared.
    """
    return {OWN_ENTRY: json.dumps({"config": dataclasses.asdict(config), **more})}


# ---- rules ----


def _same(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    return parts[0]


def _one(ours: Tensor) -> Sequence[Tensor]:
    return [ours]


class Rule(NamedTuple):
    """One of vitkern's parameters and the tensors of a layout that hold it."""

    ours: str  # "{i}" stands for a block's number
    theirs: tuple[str, ...]
    join: Join = _same
    split: Split = _one
    outside: bool = False  # its names stand beside the model's prefix: "classifier.weight"

    def block(self, i: int) -> Rule:
        theirs = tuple(name.replace("{i}", str(i)) for name in self.theirs)
        return self._replace(ours=self.ours.replace("{i}", str(i)), theirs=theirs)


def stacked(ours: str, *theirs: str) -> Rule:
    """Several tensors under each other: query, key and value in qkv."""

    def join(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        return torch.cat(list(parts))

    def split(ours: Tensor) -> Sequence[Tensor]:
        return ours.chunk(len(theirs))

    return Rule(ours, theirs, join, split)


def reshaped(ours: str, theirs: str, back: Callable[[Tensor], Tensor]) -> Rule:
    """The same elements in another shape."""
    return Rule(ours, (theirs,), lambda parts, shape: parts[0].reshape(shape), lambda t: [back(t)])


def invented(ours: str, check: str) -> Rule:
    """Zeros that a layout does not store; `check` says why others cannot be exported."""

    def split(tensor: Tensor) -> Sequence[Tensor]:
        if tensor.count_nonzero():
            raise Refused(check)
        return []

    return Rule(ours, (), lambda parts, shape: torch.zeros(shape), split)


def without_keys(ours: str, query: str, value: str) -> Rule:
    """A bias of query and value alone. That of the keys adds the same to all scores of a query, so
    that softmax does not see it: zeros are read, and what there is is not written."""

    def join(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        q, v = parts
        return torch.cat([q, torch.zeros_like(q), v])

    def split(tensor: Tensor) -> Sequence[Tensor]:
        q, _, v = tensor.chunk(3)
        return [q, v]

    return Rule(ours, (query, value), join, split)


def pairs(ours: str, theirs: str, outside: bool = False) -> list[Rule]:
    """Weight and bias of a layer."""
    return [
        Rule(f"{ours}.{part}", (f"{theirs}.{part}",), outside=outside)
        for part in ("weight", "bias")
    ]


def stacked_pairs(ours: str, *theirs: str) -> list[Rule]:
    """Weights and biases of layers that are one of ours."""
    return [
        stacked(f"{ours}.{part}", *(f"{name}.{part}" for name in theirs))
        for part in ("weight", "bias")
    ]


def plain_blocks(stem: str, names: Mapping[str, str]) -> list[Rule]:
    """Rules of a block's layers that have a weight and a bias each: ours to theirs."""
    rules = [pairs(f"blocks.{{i}}.{ours}", f"{stem}{{i}}.{name}") for ours, name in names.items()]
    return [rule for two in rules for rule in two]


# ---- layouts ----


class Layout:
    """A way to name a ViT's tensors. Subclasses, one a file, say what is theirs."""

    name = ""  # how `save` is asked for it
    title = ""  # how a reader of an error knows it
    anchor = ""  # the patch projection: what stands before it is the prefix of the model's names
    stem = ""  # what stands before a block's number
    marks: tuple[str, ...] = ()  # regular expressions; a name fits each of them, after the prefix
    unmarked = r"(?!)"  # no name may fit this one
    ignored = r"(?!)"  # names that a forward never reads
    elsewhere = r"(?!)"  # the same of names outside the prefix: another tower
    head = r"classifier\."  # names, on either side, that are not read where the head is left out
    own_names = False  # whether vitkern's names are the layout's where no rule says otherwise
    spellings: tuple[tuple[str, str], ...] = ()  # regular expressions and what to write instead
    holds: tuple[str, ...] = ()  # fields of PLAIN that it can say otherwise

    # -- detection --

    def renamed(self, name: str) -> str:
        """A name in this layout's main spelling."""
        for pattern, spelling in self.spellings:
            name = re.sub(pattern, spelling, name)
        return name

    def prefix(self, names: Collection[str]) -> str | None:
        """What the model's names begin with, where they are of this layout; else None."""
        names = [self.renamed(name) for name in names]
        for name in names:
            if not name.endswith(self.anchor):
                continue
            prefix = name.removesuffix(self.anchor)
            inside = [name.removeprefix(prefix) for name in names]
            fits = all(any(re.match(mark, name) for name in inside) for mark in self.marks)
            if fits and not any(re.match(self.unmarked, name) for name in inside):
                return prefix
        return None

    def bare(self, checkpoint: Checkpoint, prefix: str) -> Checkpoint:
        """The same checkpoint in the main spelling and without the prefix."""
        named = {self.renamed(name): tensor for name, tensor in checkpoint.tensors.items()}
        inside = {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}
        outside = {n: t for n, t in named.items() if not n.startswith(prefix)} if prefix else inside
        return replace(checkpoint, tensors=inside, outside=outside)

    def likeness(self, names: Collection[str]) -> float:
        """Which share of the names looks like this layout's: the nearest one has the most."""
        parts = {part for rule in self.rules(ViTConfig()) for name in rule.theirs
                 for part in [re.sub(r"[0-9]+|\{i\}", "#", name)]}  # fmt: skip
        found = sum(
            any(re.sub(r"[0-9]+", "#", self.renamed(name)).endswith(part) for part in parts)
            for name in names
        )
        return found / max(len(names), 1)

    # -- to be said by each --

    def refusal(self, c: Checkpoint) -> str:
        """What vitkern lacks to run this model, as a noun phrase; "" if nothing."""
        return ""

    def head_refusal(self, c: Checkpoint) -> str:
        """The same of what comes after the blocks: it may be left out."""
        return ""

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        """Fields of ViTConfig, from the shapes and config.json."""
        raise NotImplementedError

    def rules(self, config: ViTConfig) -> list[Rule]:
        """The table, for a configuration."""
        raise NotImplementedError

    def export_refusal(self, config: ViTConfig) -> str:
        """Why a configuration cannot be written in this layout; "" if it can."""
        return "there is no export to it"

    def unwritable(self, config: ViTConfig) -> str:
        """Why a configuration cannot be written: what it has beyond a plain block comes first."""
        plain = {name: value for name, value in PLAIN.items() if name not in self.holds}
        if not config.qkv_bias:
            plain.pop("key_bias", None)
        return unlike(config, **plain) or self.export_refusal(config)

    def export_prefix(self, config: ViTConfig) -> str:
        return ""

    def export_config(self, config: ViTConfig) -> dict[str, Any]:
        """What config.json says; {} where the layout has none."""
        return {}

    def export_zeros(self, config: ViTConfig) -> dict[str, Shape]:
        """Tensors that the other library asks for and inference does not read."""
        return {}

    # -- what follows from the table --

    def expanded(self, config: ViTConfig) -> Iterator[Rule]:
        """The rules, those of blocks once for each."""
        for rule in self.rules(config):
            if "{i}" in rule.ours:
                yield from (rule.block(i) for i in range(config.depth))
            else:
                yield rule

    def is_ignored(self, name: str, outside: bool) -> bool:
        return re.match(self.elsewhere if outside else self.ignored, name) is not None


# ---- facts that several layouts read off shapes ----


def heads_of(width: int, depth: int) -> int:
    """Heads of the published model of these sizes: where tensors do not tell."""
    known = {(D, L): H for D, L, H, _ in VARIANTS.values()}
    return known.get((width, depth)) or OTHER_HEADS.get(width) or max(1, width // 64)


def patch_fields(c: Checkpoint, name: str) -> dict[str, int]:
    """Width, channels and patch size, from the patch projection (D, C, p, p)."""
    shape = c.shape(name)
    if len(shape) != 4 or shape[2] != shape[3]:
        raise ValueError(f"{name} has shape {shape}, expected (width, channels, patch, patch)")
    return {"width": shape[0], "channels": shape[1], "patch_size": shape[2]}


def place_fields(
    c: Checkpoint, rows: int, prefixes: Iterable[int], patch: int, size: Any = None
) -> tuple[int, int | tuple[int, int]]:
    """How many of the rows of positions are of prefix tokens, and the image size of the rest.

    prefixes: what is possible, the likelier first. size: config.json's, if it names one.
    """
    prefixes = list(prefixes)
    for said in (size, c.said.get("image_size")):
        pair = (said, said) if isinstance(said, int) else said
        if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(_is_size, pair)):
            patches = (pair[0] // patch) * (pair[1] // patch)
            if rows - patches in prefixes:
                return rows - patches, (pair[0], pair[1]) if pair[0] != pair[1] else pair[0]
    for prefix in prefixes:
        side = math.isqrt(max(rows - prefix, 0))
        if side and side * side == rows - prefix:
            return prefix, side * patch
    raise ValueError(
        f"{rows} positions are no square grid: say which image_size=(rows, columns) they are of"
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def pixel_fields(c: Checkpoint, channels: int) -> dict[str, Any]:
    """mean and std of preprocessor_config.json, where it has them."""
    mean, std = c.pixels.get("image_mean"), c.pixels.get("image_std")
    both = (mean, std)
    if all(isinstance(v, list) and len(v) == channels for v in both):
        return {"mean": tuple(mean or ()), "std": tuple(std or ())}
    return {}


def unlike(config: ViTConfig, **wanted: Any) -> str:
    """The first field that is none of the wanted values (a tuple: any of them), as a sentence."""
    for name, values in wanted.items():
        allowed = values if isinstance(values, tuple) else (values,)
        found = getattr(config, name)
        if found not in allowed:
            return f"{name}={found!r}, and it has only {' or '.join(map(repr, allowed))}"
    return ""
