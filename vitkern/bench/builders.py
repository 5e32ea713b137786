"""Makes each contestant's forward, in the process of its own: worker.py calls it there.

All peers start from timm's model with the given weights, or without timm from vitkern's modules in
plain PyTorch; vitkern from its own model with the same weights.
A builder raises LeftOut with a reason in words where its library is not installed.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vitkern

from ..model import ViT
from . import work
from .convert import converted
from .task import Task, imported


class Built(NamedTuple):
    """A forward that returns logits, and what it runs on. It keeps nothing else of the task."""

    call: Callable[[], Tensor]
    version: str
    model: ViT | None = None  # vitkern's own
    modules: str = ""  # whose model a peer computes


def build(provider: str, task: Task) -> Built:
    built = BUILDERS[provider](task)
    return built if built.model is not None else built._replace(modules=task.modules)


def native(task: Task) -> Built:
    model, images = ViT(task.config).eval(), task.images
    model.load_state_dict(task.state)
    model.precision = task.precision
    work.require_engine(model, images)
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
    return task.plain_model().to(dtype), task.images.to(dtype)


def onnxruntime(task: Task) -> Built:
    ort = imported("onnxruntime", "onnxruntime")
    path = converted(task, "model.int8.onnx" if task.precision == "int8" else "model.onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = task.threads
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {session.get_inputs()[0].name: task.images.numpy()}
    return Built(lambda: torch.from_numpy(session.run(None, feeds)[0]), ort.__version__)


def openvino(task: Task) -> Built:
    ov = imported("openvino", "openvino")
    path = converted(task, "model.int8.xml" if task.precision == "int8" else "model.xml")
    settings = {
        "INFERENCE_PRECISION_HINT": "bf16" if task.precision == "bf16" else "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": task.threads,
    }
    request = ov.Core().compile_model(path, "CPU", settings).create_infer_request()
    images = task.images.numpy()

    def call() -> Tensor:
        return torch.tensor(request.infer([images], share_inputs=True)[0])  # its own is reused

    return Built(call, importlib.metadata.version("openvino"))


BUILDERS: dict[str, Callable[[Task], Built]] = {
    "torch": eager,
    "compile": compiled,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "native": native,
}
