"""Everything that changes while a run goes on, and its checkpoints: safetensors, never a pickle.

One process, or DDP's first, writes `last.safetensors`: written beside it, then renamed, so that a
kill at any time leaves a whole file. FSDP's processes write a folder of shards together, and a
small JSON file, renamed last, says which folder counts. Either is read by any number of processes.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .parallel import Processes

FILE, POINTER = "last.safetensors", "last.json"
FORMAT = 1


@dataclass
class Progress:
    """How far a run is; the sums are of the epoch under way."""

    step: int = 0
    loss: float = 0.0
    right: float = 0.0
    seen: float = 0.0
    best: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)  # a row an epoch


class State:
    """Model, optimizer, moving average and progress of a run."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: float) -> None:
        self.model, self.optimizer = model, optimizer
        self.names = {p: name for name, p in model.named_parameters()}
        self.progress = Progress()
        self.ema: dict[str, Tensor] = {}
        self._average = get_ema_multi_avg_fn(ema) if ema else None
        if ema:
            self.ema = {name: p.detach().clone() for p, name in self.names.items()}

    @torch.no_grad()
    def average(self) -> None:
        """A step of the moving average."""
        if self._average is not None:
            self._average(list(self.ema.values()), list(self.names), self.progress.step)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the parameters and their averages; nothing without averages."""
        for parameter, name in self.names.items():
            if name in self.ema:
                current = parameter.detach().clone()
                parameter.copy_(self.ema[name])
                self.ema[name].copy_(current)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state by name, the optimizer's made where there are none yet."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found.update({f"ema.{name}": value for name, value in self.ema.items()})
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                kept = self.optimizer.state[parameter]
                if not kept:
                    kept.update(_fresh(self.optimizer, parameter))
                name = self.names[parameter]
                found.update({f"optimizer.{name}.{key}": value for key, value in kept.items()})
        return found


def _fresh(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What the optimizer keeps of a parameter before its first step."""
    zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": zeros} if optimizer.defaults["momentum"] else {}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


# ---- Writing -------------------------------------------------------------------------------------


def save(state: State, folder: pathlib.Path, processes: Processes) -> None:
    """Replace the run's checkpoint by one of the present state."""
    about = {"format": FORMAT, **asdict(state.progress)}
    if processes.sharded and processes.world > 1:
        _save_shards(state, folder, about, processes)
    elif processes.first:
        _save_file(state, folder, about)


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]
) -> None:
    """A safetensors file that is there wholly or not at all."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install safetensors") from error
    beside = path.with_name(path.name + ".new")
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(plain, beside, metadata)
    mask = os.umask(0)  # the way to ask for it is to set it
    os.umask(mask)
    os.chmod(beside, 0o666 & ~mask)  # safetensors lets nobody else read it
    with open(beside, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(beside, path)


def _save_file(state: State, folder: pathlib.Path, about: dict[str, Any]) -> None:
    write_tensors(folder / FILE, state.tensors(), {"vitkern.progress": json.dumps(about)})
    (folder / POINTER).unlink(missing_ok=True)


def _save_shards(
    state: State, folder: pathlib.Path, about: dict[str, Any], processes: Processes
) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint import save as save_distributed

    shards = folder / f"shards-{state.progress.step}"
    if processes.first:
        shutil.rmtree(shards, ignore_errors=True)  # left by a killed run
    processes.wait()
    writer = HuggingFaceStorageWriter(str(shards), save_distributed=True)
    save_distributed(state.tensors(), storage_writer=writer)
    if processes.first:
        beside = folder / (POINTER + ".new")
        beside.write_text(json.dumps({"shards": shards.name, **about}), encoding="utf-8")
        os.replace(beside, folder / POINTER)
        for old in folder.glob("shards-*"):
            if old != shards:
                shutil.rmtree(old, ignore_errors=True)
        (folder / FILE).unlink(missing_ok=True)
    processes.wait()


# ---- Reading -------------------------------------------------------------------------------------


def load(state: State, folder: pathlib.Path) -> None:
    """Continue from a run's checkpoint, of any number of processes."""
    if (folder / POINTER).is_file():
        about = _load_shards(state, folder)
    elif (folder / FILE).is_file():
        about = _load_file(state, folder / FILE)
    else:
        raise FileNotFoundError(f"{folder}: there is no checkpoint ({FILE} or {POINTER}) in it")
    if about.pop("format", None) != FORMAT:
        raise ValueError(f"{folder}: its checkpoint is of another version of vitkern")
    about.pop("shards", None)
    try:
        state.progress = Progress(**about)
    except TypeError as error:
        raise ValueError(f"{folder}: its checkpoint is damaged: {error}") from error


def _load_file(state: State, path: pathlib.Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("vitkern.progress", "null"))
            own = state.tensors()
            names = set(file.keys())
            if not isinstance(about, dict) or names != own.keys():
                odd = sorted(names ^ own.keys())[:3]
                raise ValueError(f"{path} is no checkpoint of this model and optimizer: {odd}")
            for name, target in own.items():
                _fill(target, file.get_tensor(name), f"{path}: {name}")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return about


@torch.no_grad()
def _fill(target: Tensor, value: Tensor, where: str) -> None:
    if target.shape != value.shape:
        raise ValueError(f"{where} has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
    if hasattr(target, "device_mesh"):  # a sharded tensor takes its part
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(
            value.to(target.device),
            target.device_mesh,
            target.placements,  # type: ignore[attr-defined]
        )
    target.copy_(value)


def _load_shards(state: State, folder: pathlib.Path) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as load_distributed

    try:
        about = json.loads((folder / POINTER).read_text(encoding="utf-8"))
        shards = folder / pathlib.PurePath(about["shards"]).name
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder / POINTER} is damaged ({error})") from error
    if not shards.is_dir():
        raise FileNotFoundError(f"{shards}: the shards of the checkpoint are gone")
    own = state.tensors()
    reader = HuggingFaceStorageReader(str(shards))
    load_distributed(own, storage_reader=reader, no_dist=not dist.is_initialized())
    return about
