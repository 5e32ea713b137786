"""A whole model against eager PyTorch: who competes, on which images, and how much work it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from vitkern import ViT
from vitkern.bench.work import bytes_moved, engine_flops, flops, require_engine, step_flops
from vitkern.precision import PRECISIONS

__all__ = [
    "bytes_moved", "calls", "contestants", "engine_flops", "flops", "require_engine", "step_flops",
]  # fmt: skip


def contestants(model: ViT, precision: str) -> dict[str, nn.Module]:
    """Eager PyTorch at this precision, in 16 bits also in fp32 (often faster), and vitkern."""
    dtype = PRECISIONS[precision].dtype
    eager = {"torch": copy.deepcopy(model).to(dtype)}
    if dtype != torch.float32:
        eager["torch_fp32"] = copy.deepcopy(model)
    for peer in eager.values():
        peer.path = "reference"
    native = copy.deepcopy(model)
    native.precision = precision
    return {**eager, "native": native}


def calls(
    models: Mapping[str, nn.Module], image: Tensor, precision: str
) -> dict[str, Callable[[], object]]:
    """One forward of each; a peer at this precision gets its image in that dtype, once."""
    images = {
        p: image.to(torch.float32 if p in ("torch_fp32", "native") else PRECISIONS[precision].dtype)
        for p in models
    }
    return {p: lambda p=p: models[p](images[p]) for p in models}
