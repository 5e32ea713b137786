"""Time what a GPU forward and a training launch spend on the host, without a GPU.

    python tools/launch_overhead.py [--model B/16] [--batch 8]

The driver is a library of functions that do nothing, so what is left is Python and vitkern's C++.
Tensors are the CPU's: on a GPU, asking for the current stream and whether it is captured adds half
a microsecond. Best of several rounds, in microseconds of one thread's CPU time, which is the time
that passes where nothing else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import shutil
import struct
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vitkern import _C, ViT, ViTConfig, dispatch
from vitkern.engines import base, trace
from vitkern.engines.gpu import GpuEngine
from vitkern.gpu import launch
from vitkern.gpu.configs import Row
from vitkern.gpu.launch import Variant
from vitkern.gpu.runtime.binary import BinaryExecutor, Entry
from vitkern.registry import REGISTRY

# What the launcher calls: all succeed at once. Answers are what it asks an H100 for.
DRIVER = """
#include <stddef.h>
#include <string.h>
#define NOTHING(name) int name() { return 0; }
#define HANDLE(name) int name(void** handle) { static int made; *handle = &made; return 0; }
NOTHING(cuInit) NOTHING(cuCtxPushCurrent_v2) NOTHING(cuCtxPopCurrent_v2)
NOTHING(cuFuncSetAttribute) NOTHING(cuLaunchKernel) NOTHING(cuGraphExecKernelNodeSetParams_v2)
NOTHING(cuGraphLaunch) NOTHING(cuGraphExecDestroy) NOTHING(cuGraphDestroy)
NOTHING(cuThreadExchangeStreamCaptureMode)
HANDLE(cuModuleLoadData) HANDLE(cuModuleGetFunction) HANDLE(cuGraphCreate)
HANDLE(cuGraphAddKernelNode_v2) HANDLE(cuGraphInstantiateWithFlags)
static int context;
int cuDevicePrimaryCtxRetain(void** c) { *c = &context; return 0; }
int cuCtxGetCurrent(void** c) { *c = &context; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int i) { *device = i; return 0; }
int cuDeviceGetName(char* name, int size, int d) { strncpy(name, "none", size); return d; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? 9 : which == 76 ? 0 : 232448;
  return device;
}
int cuFuncGetAttribute(int* value, int which, void* f) { *value = 1024; return which * !f; }
int cuGetErrorString(int status, const char** text) { *text = "none"; return 0 * status; }
int cuStreamIsCapturing(void* stream, int* is) { *is = 0; return stream != NULL; }
"""
# A cubin by its header alone, with one empty section.
IMAGE = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
    "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64, 0, 64, 0, 0, 64, 1, 0
)  # fmt: skip
IMAGE += bytes(64)


class Everything:
    """In the place of a folder of binaries: it has one for each variant."""

    folder, triton, archs = pathlib.Path("nowhere"), "", ("sm_90",)

    def find(self, variant: Variant, arch: str) -> Entry:
        promised = tuple((n, kind, n in variant.divisible) for n, kind in variant.signature)
        return Entry(
            variant.name, variant.kernel.__name__, arch, self.folder, "", variant.num_warps, 32,
            variant.num_stages, 0, 2, promised, {}, code=IMAGE,
        )  # fmt: skip


def executor() -> BinaryExecutor:
    """Of an H100 that does nothing."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise OSError("the stand-in driver needs a C compiler: none is called cc")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "libcuda.so.1")
        command = [compiler, "-O1", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=DRIVER, text=True, check=True)
        driver = _C.Driver("cuda", str(path))
    store: Any = Everything()
    return BinaryExecutor(store, 0, "sm_90", driver, lambda: 0, torch.device("cpu"))


def best(call: Callable[[], object], calls: int, rounds: int = 15) -> float:
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - begin) / calls)
    return 1e6 * min(times)


