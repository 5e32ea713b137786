"""The other ways to run a model on a GPU, from the same weights: who they are and how each is made.

A peer that cannot run here fails alone and by name: `NotInstalled`, `LeftOut`, or whatever its own
library throws.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import peers
from benchmarks.gpu.cases import Selection
from benchmarks.gpu.device import Device, LeftOut, NotInstalled
from vitkern import ViT

# provider -> what it is. Each is timed as it is and, under its name with GRAPH, in a CUDA graph.
PEERS = {
    "torch": "eager PyTorch, attention by SDPA with the kernel that PyTorch chooses",
    "torch_math": "eager PyTorch, attention written out",
    "timm": "timm's model, eager",
    "flash_attn": "eager PyTorch, attention by the package flash-attn",
    "compile": "torch.compile",
    "compile_max": "torch.compile, max-autotune",
    "tensorrt": "the package torch-tensorrt",
}
GRAPH = "_graph"
MODES = {"compile": "default", "compile_max": "max-autotune-no-cudagraphs"}
TIMM = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/16": "vit_small_patch16_224",
    "B/16": "vit_base_patch16_224",
    "L/16": "vit_large_patch16_224",
}


class Wanted(NamedTuple):
    """What the peers are made for."""

    model: ViT  # with the weights, in the precision's dtype
    name: str
    image: Tensor
    precision: str
    device: Device
    selection: Selection
    trains: bool = False


class Peer(NamedTuple):
    module: nn.Module  # with the parameters
    run: Callable[[Tensor], Tensor]  # the module, or what became of it


def make(provider: str, wanted: Wanted) -> Peer:
    """One of PEERS; raises what keeps it from running here."""
    makers = {
        "torch": _plain, "torch_math": _math, "timm": _timm, "flash_attn": _flash,
        "compile": _compiled, "compile_max": _compiled, "tensorrt": _tensorrt,
    }  # fmt: skip
    return makers[provider](provider, wanted)


@functools.lru_cache(maxsize=1)
def original(name: str, size: int, device: torch.device) -> ViT:
    """The fp32 model whose weights all competitors have."""
    torch.manual_seed(0)
    return ViT(name, image_size=size, device=device).eval()


def twin(model: ViT, path: str) -> ViT:
    """The same model with the same parameters in memory, on another path."""
    found = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    found.path = path
    return found


def _plain(provider: str, wanted: Wanted) -> Peer:
    module = twin(wanted.model, "reference")
    return Peer(module, module)


def _math(provider: str, wanted: Wanted) -> Peer:
    module = twin(wanted.model, "reference")

    def run(image: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return module(image)

    return Peer(module, run)


def refuse_compile(provider: str, selection: Selection) -> None:
    """LeftOut unless --compile asks for this one."""
    chosen = selection.compile
    if chosen == "none" or (chosen == "default" and provider == "compile_max"):
        raise LeftOut(f"left out by --compile {chosen}")


def _compiled(provider: str, wanted: Wanted) -> Peer:
    refuse_compile(provider, wanted.selection)
    module = twin(wanted.model, "reference")
    return Peer(module, wanted.device.compile(module, MODES[provider]))


def imported(name: str, package: str) -> ModuleType:
    """An optional package; NotInstalled where it is not there, its own error where it is broken."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise NotInstalled(f"{package} is not installed") from None
        raise


# ---- timm ----


def timm_name(name: str) -> str:
    """What timm calls the model; "" where it has none that is the same."""
    return TIMM.get(name) or (name if name.startswith("vit_") else "")


@functools.lru_cache(maxsize=1)
def timm_original(name: str, size: int, device: torch.device) -> nn.Module:
    """timm's fp32 model with the weights of `original`."""
    imported("timm", "timm")
    peer = peers.timm_model(timm_name(name), img_size=size)
    if peer is None:
        raise ImportError("timm cannot be imported")
    peer.load_state_dict(original(name, size, device).state_dict())
    return peer.to(device)


def timm_twin(model: ViT, name: str, size: int) -> nn.Module:
    return copy.deepcopy(timm_original(name, size, model.device)).to(model.dtype)


def _timm(provider: str, wanted: Wanted) -> Peer:
    if not timm_name(wanted.name):
        raise LeftOut(f"timm has no model that is the same as {wanted.name}")
    module = timm_twin(wanted.model, wanted.name, wanted.selection.image_size)
    module.train(wanted.trains)
    return Peer(module, module)


# ---- flash-attn ----


class FlashAttention(nn.Module):
    """vitkern's attention module with another function between its two Linears."""

    def __init__(self, attn: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attn, self.function = attn, function

    def forward(
        self, x: Tensor, bias: Tensor | None = None, seeds: Tensor | None = None,
        rotation: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        B, S, D = x.shape
        qkv = self.attn.qkv(x).view(B, S, 3, self.attn.heads, D // self.attn.heads)
        return self.attn.proj(self.function(qkv).reshape(B, S, D))


def _flash(provider: str, wanted: Wanted) -> Peer:
    function = imported("flash_attn", "flash-attn").flash_attn_qkvpacked_func
    if wanted.precision not in ("fp16", "bf16"):
        raise LeftOut("flash-attn takes fp16 and bf16 only")
    module = twin(wanted.model, "reference")
    for block in module.blocks:
        block.attn = FlashAttention(block.attn, function)
    return Peer(module, module)


# ---- TensorRT ----


def _tensorrt(provider: str, wanted: Wanted) -> Peer:
    tensorrt = imported("torch_tensorrt", "torch-tensorrt")
    if wanted.trains:
        raise LeftOut("TensorRT does not train")
    module = twin(wanted.model, "reference")
    run = tensorrt.compile(
        module, ir="dynamo", inputs=[wanted.image],
        use_explicit_typing=True,  # the precision is that of the weights, as for everybody
        disable_tf32=wanted.precision != "tf32",
    )  # fmt: skip
    return Peer(module, run)
