"""Makes each contestant's forward, in the process of its own: worker.py calls it there.

All peers start from timm's model with the given weights; vitkern from its own model with the same.
A builder raises LeftOut with a reason in words where its library is not installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vitkern
from benchmarks import models, timm_import
from vitkern import ViT, ViTConfig

CALIBRATION_IMAGES = 8  # that OpenVINO's quantisation sees at least, drawn like the timed ones
CALIBRATION_SEED = 1


class LeftOut(Exception):
    """Why a contestant does not take part, in words. `missing`: it is not installed."""

    def __init__(self, why: str, missing: bool = False) -> None:
        super().__init__(why)
        self.missing = missing


class Task(NamedTuple):
    """What everybody is given."""

    config: ViTConfig
    state: dict[str, Tensor]
    images: Tensor  # (B, C, Y, X), fp32
    precision: str
    threads: int
    folder: pathlib.Path  # for files that contestants of a case share

    def timm_model(self) -> nn.Module:
        """timm's model with the weights of this task."""
        timm_import.prepare()
        timm = imported("timm.models.vision_transformer", "timm")
        c = self.config
        model = timm.VisionTransformer(
            img_size=c.image_size, patch_size=c.patch_size, embed_dim=c.width, depth=c.depth,
            num_heads=c.heads, mlp_ratio=c.mlp_width / c.width, num_classes=c.classes,
        )  # fmt: skip
        model.load_state_dict(self.state)
        return model.eval()


class Built(NamedTuple):
    """A forward that returns logits, and what it runs on."""

    call: Callable[[], Tensor]
    version: str
    model: ViT | None = None  # vitkern's own


def imported(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LeftOut(
            f"{package} cannot be imported ({error}): make bench-cpu installs it", missing=True
        ) from error


def build(provider: str, task: Task) -> Built:
    return BUILDERS[provider](task)


def native(task: Task) -> Built:
    model = ViT(task.config).eval()
    model.load_state_dict(task.state)
    model.precision = task.precision
    images = task.images  # the task's weights are not to be kept beside the model's
    models.require_engine(model, images)
    return Built(lambda: model(images), vitkern.__version__, model)


def eager(task: Task) -> Built:
    model, images = _cast(task)
    return Built(lambda: model(images), torch.__version__)


def compiled(task: Task) -> Built:
    model, images = _cast(task)
    run = torch.compile(model)
    return Built(lambda: run(images), torch.__version__)


def _cast(task: Task) -> tuple[nn.Module, Tensor]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[task.precision]
    return task.timm_model().to(dtype), task.images.to(dtype)


def onnxruntime(task: Task) -> Built:
    ort = imported("onnxruntime", "onnxruntime")
    path = _onnx_file(task)
    if task.precision == "int8":
        quantisation = imported("onnxruntime.quantization", "onnx")
        whole, path = imported("onnx", "onnx").load(path), task.folder / "model.int8.onnx"
        del whole.graph.value_info[:]  # the exporter's shapes are not those after quantisation
        quantisation.quantize_dynamic(whole, path, per_channel=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = task.threads
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {session.get_inputs()[0].name: task.images.numpy()}
    return Built(lambda: torch.from_numpy(session.run(None, feeds)[0]), ort.__version__)


def _onnx_file(task: Task) -> pathlib.Path:
    """The model as ONNX: written by whoever needs it first, under its name once it is whole."""
    path = task.folder / "onnx" / "model.onnx"
    if not path.exists():
        for package in ("onnx", "onnxscript"):
            imported(package, package)
        unfinished = task.folder / f"onnx.{os.getpid()}"
        unfinished.mkdir()
        torch.onnx.export(
            task.timm_model(), (task.images,), unfinished / path.name, dynamo=True, verbose=False
        )
        try:
            unfinished.rename(path.parent)
        except OSError:  # another one was faster
            if not path.exists():
                raise
    return path


def openvino(task: Task) -> Built:
    ov = imported("openvino", "openvino")
    model = ov.convert_model(
        task.timm_model(), example_input=task.images, input=list(task.images.shape)
    )
    if task.precision == "int8":
        model = _quantised(model, task)
    settings = {
        "INFERENCE_PRECISION_HINT": "bf16" if task.precision == "bf16" else "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": task.threads,
    }
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    images = task.images.numpy()
    version = importlib.metadata.version("openvino")

    def call() -> Tensor:
        return torch.tensor(request.infer([images], share_inputs=True)[0])  # its own is reused

    return Built(call, version)


def _quantised(model: object, task: Task) -> object:
    """Weights and activations in int8, by the ranges that random images show."""
    nncf = imported("nncf", "nncf")
    generator = torch.Generator().manual_seed(CALIBRATION_SEED)
    batches = -(-CALIBRATION_IMAGES // len(task.images))
    shown = [torch.randn(task.images.shape, generator=generator).numpy() for _ in range(batches)]
    return nncf.quantize(
        model, nncf.Dataset(shown), model_type=nncf.ModelType.TRANSFORMER,
        subset_size=batches,
    )  # fmt: skip


BUILDERS: dict[str, Callable[[Task], Built]] = {
    "torch": eager,
    "compile": compiled,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "native": native,
}
