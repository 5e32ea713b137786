"""A model as a graph that runs without vitkern: ONNX, and torch.export's .pt2.

Both hold plain operators, those of the reference path, and are run again after they are written:
the largest difference from the model itself is the result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .model import ViT

OPSET = 20  # the first whose GELU is an operator; ONNX Runtime reads it since 1.17
OPSETS = range(18, 24)  # that the exporter writes
SINGLE_FILE = 1_900_000_000  # bytes: protobuf ends at 2 GiB, more goes into a file beside it
# Of the logits' rms. fp32 in another order of summation is below 1e-4 of it; fp16 has 2^-11 a step.
ALLOWED = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}
BATCHES = (1, 3)  # that are compared where the batch is open


class Checked(NamedTuple):
    """What a written graph gives beside the model: the largest difference, and the rms of it all.

    difference is None where there was nothing to run the graph with.
    """

    difference: float | None
    rms: float


def to_onnx(
    model: ViT,
    path: str | os.PathLike[str],
    *,
    opset: int = OPSET,
    batch: int | None = None,
    notes: dict[str, Any] | None = None,
) -> Checked:
    """Write a model as ONNX; ONNX Runtime, where it is installed, checks it.

    The input is "image" (batch, 3, Y, X), normalised floats, the output what `model(image)` gives.
    batch: a fixed one; None leaves it open. notes: further entries of the file's metadata, which
    has the model's mean, std and image size. Weights of 1.9 GB and more stand in a file beside it.
    """
    _check(model, "to_onnx")
    if opset not in OPSETS:
        raise ValueError(f"to_onnx: opset must be {OPSETS[0]} to {OPSETS[-1]}, not {opset}")
    if model.dtype is torch.bfloat16:
        raise ValueError(
            "to_onnx: no ONNX runtime computes bf16 on a CPU: dtype float32 or float16"
        )
    _needs("onnxscript", "writing ONNX")
    image = _image(model, batch or 2)
    large = sum(p.numel() * p.element_size() for p in model.parameters()) > SINGLE_FILE
    open_batch = None if batch else ({0: torch.export.Dim("batch", min=1)},)
    with _reference(model), _quiet(), torch.no_grad():
        program = torch.onnx.export(
            model, (image,), dynamo=True, verbose=False, opset_version=opset,
            input_names=["image"], output_names=["logits" if model.config.classes else "features"],
            dynamic_shapes=open_batch,
        )  # fmt: skip
    if program is None:  # of the older exporter, which is not asked
        raise RuntimeError("torch.onnx.export gave no program")
    said = {"mean": model.config.mean, "std": model.config.std, "image_size": model.config.pixels}
    for name, value in {**said, **(notes or {})}.items():
        program.model.metadata_props[name] = json.dumps(value)

    def write(beside: Path) -> None:
        program.save(beside, external_data=large)

    return _written(Path(path), write, lambda place: _onnx_runs(place, model, batch))


def to_torch(model: ViT, path: str | os.PathLike[str], *, batch: int | None = None) -> Checked:
    """Write a model as torch.export's .pt2, which `torch.export.load(path).module()` runs.

    batch: a fixed one; None leaves it open. The file is loaded back and compared.
    """
    _check(model, "to_torch")
    open_batch = None if batch else ({0: torch.export.Dim("batch", min=1)},)
    with _reference(model), _quiet(), torch.no_grad():
        program = torch.export.export(
            model, (_image(model, batch or 2),), dynamic_shapes=open_batch
        )

    def runs(place: Path) -> Checked:
        with _quiet(), torch.no_grad():
            again = torch.export.load(place).module()
            return _compared(model, batch, again)

    return _written(Path(path), lambda beside: torch.export.save(program, beside), runs)


def _onnx_runs(path: Path, model: ViT, batch: int | None) -> Checked:
    try:
        import onnxruntime
    except ImportError:
        return Checked(None, 0.0)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(image: Tensor) -> Tensor:
        (found,) = session.run(None, {"image": image.numpy()})
        return torch.from_numpy(found)

    return _compared(model, batch, run)


def _compared(model: ViT, batch: int | None, run: Callable[[Tensor], Tensor]) -> Checked:
    worst, rms = 0.0, 0.0
    with torch.inference_mode():
        for count in (batch,) if batch else BATCHES:
            image = _image(model, count)
            wanted, found = model(image).float(), run(image).float()
            if found.shape != wanted.shape:
                raise ValueError(
                    f"the exported graph gives {tuple(found.shape)}, not {tuple(wanted.shape)}"
                )
            worst = max(worst, (found - wanted).abs().max().item())
            rms = max(rms, wanted.square().mean().sqrt().item())
    if not worst <= ALLOWED[model.dtype] * max(rms, 1e-3):  # NaN is no agreement
        raise ValueError(
            f"the exported graph differs from the model by {worst:.1e}, at an rms of {rms:.1e}:"
            f" nothing was written"
        )
    return Checked(worst, rms)


def _written(path: Path, write: Callable[[Path], None], run: Callable[[Path], Checked]) -> Checked:
    """The file and those beside it appear when they have been checked, or not at all."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; expected the name of a file")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".exporting-") as folder:
        beside = Path(folder, path.name)
        write(beside)
        checked = run(beside)
        for one in sorted(Path(folder).iterdir(), key=lambda one: one == beside):  # itself last
            os.replace(one, path.with_name(one.name))
    return checked


def _check(model: Any, who: str) -> None:
    if not isinstance(model, ViT):
        raise TypeError(f"{who}: expected a vitkern.ViT, got {type(model).__name__}")
    if model.training or model.device.type != "cpu":
        raise ValueError(f"{who}: call model.eval().cpu() first")


def _image(model: ViT, count: int) -> Tensor:
    c = model.config
    noise = torch.randn(count, c.channels, *c.pixels, generator=torch.Generator().manual_seed(0))
    return noise.to(model.dtype)


@contextlib.contextmanager
def _reference(model: ViT) -> Iterator[None]:
    path, precision = model.path, model.precision
    model.path, model.precision = "reference", None
    try:
        yield
    finally:
        model.path, model.precision = path, precision


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' warnings about themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def _needs(module: str, what: str) -> None:
    import importlib

    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{what} needs {module}: pip install 'vitkern[onnx]'") from error


__all__ = ["Checked", "to_onnx", "to_torch"]
