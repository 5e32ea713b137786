"""What `ViT.explain()` prints: the path of the next forward, and why it is that one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import dispatch
from .precision import CHOICES, PRECISIONS, torch_allows_tf32

if TYPE_CHECKING:
    from .model import ViT


def explain(model: ViT, image: Tensor | None) -> str:
    """The path of the next forward and its reason, with precision, device and instruction set."""
    weight = model.patch_embed_weight
    if image is not None:
        dispatch.check_image(model, image, weight)
    route = dispatch.decide(model, image, "logits", weight)
    if route.path == "engine" and image is not None:
        reason = model.engines.unpackable(route.precision)
        route = dispatch.without_engine(model, reason) if reason else route
    where = "GPU" if model.device.type == "cuda" else "CPU"
    what = {
        "engine": f"packed {where} engine, the whole forward",
        "fused": "fused operators, one call per operator",
        "reference": "plain PyTorch, module by module",
    }[route.path]
    lines = [f"path: {route.path} ({what})", f"why: {route.reason}"]
    lines += [f"precision: {_precision(model, route)}", f"device: {model.device}"]
    c = model.config
    in_torch = [f"the stem {c.stem!r}"] if c.stem != "none" else []
    in_torch += ["attention pooling"] if c.pool == "map" else []
    in_torch += ["both heads"] if c.head == "distilled" else []
    if in_torch and route.path != "reference":
        lines.append(f"in PyTorch: {', '.join(in_torch)}")
    if model.released is not None:
        lines.append("weights: released; all but the engine need model.restore_weights()")
    if model.device.type == "cpu":
        isa = _isa() if route.path != "reference" else "chosen by PyTorch"
        lines.append(f"instruction set: {isa}")
        if route.path == "fused" and not _has_native_kernels(
            dispatch.compute_dtype(model) or weight.dtype
        ):
            lines.append(
                "note: this dtype has no native kernel; the operators run their PyTorch references"
            )
    elif route.path != "reference":
        lines.append(f"kernels: {_gpu_kernels(model)}")
        graphs = [engine.graphs for engine in model.engines.packed() if engine.graphs]
        lines += [f"CUDA graphs: {said}" for said in graphs[:1] if route.path == "engine"]
    return "\n".join(lines)


def _precision(model: ViT, route: dispatch.Route) -> str:
    """Its name; of fp32 on a GPU also who chose it."""
    name = dispatch.precision_of(model)
    if model.device.type != "cuda" or name not in ("fp32", "tf32"):
        return name
    if route.path != "reference" and model.precision is not None:
        return f"{name}, by model.precision"
    return f"{'tf32' if torch_allows_tf32() else 'fp32'}, by torch's TF32 switches"


def _has_native_kernels(dtype: torch.dtype) -> bool:
    return dtype in {PRECISIONS[name].dtype for name in CHOICES}


def _gpu_kernels(model: ViT) -> str:
    if model.dtype == torch.float64:
        return "PyTorch's (float64 has none of its own)"
    try:
        from .gpu.runtime import device

        return device.executor(model.device).status()
    except (ImportError, RuntimeError) as error:
        return f"PyTorch's: the GPU backend is not available ({error})"


def _isa() -> str:
    try:
        from . import cpu

        return cpu.isa()
    except (ImportError, AttributeError, ValueError) as error:
        return f"unknown ({error})"
