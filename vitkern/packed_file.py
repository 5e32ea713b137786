"""Files of a model's packed weights: safetensors that are read without packing them again.

At int8 the file has integers, a quarter of the size of fp32, whose order is no instruction set's:

    blocks.0.attn.qkv.weight         int8, the shape of the parameter
    blocks.0.attn.qkv.weight.scales  float32, one for each of its rows
    blocks.0.norm1.weight            float32, as every parameter outside the four linear layers

At every other precision it has the panels that the CPU's engine reads (panels.py), first and each
at a multiple of 64 bytes, so that kernels read them in the mapped file:

    blocks.0.attn.qkv.weight         int32, panels as they are in memory
    blocks.0.norm1.weight            as every parameter and buffer that is not packed

The metadata hold the format's name, the model's configuration as JSON and, of panels, their form,
the precision, the parameters' dtype and whether packing kept their values. Where this machine reads
panels of another form, they are unpacked and packed again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import _C, cpu, dispatch, int8, packing
from .config import ViTConfig
from .engines import cpu as cpu_engine
from .engines.released import Released, regains
from .model import ViT
from .panels import Form
from .saving import replace_file

INTEGERS, PANELS = FORMATS = ("vitkern int8 1", "vitkern panels 1")
SCALES = ".scales"
_LINE = 64  # bytes that panels begin at a multiple of
_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}  # safetensors' words
DTYPES = {str(dtype)[6:]: dtype for dtype in cpu_engine.CpuEngine.DTYPES}


def is_packed(metadata: Mapping[str, str]) -> bool:
    """Whether `save_packed` wrote the file that says this beside its tensors."""
    return metadata.get("format") in FORMATS


def save_packed(model: ViT, path: str | os.PathLike[str], precision: str | None = None) -> None:
    """Write a model's weights as the CPU's engine packs them, with its configuration.

    `load_packed` and `vitkern.load` take them without packing again. precision: "fp32", "tf32",
    "bf16" or "int8"; None is the model's own, or that which its weights were released for.
    """
    if not isinstance(model, ViT):
        raise TypeError(f"save_packed: expected a vitkern.ViT, got {type(model).__name__}")
    if precision is not None and precision not in cpu.PRECISIONS:
        names = ", ".join(cpu.PRECISIONS)
        raise ValueError(f"save_packed: precision must be one of {names}, not {precision!r:.40}")
    if model.device.type != "cpu":
        raise ValueError(f"save_packed: the model is on {model.device}; call model.cpu() first")
    structure, released = model.engines.structure(), model.released
    own = released.precision if released else dispatch.precision_of(model)
    precision = precision or own
    reason = structure.not_fused or structure.not_engine or model.engines.unpackable(precision)
    reason = reason or model.engines.why_not(model.patch_embed_weight, precision)
    if not reason and model.config.block == "parallel":
        reason = "a parallel block's projection is packed in parts; vitkern.save writes the model"
    if not reason and released and precision != own:
        reason = f"the weights were released as packed for {own}; call model.restore_weights()"
    if reason:
        raise ValueError(f"save_packed: {reason}")
    about = {"config": json.dumps(dataclasses.asdict(model.config))}
    if precision == "int8":
        save_file = _safetensors("save_packed").torch.save_file
        with torch.no_grad():
            tensors, about = _integers(model), {"format": INTEGERS, **about}
        replace_file(Path(path), lambda beside: save_file(tensors, beside, about))
        return
    with torch.no_grad():
        packed, rest, said = _panels(model, precision)
    about |= {"format": PANELS, **said}
    replace_file(Path(path), lambda beside: _write(beside, packed, rest, about))


@torch.inference_mode(False)  # whose tensors no engine packs: their changes cannot be seen
def load_packed(path: str | os.PathLike[str]) -> ViT:
    """The model of a file that `save_packed` wrote: in eval mode, at the precision of the file.

    It gives the bits of the model that was saved, where the same kind of panels is read. The file
    stays mapped: do not change it in place while the model lives.

    The model holds the packed weights alone, as after `ViT.release_weights`: `restore_weights()`
    brings the parameters back where packing did not round them (fp32), and with `rounded=True` the
    values that are left of them.
    """
    about, tensors = _read(Path(path))
    config = _config(path, about)
    take = _from_integers if about["format"] == INTEGERS else _from_panels
    model = take(path, config, about, tensors)
    if tensors:
        raise ValueError(f"load_packed: {path} has {min(tensors)}, which its model does not have")
    return model.eval()


def with_parameters(model: ViT, who: str) -> ViT:
    """The model itself, for those who read its parameters; a ValueError where there are none.

    At int8 they have the values that the integers stand for, and the integers stay beside them.
    """
    if model.released is not None:
        if model.released.integers:
            model.restore_weights(rounded=True)
        elif not model.released.exact:
            raise ValueError(
                f"{who} needs the weights, which the file holds as packed for"
                f" {model.released.precision}, rounded: give the checkpoint that it was made of"
            )
        else:
            model.restore_weights()
    return model


# ---- Writing -------------------------------------------------------------------------------------


def _integers(model: ViT) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in int8.state_of(model).items():
        if isinstance(value, int8.Quantised):
            tensors[name], tensors[name + SCALES] = value
        else:
            tensors[name] = value.float()
    tensors |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    return {name: t.contiguous().clone() for name, t in tensors.items()}


def _panels(
    model: ViT, precision: str
) -> tuple[dict[str, _C.Packed], dict[str, Tensor], dict[str, str]]:
    """The panels of a model, its other parameters and buffers, and what metadata say of them."""
    layout = _C.engine_layout("", cpu.PRECISIONS[precision])
    names, released = set(cpu_engine.matrix_names(model)), model.released
    there = model.engines.matrices(precision)
    exact = released.exact if released else True
    packed: dict[str, _C.Packed] = {}
    rest: dict[str, Tensor] = {}
    for name, value in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if name not in names:
            rest[name] = value.detach().contiguous()
        elif released and isinstance(value, nn.Parameter):
            packed[name] = released.panels_of(value, layout)
        else:
            packed[name] = there.get(name) or packing.shared(value, layout)
            exact = exact and regains(packed[name], value)
    said = {
        "precision": precision,
        "dtype": str(model.dtype)[6:],
        "form": json.dumps(_C.panel_form(layout)),
        "exact": json.dumps(exact),
    }
    return packed, rest, said


def _write(
    path: Path, packed: dict[str, _C.Packed], rest: dict[str, Tensor], about: dict[str, str]
) -> None:
    """A safetensors file whose header ends, and whose panels begin, at multiples of 64 bytes.

    safetensors' own writer aligns to 8, and holds all of the file in memory.
    """
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, panels in packed.items():
        places = [end, end + panels.bytes]
        header[name] = {"dtype": "I32", "shape": [panels.bytes // 4], "data_offsets": places}
        end += panels.bytes
    for name, tensor in rest.items():
        kind, shape = _KINDS[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _LINE)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for panels in packed.values():
            if panels.bytes:
                file.write((ctypes.c_char * panels.bytes).from_address(panels.panels))
        for tensor in rest.values():
            file.write(tensor.flatten().view(torch.uint8).numpy().data)


# ---- Reading -------------------------------------------------------------------------------------


def _from_integers(
    path: str | os.PathLike[str],
    config: ViTConfig,
    about: Mapping[str, str],
    tensors: dict[str, Tensor],
) -> ViT:
    model = ViT(config, device="meta")
    held = Released("int8", torch.float32)
    for name, parameter in list(model.named_parameters()):
        shape, matrix = tuple(parameter.shape), int8.is_matrix(name, parameter)
        dtype = torch.int8 if matrix else torch.float32
        value = _take(path, tensors, name, dtype, shape)
        scales = _take(path, tensors, name + SCALES, torch.float32, shape[:1]) if matrix else value
        _check_finite(path, name, scales)
        if matrix:
            held.integers[parameter] = int8.Held(int8.Quantised(value, scales), None)
        else:
            _set(model, name, nn.Parameter(value.clone()))
    _take_buffers(path, model, tensors, torch.float32)
    model.hold_panels(held)
    model.precision = "int8"
    return model


def _from_panels(
    path: str | os.PathLike[str],
    config: ViTConfig,
    about: Mapping[str, str],
    tensors: dict[str, Tensor],
) -> ViT:
    try:
        form, exact = Form.parsed(json.loads(about["form"])), json.loads(about["exact"]) is True
        precision, dtype = about["precision"], DTYPES[about["dtype"]]
        layout = _C.engine_layout("", cpu.PRECISIONS[precision])
        if precision == "int8":
            raise ValueError("int8 has no panels in files")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"load_packed: {path} has no usable metadata: {error}") from error
    model = ViT(config, device="meta", dtype=dtype)
    held, names = Released(precision, dtype), set(cpu_engine.matrix_names(model))
    known = Form(*_C.panel_form(layout)) == form
    for name, parameter in list(model.named_parameters()):
        shape = tuple(parameter.shape)
        if name not in names:
            value = _take(path, tensors, name, dtype, shape)
            _check_finite(path, name, value)
            _set(model, name, nn.Parameter(value.clone()))
            continue
        N, K = parameter.flatten(1).shape
        panels = _take(path, tensors, name, torch.int32, (form.bytes(N, K) // 4,))
        for numbers in form.floats(panels, N):
            _check_finite(path, name, numbers)
        if known:
            if panels.data_ptr() % _LINE:  # a file that was written again by others
                panels = _aligned(panels)
            size, place = panels.nbytes, panels.data_ptr()
            held.panels[parameter] = _C.Packed.of_panels(layout, place, size, N, K, panels)
        else:
            value = form.unpacked(panels, N, K)
            held.panels[parameter] = packing.unshared(value, layout)
            exact = exact and regains(held.panels[parameter], value.to(dtype))
    _take_buffers(path, model, tensors, dtype)
    held.exact = exact
    model.hold_panels(held)
    model.precision = precision
    if not known:
        warnings.warn(
            f"load_packed: {path} was packed on another kind of CPU ({form}); it was packed again"
            f" for this one ({Form(*_C.panel_form(layout))}). save_packed writes a file that is"
            f" read faster here",
            stacklevel=3,
        )
    return model


def _aligned(panels: Tensor) -> Tensor:
    room = torch.empty(panels.numel() + _LINE // 4, dtype=torch.int32)
    skipped = -room.data_ptr() % _LINE // 4
    return room[skipped : skipped + panels.numel()].copy_(panels)


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"load_packed: there is no file {path}")
    safetensors = _safetensors("load_packed")
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            if not is_packed(about):
                raise ValueError(
                    f"load_packed: {path} was not written by save_packed ({', '.join(FORMATS)});"
                    f" read a checkpoint with vitkern.load"
                )
            return about, {name: file.get_tensor(name) for name in file.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"load_packed: {path} is damaged or not safetensors: {error}") from error


def _config(path: str | os.PathLike[str], about: Mapping[str, str]) -> ViTConfig:
    try:
        fields = json.loads(about["config"])
        fields = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        return ViTConfig(**fields)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"load_packed: {path} has no usable configuration: {error}") from error


def _take(
    path: str | os.PathLike[str],
    tensors: dict[str, Tensor],
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> Tensor:
    """Takes a tensor out of what the file has, and checks it."""
    if name not in tensors:
        raise ValueError(f"load_packed: {path} lacks {name}")
    found = tensors.pop(name)
    if (found.dtype, tuple(found.shape)) != (dtype, shape):
        what = (found.dtype, tuple(found.shape))
        raise ValueError(f"load_packed: {path}: {name} is {what}, expected {(dtype, shape)}")
    return found


def _take_buffers(
    path: str | os.PathLike[str], model: ViT, tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """BatchNorm's statistics, of a hybrid's stem."""
    for name, buffer in list(model.named_buffers()):
        kind = dtype if buffer.is_floating_point() else buffer.dtype
        _set(model, name, _take(path, tensors, name, kind, tuple(buffer.shape)).clone())


def _check_finite(path: str | os.PathLike[str], name: str, numbers: Tensor) -> None:
    """By a sum that NaN and Inf would spoil; one of finite numbers that overflows is looked at."""
    if not numbers.sum(dtype=torch.float32).isfinite() and not numbers.isfinite().all():
        raise ValueError(f"load_packed: {path}: {name} has elements that are NaN or Inf")


def _set(model: ViT, name: str, value: Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, value)


def _safetensors(who: str) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{who} needs safetensors: pip install safetensors") from error
    return safetensors
