"""A whole model against itself in float64: logits at each precision, gradients of a training step.

The yardstick is the same model in eager PyTorch at that precision; of tf32, PyTorch whose matmuls
round their factors as a TF32 unit does; of int8, `quantisation.simulated`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..contract import SLACK, Error, Verdict, judge
from ..model import ViT
from ..precision import PRECISIONS, Precision
from ..quantisation import simulated
from .tf32 import Tf32

IMAGES = 2  # enough to see an error; in float64 seconds instead of minutes


def dtype_of(precision: str) -> torch.dtype:
    """What results are judged in: int8's are fp32."""
    row = PRECISIONS.get(precision)
    return row.dtype if row else torch.float32


def images(model: ViT, count: int = IMAGES) -> Tensor:
    """Random ones of the model's size, the same on every machine."""
    c = model.config
    shape = (count, c.channels, *(c.patch_size * n for n in c.grid))
    g = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=g, dtype=torch.float64).float().to(model.device)


def exact(model: ViT) -> ViT:
    """The same weights in float64, module by module: the truth."""
    return _reference(model, torch.float64)


def eager(model: ViT, precision: str) -> ViT:
    """The same weights in plain PyTorch, in the dtype of a precision: the yardstick."""
    return simulated(model) if precision == "int8" else _reference(model, dtype_of(precision))


def _reference(model: ViT, dtype: torch.dtype) -> ViT:
    made = copy.deepcopy(model).to(dtype)
    made.precision, made.path = None, "reference"
    return made


def native(model: ViT, precision: str) -> ViT:
    """The same weights at a precision, by the path that a user gets."""
    made = copy.deepcopy(model)
    made.precision = precision
    return made


class Logits:
    """The logits of one model on a few images, judged precision by precision."""

    def __init__(self, model: ViT, pixels: Tensor) -> None:
        self.model, self.pixels = model, pixels
        with torch.inference_mode():
            self.truth = exact(model)(pixels.double())

    def torchs(self, precision: str) -> Tensor:
        peer = eager(self.model, precision)
        mode = Tf32() if precision == "tf32" else contextlib.nullcontext()
        with torch.no_grad(), mode:
            return peer(self.pixels.to(peer.dtype))

    def ours(self, precision: str, isa: str = "") -> Tensor:
        """By the path that a user gets, or by the packed engine of an instruction set."""
        if isa:
            from ..engines.cpu import CpuEngine

            with torch.inference_mode():
                return CpuEngine(self.model, precision, isa=isa).logits(self.pixels)
        if precision == "fp16":  # no choice of a model in fp32: the model is held in it
            model = copy.deepcopy(self.model).half()
            with torch.inference_mode():
                return model(self.pixels.half())
        model = native(self.model, precision)
        with torch.inference_mode():
            return model(self.pixels)

    def judge(self, precision: str, isa: str = "", gpu: Precision | None = None) -> Verdict:
        return judge(
            self.ours(precision, isa), self.torchs(precision), self.truth,
            dtype=dtype_of(precision), gpu=gpu,
        )  # fmt: skip


def judge_step(model: ViT, pixels: Tensor, precision: str, gpu: Precision | None = None) -> Verdict:
    """All gradients of a training step together: fp32, or under autocast."""
    target = torch.arange(len(pixels), device=pixels.device) % model.config.classes

    def step(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
        trained = copy.deepcopy(model).to(dtype).train()
        trained.path = path
        narrow = precision in ("bf16", "fp16") and dtype != torch.float64
        kind = pixels.device.type
        with torch.autocast(kind, dtype_of(precision)) if narrow else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(trained(pixels.to(dtype)), target)
        loss.backward()
        named = trained.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}

    truth = step("reference", torch.float64)
    ours = joint_error(step("auto", torch.float32), truth)
    torchs = joint_error(step("reference", torch.float32), truth)
    dtype = dtype_of(precision)
    kept = ours.within(torchs, dtype, SLACK, gpu)
    return Verdict(ours, torchs, "" if kept else f"{ours} against PyTorch's {torchs}")


def joint_error(got: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Error:
    """Error.of all of them in one vector, each in its own unit, without making the vector.

    Some are 0 in exact arithmetic (a constant added to every key changes no softmax): a unit is at
    least a hundredth of the largest.
    """
    sizes = {n: t.square().mean().sqrt().item() for n, t in truth.items()}
    least = 1e-2 * max(sizes.values())
    worst = squares = of_truth = 0.0
    for name, t in truth.items():
        unit = max(sizes[name], least)
        miss = (got[name].double() - t) / unit
        worst = max(worst, miss.abs().max().item()) if miss.isfinite().all() else math.nan
        squares += miss.square().sum().item()
        of_truth += t.numel() * (sizes[name] / unit) ** 2
    count = sum(t.numel() for t in truth.values())
    rms = math.sqrt(of_truth / count)
    return Error(worst / rms, math.sqrt(squares / count) / rms)
