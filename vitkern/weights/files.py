"""Reads the tensors of a file or of shards: safetensors, torch's files and .npz, never their code.

Nothing is allocated that a file does not hold: safetensors and torch's zip files are mapped into
memory, and what their headers claim is compared with their size.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import npz

WRAPPERS = ("state_dict", "model", "model_ema", "module", "teacher")  # where trainers keep weights
INDEX = ".index.json"  # how the name of a list of shards ends
# What torch.save's files begin with: a zip archive, or a pickle before torch 1.6.
ZIP, PICKLE = b"PK\3\4", b"\x80"
LARGEST_JSON = 64 << 20  # bytes; the index of a model with 10,000 tensors has 1 MB


def read(path: str | os.PathLike[str], who: str = "vitkern.load") -> dict[str, Tensor]:
    """The tensors of a .safetensors, torch or .npz file, or of the shards that an index names.

    On the CPU. A training checkpoint's wrapping is taken off. who: what an error begins with.
    """
    path = Path(path)
    if path.name.endswith(INDEX):
        return _shards(path, who)
    check_file(path, who)
    with open(path, "rb") as file:
        start = file.read(9)
    if path.suffix == ".npz":
        return npz.read(path, who)
    state: Mapping[Any, Any]
    if path.suffix == ".safetensors":
        state = _safetensors(path, who)
    else:
        _check_start(path, start, who)
        state = _torch_file(path, start.startswith(ZIP), who)
    tensors = unwrapped(state, f"{who}: {path}")
    size, claimed = path.stat().st_size, _claimed(tensors)
    if claimed > size:
        raise ValueError(
            f"{who}: {path} has {size} bytes, but its tensors ask for {claimed}: it is damaged,"
            f" or its tensors repeat themselves (save them with .contiguous())"
        )
    return tensors


def check_file(path: Path, who: str) -> None:
    """A FileNotFoundError or IsADirectoryError that says which of the two it is."""
    if path.is_dir():
        raise IsADirectoryError(f"{who}: {path} is a directory; expected a file of weights")
    if not path.is_file():
        raise FileNotFoundError(f"{who}: there is no file {path}")


def _check_start(path: Path, start: bytes, who: str) -> None:
    """A ValueError for a file that cannot be torch's, whatever it is named."""
    if start.startswith((ZIP, PICKLE)):
        return
    found = f"begins with {start[:4]!r}" if start else "is empty"
    if start[8:] == b"{":
        found = "looks like safetensors: name it .safetensors"
    raise ValueError(
        f"{who}: {path} is no checkpoint: it {found}; expected .safetensors, .npz or a file of"
        f" torch.save (.pt, .pth, .bin)"
    )


def metadata(path: Path) -> dict[str, str]:
    """What a .safetensors file says beside its tensors; {} of every other, and of damaged ones."""
    if path.suffix != ".safetensors":
        return {}
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError, RuntimeError, MemoryError):
        return {}  # `read` says what is wrong


def read_json(path: Path, who: str) -> dict[str, Any]:
    """A JSON file that holds an object; its size is looked at before it is read."""
    check_file(path, who)
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise ValueError(
            f"{who}: {path} has {size} bytes, more than {LARGEST_JSON} of any real one"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{who}: {path} is not JSON: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{who}: {path} holds a {type(found).__name__}, expected an object")
    return found


def unwrapped(state: Mapping[Any, Any], where: str) -> dict[str, Tensor]:
    """The model's own tensors, out of a training checkpoint's wrapping; `where` begins an error."""
    for key in WRAPPERS:
        if isinstance(state.get(key), Mapping):
            state = state[key]
    for name, value in state.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: its key {name!r:.80} is no name of a parameter")
        if not isinstance(value, Tensor):
            raise ValueError(f"{where}: {name!r} is no tensor: this is not a state dict of a model")
        plain = not (value.is_nested or value.is_quantized or value.is_meta)
        if not plain or value.layout is not torch.strided:
            raise ValueError(
                f"{where}: {name!r} is a sparse, nested, quantized or empty tensor: save it as a"
                f" plain one"
            )
    if state and all(name.startswith("module.") for name in state):  # DataParallel's prefix
        return {name.removeprefix("module."): value for name, value in state.items()}
    return dict(state)


def _shards(index: Path, who: str) -> dict[str, Tensor]:
    """The tensors that an index maps to files beside it; no name may leave the folder."""
    places = read_json(index, who).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{who}: {index} has no weight_map of tensors to files")
    for name, shard in places.items():
        plain = isinstance(shard, str) and shard not in ("", ".", "..") and "\0" not in shard
        if not plain or Path(shard).name != shard or "\\" in shard:
            raise ValueError(
                f"{who}: {index} puts {name!r:.80} into {shard!r:.80}, expected the name of a file"
                f" in the same folder"
            )
        if not shard.endswith((".safetensors", ".bin", ".pt", ".pth")):
            raise ValueError(f"{who}: {index}: {shard!r:.80} is no .safetensors or torch file")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        for name, tensor in read(index.with_name(shard), who).items():
            if places.get(name) != shard:
                raise ValueError(f"{who}: {index} does not say that {shard} has {name!r:.80}")
            tensors[name] = tensor
    absent = sorted(places.keys() - tensors.keys())
    if absent:
        raise ValueError(
            f"{who}: {places[absent[0]]} lacks {absent[0]!r:.80}, which {index.name} promises"
        )
    return tensors


def _safetensors(path: Path, who: str) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        needs = f"{who}: {path.name} needs safetensors: pip install safetensors"
        raise ImportError(needs) from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{who}: {path} is damaged or not safetensors: {error}") from error
    except (RuntimeError, MemoryError) as error:  # torch cannot map that much
        why = _first_line(error)
        raise ValueError(f"{who}: {path} does not fit into memory: {why}") from error


def _torch_file(path: Path, zipped: bool, who: str) -> Mapping:
    try:
        if zipped:
            _check_records(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{who}: {path} holds more than tensors, or is no torch file; only files that load"
            f" with weights_only=True are read, as others can run code: {_first_line(error)}"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises anything, KeyError included
        why = _first_line(error)
        raise ValueError(f"{who}: {path} is damaged or incomplete: {why}") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{who}: {path} holds a {type(state).__name__}, not a state dict")
    return state


def _check_records(path: Path) -> None:
    """torch.save stores records as they are; a compressed one can grow to any size."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its record {record.filename!r} is compressed")
            if record.filename.endswith("/constants.pkl"):
                raise ValueError(
                    "it is a TorchScript archive, which is code: save its state_dict()"
                )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _claimed(state: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors when each is copied out; one that has several names counts once."""
    views = {
        (t.data_ptr(), t.dtype, tuple(t.shape), t.stride()): t.numel() * t.itemsize
        for t in state.values()
    }
    return sum(views.values())