def training(name: str, batch: int) -> dict[str, float]:
    """A launch of a training step, from `launch.launch` to the driver."""
    case = trace.Case(name, "bf16", batch, training=True)
    recorder = launch.Recorder("sm_90")
    trace.operator_launches(case, recorder)
    made: dict[int, torch.Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        like = {"dtype": value.dtype}
        return made.setdefault(id(value), torch.empty_strided(value.shape, value.stride(), **like))

    calls = [
        (one.kernel, one.grid, Row({}, one.num_warps, one.num_stages, ""), one.writes,
         {name: real(value) for name, value in one.arguments.items()})
        for one in recorder.launches
    ]  # fmt: skip

    def step() -> None:
        for kernel, grid, row, writes, arguments in calls:
            launch.launch(kernel, grid, row, writes, **arguments)

    with launch.executing(executor()):
        step()
        each = best(step, 1, 40) / len(calls)
    return {"training launch": each}


@contextlib.contextmanager
def on_gpu_kernels() -> Iterator[None]:
    """The operators run what they run on a GPU, on the CPU's tensors; a microsecond more a call."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    library = torch.library.Library("vitkern", "IMPL")

    def instead(name: str) -> Callable[..., Any]:
        op = getattr(torch.ops.vitkern, name).default
        return lambda *given: op.redispatch(keys, *given)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the CPU's own are replaced, on purpose
        for op in {spec.op.name for spec in REGISTRY.values()}:
            for name in (op, f"{op}_backward"):
                library.impl(name, instead(name), "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def step(name: str, batch: int, rounds: int = 30) -> dict[str, float]:
    """Forward and backward of a model in training mode: the host's time, and a launch's share.

    Autograd, Python's walk through the model, shape checks, allocation and the launches are in it.
    Of small images: what stays PyTorch's, a sum of gradients for each block, the CPU computes here.
    """
    named = ViTConfig.named(name)
    config = named.replace(image_size=2 * named.patch_size)
    model, gpu = ViT(config, dtype=torch.bfloat16).train(), executor()
    c = model.config
    image = torch.zeros(batch, c.channels, *c.pixels, dtype=torch.bfloat16)
    grad = torch.zeros(batch, c.classes or c.width, dtype=torch.bfloat16)

    def once() -> float:
        model.zero_grad(set_to_none=True)  # the optimizer's
        begin = time.thread_time()
        model(image).backward(grad)
        return 1e6 * (time.thread_time() - begin)

    with on_gpu_kernels(), launch.executing(gpu):
        once()
        before = gpu.launched
        once()
        count = gpu.launched - before
        whole = min(once() for _ in range(rounds))
    return {f"training step, {count} launches": whole, "  of it for a launch": whole / count}


class Idle(GpuEngine):
    """The GPU's engine for a model on the CPU."""

    def __init__(self, model: ViT, precision: str) -> None:
        super().__init__(model, precision, executor())

    def note(self) -> None:
        super().note()
        self._fingerprint = _C.Fingerprint([])  # of weights on a GPU nothing is read


@torch.no_grad()
def inference(name: str, batch: int, calls: int) -> dict[str, float]:
    """A forward's walk through Python, and its launches one by one or as a graph."""
    model = ViT(name, dtype=torch.bfloat16).eval()
    c, times = model.config, {}
    size = (batch, c.channels, *(c.patch_size * n for n in c.grid))
    image = torch.zeros(size, dtype=torch.bfloat16)
    before = base.engine_class
    setattr(base, "engine_class", lambda device: Idle)  # noqa: B010, mypy knows its type
    try:
        model(image)
        (engine,) = model.engines.packed()
        for how in ("launches", "graph"):
            model.cuda_graphs = how == "graph"
            times[f"GpuEngine.logits, {how}"] = best(lambda: engine.logits(image), calls)
        times["ViT.forward, graph"] = best(lambda: model.forward(image), calls)
        times["  dispatch.choose"] = best(lambda: dispatch.choose(model, image, "logits"), calls)
    finally:
        setattr(base, "engine_class", before)  # noqa: B010
    return times


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--calls", type=int, default=200)
    given = parser.parse_args(arguments)
    times = inference(given.model, given.batch, given.calls) | training(given.model, given.batch)
    times |= step(given.model, given.batch, min(given.calls, 30))
    for what, microseconds in times.items():
        print(f"{what:<32}{microseconds:8.1f} us")


if __name__ == "__main__":
    main()
