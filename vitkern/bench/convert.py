"""Writes a case's model in another engine's format, in a process of its own, which then ends.

python -m vitkern.bench.convert FILE FOLDER THREADS

An engine that reads such a file holds nothing of PyTorch's model, nor of what converting took.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch

from .task import Task, imported, require

CALIBRATION_IMAGES = 8  # that OpenVINO's quantisation sees at least, drawn like the timed ones
CALIBRATION_SEED = 1


def converted(task: Task, file: str) -> pathlib.Path:
    """Where the file is: written by whoever needs it first, there once it is whole."""
    _, packages = WRITERS[file]
    for package in packages:
        require(package)
    path = _place(task, file)
    if not path.exists():
        command = [sys.executable, "-m", "vitkern.bench.convert", file, str(task.folder)]
        done = subprocess.run([*command, str(task.threads)], capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise RuntimeError(f"{file} could not be written: {said[-1]}")
    return path


def _place(task: Task, file: str) -> pathlib.Path:
    return task.folder / f"{file}.folder" / file  # weights stand in a file beside it


def onnx(task: Task, path: pathlib.Path) -> None:
    torch.onnx.export(task.plain_model(), (task.images,), path, dynamo=True, verbose=False)


def onnx_int8(task: Task, path: pathlib.Path) -> None:
    """Weights in int8 beforehand, activations at run time."""
    whole = imported("onnx", "onnx").load(converted(task, "model.onnx"))
    del whole.graph.value_info[:]  # the exporter's shapes are not those after quantisation
    quantisation = imported("onnxruntime.quantization", "onnxruntime")
    quantisation.quantize_dynamic(whole, path, per_channel=True)


def openvino(task: Task, path: pathlib.Path) -> None:
    ov = imported("openvino", "openvino")
    shape = list(task.images.shape)
    model = ov.convert_model(task.plain_model(), example_input=task.images, input=shape)
    ov.save_model(model, path, compress_to_fp16=False)


def openvino_int8(task: Task, path: pathlib.Path) -> None:
    """Weights and activations in int8, by the ranges that random images show."""
    ov, nncf = imported("openvino", "openvino"), imported("nncf", "nncf")
    generator = torch.Generator().manual_seed(CALIBRATION_SEED)
    batches = -(-CALIBRATION_IMAGES // len(task.images))
    shown = [torch.randn(task.images.shape, generator=generator).numpy() for _ in range(batches)]
    model = nncf.quantize(
        ov.Core().read_model(converted(task, "model.xml")), nncf.Dataset(shown),
        model_type=nncf.ModelType.TRANSFORMER, subset_size=batches,
    )  # fmt: skip
    ov.save_model(model, path, compress_to_fp16=False)


# file -> who writes it, and the packages that this takes
WRITERS: dict[str, tuple[Callable[[Task, pathlib.Path], None], tuple[str, ...]]] = {
    "model.onnx": (onnx, ("onnx", "onnxscript")),
    "model.int8.onnx": (onnx_int8, ("onnx", "onnxscript", "onnxruntime")),
    "model.xml": (openvino, ("openvino",)),
    "model.int8.xml": (openvino_int8, ("openvino", "nncf")),
}


def main() -> None:
    file, folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    task = Task.read(pathlib.Path(folder), "fp32", int(threads))
    whole = _place(task, file).parent
    unfinished = pathlib.Path(tempfile.mkdtemp(dir=folder))
    write, _ = WRITERS[file]
    write(task, unfinished / file)
    try:
        unfinished.rename(whole)
    except OSError:  # another one was faster
        if not whole.exists():
            raise


if __name__ == "__main__":
    main()
