"""quantise: turn a model to int8, and report what that costs in accuracy.

`simulated` is the same model in plain PyTorch: every linear layer of a block is `int8.linear`. The
engine is tested against it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import int8
from .model import ViT

SYNTHETIC_IMAGES = 8
BATCH = 8
LAYER_IMAGES = 8  # on which the errors of single layers are measured: each keeps all its rows


class SimulatedLinear(nn.Module):
    """A linear layer in int8, by PyTorch: of rows (..., K)."""

    def __init__(self, weight: int8.Quantised, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return int8.linear(x, self.weight, self.bias).to(x.dtype)


def simulated(model: ViT) -> ViT:
    """A copy that computes in plain PyTorch what the model does with precision "int8"."""
    copied = copy.deepcopy(model).float().eval()
    copied.precision, copied.path = None, "reference"
    state = int8.state_of(model)
    with torch.no_grad():
        for name, value in state.items():
            if isinstance(value, Tensor):
                copied.get_parameter(name).copy_(value)
    for name, value in state.items():
        if isinstance(value, int8.Quantised):
            owner = name.removesuffix(".weight")
            above, _, child = owner.rpartition(".")
            layer = _simulated_layer(copied.get_submodule(owner), value)
            setattr(copied.get_submodule(above), child, layer)
    return copied


def _simulated_layer(layer: Any, weight: int8.Quantised) -> SimulatedLinear:
    """A Linear with another weight."""
    return SimulatedLinear(weight, None if layer.bias is None else layer.bias.detach())


@dataclass(frozen=True)
class LayerReport:
    """A linear layer in int8 on the rows that it has in the model as it was."""

    name: str
    weight_error: float  # rms, relative to the weight's rms
    error: float  # rms of its result, relative to the result's rms


@dataclass(frozen=True)
class Report:
    """What int8 costs, against the model as it was; `print(report)` shows a table."""

    images: int
    synthetic: bool  # no images were given: noise in their place
    agreement: float | None  # share of images with the same first class; None without classes
    error: float  # rms of the logits' error, relative to the logits' rms
    worst: float  # largest error of a logit, in the same unit
    layers: tuple[LayerReport, ...]
    parameter_bytes: int  # of the model as it was
    packed_bytes: int  # of its integers, scales and other parameters

    def __str__(self) -> str:
        kind = "synthetic images (noise: pass images of your own)" if self.synthetic else "images"
        same = "no classes" if self.agreement is None else f"{self.agreement:.1%}"
        lines = [
            f"int8 against {self.images} {kind}",
            f"  same first class      {same}",
            f"  logits, rms error     {self.error:.2%}",
            f"  logits, largest error {self.worst:.2%}",
            f"  parameters            {self.parameter_bytes / 1e6:.1f} MB, in int8"
            f" {self.packed_bytes / 1e6:.1f} MB",
            f"{'layer':<28}{'weight error':>13}{'result error':>13}",
        ]
        lines += [f"{la.name:<28}{la.weight_error:>13.2%}{la.error:>13.2%}" for la in self.layers]
        return "\n".join(lines)


def quantise(model: ViT, images: Tensor | Iterable[Tensor] | None = None) -> Report:
    """Set `model.precision = "int8"` and report what that costs on these images.

    model: a `vitkern.ViT` on the CPU in eval mode; of a timm model, `vitkern.accelerate(model)`.
    images: one batch (B, C, Y, X) or several, as the model takes them; without them noise is used,
    which says little about photographs. Nothing is calibrated: the images change no weight. Where
    the report cannot be made, the model stays as it was.
    """
    if not isinstance(model, ViT):
        raise TypeError(
            f"quantise: expected a vitkern.ViT, got {type(model).__name__}; of a timm model, pass"
            f" vitkern.accelerate(model)"
        )
    model.check_weights("quantise's report")
    if model.training or model.device.type != "cpu":
        where = "in training mode" if model.training else f"on {model.device}"
        raise ValueError(f"quantise: the model is {where}; call model.cpu().eval() first")
    before = model.precision
    batches = _batches(model, images)
    if not batches:
        raise ValueError("quantise: there are no images; pass None to use synthetic ones")
    with torch.inference_mode():
        exact = _logits(model, batches, None if before == "int8" else before)
        layer_reports = tuple(_layer_reports(model, batches[0][:LAYER_IMAGES]))
        try:
            ours = _logits(model, batches, "int8")
        except Exception:
            model.precision = before
            raise
    model.precision = "int8"
    unit = exact.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    miss = (ours - exact) / unit
    same = (ours.argmax(-1) == exact.argmax(-1)).double().mean().item()
    return Report(
        images=sum(len(batch) for batch in batches),
        synthetic=images is None,
        agreement=same if model.config.classes > 1 else None,
        error=miss.square().mean().sqrt().item(),
        worst=miss.abs().max().item(),
        layers=layer_reports,
        parameter_bytes=sum(p.nbytes for p in model.parameters()),
        packed_bytes=sum(_bytes(value) for value in int8.state_of(model).values()),
    )


def _batches(model: ViT, images: Tensor | Iterable[Tensor] | None) -> list[Tensor]:
    if images is None:
        c = model.config
        seeded = torch.Generator().manual_seed(0)
        made = torch.randn(SYNTHETIC_IMAGES, c.channels, *c.pixels, generator=seeded)
        return [made.to(model.dtype)]
    given = [images] if isinstance(images, Tensor) else list(images)
    for batch in given:
        if not isinstance(batch, Tensor) or batch.ndim != 4:
            what = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
            raise ValueError(f"quantise: images must be batches (B, C, Y, X), got {what}")
    return [part for batch in given for part in batch.split(BATCH) if len(part)]


def _logits(model: ViT, batches: list[Tensor], precision: str | None) -> Tensor:
    """Of all images, in fp32, at a precision that the model keeps."""
    model.precision = precision
    return torch.cat([model(batch).float() for batch in batches])


def _layer_reports(model: ViT, images: Tensor) -> Iterator[LayerReport]:
    """Each linear layer by itself, on the rows that it has in fp32."""
    plain = copy.deepcopy(model).float()
    plain.precision, plain.path = None, "reference"
    state = int8.state_of(model)
    rows: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, result: Tensor) -> None:
            rows[name] = given[0]

        return hook

    matrices = {name[:-7]: one for name, one in state.items() if isinstance(one, int8.Quantised)}
    for name in matrices:
        plain.get_submodule(name).register_forward_hook(keep(name))
    plain(images if images.dtype == torch.uint8 else images.float())
    for name, weight in matrices.items():
        layer: Any = plain.get_submodule(name)
        by = _smoothing(plain, state, name)
        ours = _simulated_layer(layer, weight)(rows[name] / by)
        weight_error = _error(weight.values(), layer.weight * by)
        yield LayerReport(name, weight_error, _error(ours, layer(rows[name])))


def _smoothing(plain: ViT, state: dict[str, Tensor | int8.Quantised], layer: str) -> Tensor:
    """What the columns of a layer's rows are divided by in int8."""
    for norm, readers in int8.SMOOTHED:
        linear = next((one for one in readers if layer.endswith(f".{one}")), None)
        if linear is not None:
            by = torch.ones(plain.config.width)
            for key in ("bias", "weight"):  # a column that is zero in both is zero in the rows
                name = f"{layer.removesuffix(linear)}{norm}.{key}"
                was, now = plain.get_parameter(name), cast(Tensor, state[name])
                by = torch.where(now != 0, was / now, by)
            return by
    return torch.ones(())


def _error(got: Tensor, truth: Tensor) -> float:
    unit = truth.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return ((got - truth).square().mean().sqrt() / unit).item()


def _bytes(value: Tensor | int8.Quantised) -> int:
    parts = value if isinstance(value, int8.Quantised) else (value,)
    return sum(part.nbytes for part in parts)
