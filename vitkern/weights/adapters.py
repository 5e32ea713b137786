"""peft's LoRA adapters: folders of small matrices that are added to a base checkpoint's weights."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import files
from .layouts import detect
from .layouts.base import Checkpoint

LONGEST_PATTERN = 300  # letters

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.lora_(?P<side>A|B|embedding_A|embedding_B|"
    r"magnitude_vector)(?:\.[A-Za-z0-9_]+)?(?:\.(?P<part>weight|bias))?"
)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def base_of(folder: Path, who: str) -> str:
    """The name or path of the checkpoint that an adapter belongs to."""
    name = files.read_json(folder / CONFIG, who).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{who}: {folder} names no base model: say base=path of its checkpoint")
    return name


def merged(base: Checkpoint, folder: Path, who: str) -> Checkpoint:
    """The base with the adapter's matrices added, and the modules replaced that it saved whole."""
    about = files.read_json(folder / CONFIG, who)
    _check(about, folder, who)
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{who}: {folder} has no {' or '.join(WEIGHTS)}")
    found = detect(base.tensors)
    layout = found[0] if found else None

    def spelt(name: str) -> str:
        return layout.renamed(name) if layout else name

    tensors = {spelt(name): tensor for name, tensor in base.tensors.items()}
    sides: dict[str, dict[str, Tensor]] = {}
    modules: dict[str, str] = {}
    for name, tensor in files.read(path, who).items():
        match = _NAME.fullmatch(name)
        if match is None:  # of a module that was trained whole
            plain = name.removeprefix("base_model.model.")
            tensors[spelt(re.sub(r"\.modules_to_save(\.[A-Za-z0-9_]+)?\.", ".", plain))] = tensor
            continue
        if match["side"] not in ("A", "B") or match["part"] == "bias":
            raise ValueError(
                f"{who}: {path} has {name:.120}: only plain LoRA of linear layers is merged"
            )
        module = spelt(match["module"] + ".").removesuffix(".")
        modules[module] = match["module"]
        sides.setdefault(module, {})[match["side"]] = tensor
    for module, two in sides.items():
        name = f"{module}.weight"
        if name not in tensors:
            raise ValueError(
                f"{who}: {folder} adapts {module:.120}, which {base.path} does not have"
            )
        if two.keys() != {"A", "B"}:
            raise ValueError(f"{who}: {path} has one of two matrices for {module:.120}")
        tensors[name] = _added(
            tensors[name], two, _scale(about, modules[module], two["A"]), path, who
        )
    merge = Checkpoint(tensors, f"{folder} on {base.path}")
    merge.config, merge.pixels, merge.metadata = base.config, base.pixels, base.metadata
    return merge


def _check(about: dict[str, Any], folder: Path, who: str) -> None:
    if about.get("peft_type") != "LORA":
        raise ValueError(
            f"{who}: {folder} is an adapter of type {about.get('peft_type')!r:.40}; only LoRA's are"
            f" merged: merge it with peft's merge_and_unload, and save that"
        )
    for key in ("use_dora", "fan_in_fan_out"):
        if about.get(key):
            raise ValueError(
                f"{who}: {folder} has {key}, which is not merged: use peft to merge it"
            )


def _scale(about: dict[str, Any], module: str, a: Tensor) -> float:
    """lora_alpha / r, with the patterns that some modules match; / sqrt(r) where rslora is on."""
    alpha = _of(about.get("alpha_pattern"), module, about.get("lora_alpha", 8))
    rank = max(a.shape[0], 1) if a.ndim else 1  # what the file holds, whatever r says
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise ValueError(f"vitkern.load: lora_alpha is {alpha!r:.40}, expected a number")
    return alpha / math.sqrt(rank) if about.get("use_rslora") else alpha / rank


def _of(patterns: Any, module: str, default: Any) -> Any:
    """peft's rule: a pattern is a regular expression for the end of a module's name."""
    if not isinstance(patterns, dict):
        return default
    for key, value in patterns.items():
        if len(str(key)) > LONGEST_PATTERN:
            raise ValueError(f"vitkern.load: a pattern of {len(key)} letters is refused")
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise ValueError(f"vitkern.load: alpha_pattern {key!r:.80}: {error}") from error
    return default


def _added(weight: Tensor, two: dict[str, Tensor], scale: float, path: Path, who: str) -> Tensor:
    a, b = two["A"], two["B"]
    if min(a.ndim, b.ndim) > 1:
        a, b = a.flatten(1).float(), b.flatten(1).float()  # (r, in), (out, r)
    if (
        a.ndim != 2
        or b.ndim != 2
        or b.shape[1] != a.shape[0]
        or weight.ndim < 2
        or (b.shape[0], a.shape[1]) != (weight.shape[0], weight.shape[1:].numel())
    ):
        raise ValueError(
            f"{who}: {path} has LoRA matrices {tuple(two['A'].shape)} and {tuple(two['B'].shape)}"
            f" for a weight {tuple(weight.shape)}"
        )
    with torch.no_grad():
        return (weight.float() + scale * (b @ a).view_as(weight)).to(weight.dtype)
