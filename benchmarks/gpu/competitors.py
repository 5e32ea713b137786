"""Who takes turns on a GPU: vitkern and its peers, of models each also in a CUDA graph.

A competitor is built by a function of no argument, so that one that does not fit into memory, or
that is not there, fails alone. Eager PyTorch is the first: the others' results are compared with
its own before anybody is timed (measure.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import models, peers
from benchmarks.gpu import model_peers
from benchmarks.gpu.cases import Case, Selection
from benchmarks.gpu.device import Device, LeftOut
from benchmarks.gpu.model_peers import GRAPH, MODES, Wanted, imported, original, twin
from vitkern import ViT
from vitkern.contract import Error
from vitkern.precision import PRECISIONS
from vitkern.registry import REGISTRY, OpSpec

Build = Callable[[], Callable[[], object]]

SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
FEW_IMAGES = 64  # whose forwards fit into memory beside each other, each in a graph of its own
LOSS_SCALE = {"fp16": 1024.0}  # small gradients would vanish in fp16, as in any training


class NoKernels(RuntimeError):
    """Plain PyTorch would be timed under vitkern's name."""


class GraphDiffers(RuntimeError):
    """A captured forward gave another result than the plain one: a wrong result, not a slow one."""


class Contest(NamedTuple):
    """The competitors of one case, and how much work it is."""

    builds: dict[str, Build]
    flops: int
    native_flops: int
    bytes_moved: int
    path: str = ""  # the one that vitkern's model takes
    trains: bool = False
    cold: bool = False  # whether caches are emptied before every call
    # Timed after the others, each by itself: a graph holds its activations while it exists.
    alone: tuple[str, ...] = ()

    def rounds(self) -> list[tuple[str, ...]]:
        """Who takes turns with whom."""
        together = tuple(name for name in self.builds if name not in self.alone)
        return [together, *((name,) for name in self.alone)]

    def regime(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.trains else torch.inference_mode()


def contest(case: Case, device: Device, selection: Selection) -> Contest:
    make = {"op": operator, "op_train": operator, "model": forward, "train": training}[case.kind]
    return make(case, device, selection)


def captured(device: Device, call: Callable[[], object], dtype: torch.dtype) -> Callable:
    """vitkern's `call` in a graph, after a look at whether a replay gives the same result."""
    replay = device.graph(call)
    plain, again = (result.detach().clone() for result in (call(), replay()))
    off = Error.of(again, plain).worst
    if not off <= 4 * torch.finfo(dtype).eps:
        raise GraphDiffers(f"a CUDA graph of vitkern gives another result, off by {off:.1e}")
    return replay


# ---- Operators ----


def sdpa(backend: SDPBackend, *arguments) -> Tensor:
    with sdpa_kernel(backend):
        return peers.attention(*arguments)


def flash_attention(qkv: Tensor, bias: Tensor | None, scale: float, *_) -> Tensor:
    if bias is not None:
        raise LeftOut("flash-attn takes no bias")
    if qkv.dtype not in (torch.float16, torch.bfloat16):
        raise LeftOut("flash-attn takes fp16 and bf16 only")
    function = imported("flash_attn", "flash-attn").flash_attn_qkvpacked_func
    return function(qkv, softmax_scale=scale)  # (B, S, 3, H, E) -> (B, S, H, E)


def eager_ways(spec: OpSpec) -> dict[str, Callable]:
    """Eager PyTorch's ways to compute a row of the table, each of the schema's arguments."""
    ways: dict[str, Callable] = {"torch": spec.op.reference}
    if spec.name in peers.FUSED:
        ways["torch_fused"] = peers.FUSED[spec.name]
        if spec.op.name == "attention":
            ways |= {name: functools.partial(sdpa, kind) for name, kind in SDPA.items()}
            ways["flash_attn"] = flash_attention
    return ways


def operator(case: Case, device: Device, selection: Selection) -> Contest:
    spec, axes = REGISTRY[case.name], dict(case.axes)
    trains = case.kind == "op_train"
    dtype = PRECISIONS[case.precision].dtype
    inputs = spec.make_inputs(axes, dtype, device=device.device)
    names = differentiable(spec, inputs) if trains else []
    for name in names:
        inputs[name].requires_grad_()
    plain, saving = (spec.arguments(inputs, save) for save in (False, trains))
    native = spec.torch_op()
    (shape, kind), *_ = spec.op.call_shape(dict(zip(spec.op.arguments, plain, strict=True))).results
    grad = torch.randn(shape, device=device.device).to(kind) if trains else None

    def call(function: Callable, arguments: list) -> Callable[[], object]:
        def once() -> object:
            result = function(*arguments)
            result = result[0] if isinstance(result, tuple) else result
            if not trains:
                return result
            return torch.autograd.grad(result, [inputs[n] for n in names], grad)[0]

        return once

    def compiled(name: str, function: Callable) -> Callable:
        model_peers.refuse_compile(name, selection)
        return device.compile(function, MODES[name])

    ways = eager_ways(spec)
    builds: dict[str, Build] = {
        name: lambda way=way: call(way, plain) for name, way in ways.items()
    }
    best = ways.get("torch_fused", ways["torch"])
    for name in MODES:
        builds[name] = lambda name=name: call(compiled(name, best), plain)
    builds["native"] = lambda: call(native, saving)
    times = 3 if trains else 1  # the matmuls of a backward are twice those of the forward
    read = sum(t.numel() * t.element_size() for t in inputs.values())
    written = math.prod(shape) * kind.itemsize
    # A backward reads inputs and the result's gradient and writes the inputs' gradients.
    moved = 3 * read + 2 * written if trains else read + written
    flops = times * spec.flops(spec.sizes(axes))
    return Contest(builds, flops, flops, moved, trains=trains, cold=True)


def differentiable(spec: OpSpec, inputs: dict[str, Tensor]) -> list[str]:
    return [n for n in spec.op.differentiable if n in inputs and inputs[n].is_floating_point()]


# ---- Models ----


def path_of(model: ViT, image: Tensor) -> str:
    """The next forward's, engine or fused; NoKernels where it is plain PyTorch."""
    said = model.explain(image)
    if said.startswith("path: reference") or "PyTorch references" in said:
        raise NoKernels(f"vitkern has no kernels for this: {'; '.join(said.splitlines())}")
    return said.split("\n")[0].removeprefix("path: ").split(" ")[0]


def with_graphs(
    wanted: Wanted, call: Callable[[model_peers.Peer], Callable[[], object]]
) -> dict[str, Build]:
    """Every peer as it is, and in a CUDA graph.

    A captured training step goes on writing its gradients, so it has parameters of its own; other
    graphs are of the very peers that run without one.
    """

    def graph(make: Callable[[], model_peers.Peer], name: str) -> Callable[[], object]:
        if wanted.trains:
            own = call(model_peers.make(name, wanted._replace(model=copy.deepcopy(wanted.model))))
            return Replay(wanted.device.graph(own), own.probe)
        with torch.inference_mode():
            return wanted.device.graph(call(make()))

    makers = {
        name: functools.cache(functools.partial(model_peers.make, name, wanted))
        for name in model_peers.PEERS
    }
    plain = {name: lambda make=make: call(make()) for name, make in makers.items()}
    captures = {
        name + GRAPH: lambda make=make, name=name: graph(make, name)
        for name, make in makers.items()
    }
    return {**plain, **captures}


def graphs_of(builds: dict[str, Build]) -> tuple[str, ...]:
    return tuple(name for name in builds if name.endswith(GRAPH))


def forward(case: Case, device: Device, selection: Selection) -> Contest:
    batch, size = dict(case.axes)["B"], selection.image_size
    dtype = PRECISIONS[case.precision].dtype
    base = original(case.name, size, device.device)
    model = copy.deepcopy(base).to(dtype)
    model.cuda_graphs = False  # its own: "native" is without, as the others are
    image = examples(base, batch, size)[0].to(dtype)

    def graph() -> Callable[[], object]:
        with torch.inference_mode():
            return captured(device, lambda: model(image), dtype)

    wanted = Wanted(model, case.name, image, case.precision, device, selection)
    builds = with_graphs(wanted, lambda peer: lambda: peer.run(image))
    builds |= {"native": lambda: lambda: model(image), "native_graph": graph}
    alone = graphs_of(builds) if batch > FEW_IMAGES else ()
    with torch.inference_mode():
        path = path_of(model, image)
    flops = models.flops(base, batch, size)
    ours = models.engine_flops(base, batch, size) if path == "engine" else flops
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moved = weights + image.numel() * image.element_size()
    return Contest(builds, flops, ours, moved, path, alone=alone)


@dataclass
class Step:
    """Forward, loss and backward; the optimizer is everybody's own. Returns the loss.

    fp32 parameters and 16-bit matmuls by autocast: how ViTs are trained.
    """

    module: nn.Module
    run: Callable  # the module, or what became of it
    image: Tensor
    target: Tensor
    precision: str

    def __call__(self) -> Tensor:
        self.module.zero_grad(set_to_none=True)
        with autocast(self.image, self.precision):
            logits = self.run(self.image)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(wide, self.target) * LOSS_SCALE.get(self.precision, 1.0)
        loss.backward()
        return loss.detach()

    def probe(self) -> Tensor:
        """The gradient that has come through the whole model."""
        return self.module.patch_embed.proj.weight.grad


class Replay(NamedTuple):
    """A captured training step."""

    replay: Callable[[], object]
    probe: Callable[[], Tensor]

    def __call__(self) -> object:
        return self.replay()


def autocast(image: Tensor, precision: str) -> contextlib.AbstractContextManager:
    """To the precision's 16 bits; nothing for a float64 image, which is the truth's."""
    dtype = PRECISIONS[precision].dtype
    narrow = dtype != torch.float32 and image.dtype != torch.float64
    return torch.autocast(image.device.type, dtype, enabled=narrow)


def examples(base: ViT, batch: int, size: int) -> tuple[Tensor, Tensor]:
    """Seeded images and classes on the model's device."""
    g = torch.Generator().manual_seed(1)
    image = torch.randn(batch, 3, size, size, generator=g).to(base.device)
    return image, torch.randint(base.config.classes, (batch,), generator=g).to(base.device)


def training(case: Case, device: Device, selection: Selection) -> Contest:
    batch, size = dict(case.axes)["B"], selection.image_size
    base = original(case.name, size, device.device)
    image, target = examples(base, batch, size)

    def step(module: nn.Module, run: Callable | None = None) -> Step:
        return Step(module.train(), run or module, image, target, case.precision)

    def graph() -> Callable[[], object]:
        own = step(copy.deepcopy(base))
        return Replay(captured(device, own, torch.float32), own.probe)

    wanted = Wanted(base, case.name, image, case.precision, device, selection, trains=True)
    builds = with_graphs(wanted, lambda peer: step(*peer))
    builds |= {"native": lambda: step(twin(base, "auto")), "native_graph": graph}
    flops = 3 * models.flops(base, batch, size)
    weights = sum(p.numel() * p.element_size() for p in base.parameters())
    moved = 3 * weights + image.numel() * image.element_size()  # read twice, gradients written
    with autocast(image, case.precision):
        path = path_of(twin(base, "auto").train(), image)
    return Contest(builds, flops, flops, moved, path, trains=True, alone=graphs_of(builds))
