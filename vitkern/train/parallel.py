"""One process or many: torchrun's variables, DDP and FSDP2. All communication is PyTorch's."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model import ViT


@dataclass
class Processes:
    """This process among all; `model` is what a step calls."""

    device: torch.device
    rank: int = 0
    world: int = 1
    sharded: bool = False

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def wrap(self, model: ViT) -> nn.Module:
        """The model as a step calls it: itself, DDP around it, or its blocks sharded in place."""
        if self.world == 1:
            return model
        if not self.sharded:
            ids = [self.device] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(model, device_ids=ids)
        from torch.distributed.fsdp import fully_shard

        # The root is resharded after a forward, too: by default it would keep its gathered weights,
        # and the next forward would not see that an evaluation has put the averages there.
        for module in (*model.blocks, model):
            fully_shard(module, reshard_after_forward=True)
        return model

    def accumulating(self, stepped: nn.Module, last: bool) -> contextlib.AbstractContextManager:
        """Around a part of a batch: only the last one exchanges gradients."""
        if isinstance(stepped, nn.parallel.DistributedDataParallel) and not last:
            return stepped.no_sync()
        if self.sharded and self.world > 1:
            stepped.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes, on each of them."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def same(self, value: Any) -> Any:
        """The first process's value, on each of them."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


def start(device: str, parallel: str) -> Processes:
    """Join the processes that torchrun started, if it did."""
    if device not in ("auto", "cpu") and not device.startswith("cuda"):
        raise ValueError(f"device must be cpu, cuda or auto, not {device!r:.80}")
    cuda = torch.cuda.is_available()
    if device.startswith("cuda") and not cuda:
        raise ValueError(f"device {device}: PyTorch finds no CUDA device here")
    kind = "cuda" if cuda and device != "cpu" else "cpu"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Processes(torch.device(device if device.startswith("cuda") else kind))
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        where = torch.device("cuda", torch.cuda.current_device())
    else:
        where = torch.device("cpu")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return Processes(where, dist.get_rank(), world, parallel == "fsdp")


def stop() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
