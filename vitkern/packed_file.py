"""Files of a model's weights in int8: safetensors, a quarter of the size of fp32.

    blocks.0.attn.qkv.weight         int8, the shape of the parameter
    blocks.0.attn.qkv.weight.scales  float32, one for each of its rows
    blocks.0.norm1.weight            float32, as every parameter outside the four linear layers

The metadata hold the format's name and the model's configuration as JSON. The order of the integers
is no instruction set's: a file can be read on any machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import int8
from .config import ViTConfig
from .model import ViT

FORMAT = "vitkern int8 1"
SCALES = ".scales"


def save_packed(model: ViT, path: str | os.PathLike[str]) -> None:
    """Write a model's weights in int8, with its configuration, for `load_packed`."""
    if not isinstance(model, ViT):
        raise TypeError(f"save_packed: expected a vitkern.ViT, got {type(model).__name__}")
    if model.device.type != "cpu":
        raise ValueError(f"save_packed: the model is on {model.device}; call model.cpu() first")
    structure = model.engines.structure()
    reason = structure.not_fused or structure.not_engine or model.engines.unpackable("int8")
    reason = reason or model.engines.why_not(model.patch_embed_weight, "int8")
    if reason:
        raise ValueError(f"save_packed: {reason}")
    tensors: dict[str, Tensor] = {}
    for name, value in int8.state_of(model).items():
        if isinstance(value, int8.Quantised):
            tensors[name], tensors[name + SCALES] = value
        else:
            tensors[name] = value.float()
    plain = {name: t.contiguous().clone() for name, t in tensors.items()}
    about = {"format": FORMAT, "config": json.dumps(dataclasses.asdict(model.config))}
    _safetensors("save_packed").torch.save_file(plain, path, about)


@torch.inference_mode(False)  # whose tensors no engine packs: their changes cannot be seen
def load_packed(path: str | os.PathLike[str]) -> ViT:
    """The model of a file that `save_packed` wrote: in eval mode, with precision "int8".

    It gives the bits of the model that was saved. Its parameters are float32, with the values that
    the integers stand for, so that it can also compute in another precision or be trained.
    """
    config, tensors = _read(Path(path))
    model = ViT(config, device="meta")
    integers = {}
    for name, parameter in model.named_parameters():
        found = _parameter(path, name, parameter, tensors)
        if isinstance(found, int8.Quantised):
            integers[name], found = found, found.values()
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, torch.nn.Parameter(found))
    if tensors:
        raise ValueError(f"load_packed: {path} has {min(tensors)}, which its model does not have")
    setattr(model, int8.FILE_INTEGERS, integers)
    model.precision = "int8"
    return model.eval()


def _read(path: Path) -> tuple[ViTConfig, dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"load_packed: there is no file {path}")
    safetensors = _safetensors("load_packed")
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ValueError(
                    f"load_packed: {path} was not written by save_packed ({FORMAT}); read a"
                    f" checkpoint with vitkern.weights.timm.load"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"load_packed: {path} is damaged or not safetensors: {error}") from error
    try:
        fields = json.loads(about["config"])
        fields = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        return ViTConfig(**fields), tensors
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"load_packed: {path} has no usable configuration: {error}") from error


def _parameter(
    path: str | os.PathLike[str], name: str, like: Tensor, tensors: dict[str, Tensor]
) -> Tensor | int8.Quantised:
    """Takes a parameter out of what the file has, and checks it."""
    matrix = int8.is_matrix(name, like)
    wanted = {name: (torch.int8 if matrix else torch.float32, tuple(like.shape))}
    if matrix:
        wanted[name + SCALES] = (torch.float32, (like.shape[0],))
    for one, what in wanted.items():
        if one not in tensors:
            raise ValueError(f"load_packed: {path} lacks {one}")
        found = (tensors[one].dtype, tuple(tensors[one].shape))
        if found != what:
            raise ValueError(f"load_packed: {path}: {one} is {found}, expected {what}")
    taken = [tensors.pop(one) for one in wanted]
    return int8.Quantised(*taken) if matrix else taken[0]


def _safetensors(who: str) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{who} needs safetensors: pip install safetensors") from error
    return safetensors
