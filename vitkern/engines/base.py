"""The packed engines of a model: `Engines` owns them, `Engine` is what each of them can do.

An engine is a snapshot of the weights. `stale()` tells when a parameter was changed in place or
given other memory since; `refresh()` takes new values into the same memory, where an engine can. A
write through `parameter.data` leaves no such trace: on the CPU a fingerprint
(csrc/cpu/fingerprint.hpp) sees one that changes every element; on a GPU reading the weights would
wait for the device. Call `model.repack()` after the others.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _C, packing
from ..config import ViTConfig
from . import Unpackable
from .structure import Structure

if TYPE_CHECKING:
    from ..model import ViT


def _count_fused_steps(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Optimizers with fused=True write parameters behind the version counter's back."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(group["params"])


register_optimizer_step_post_hook(_count_fused_steps)


# Forwards after which a precision that served none of them is dropped. Packing takes as long as one
# or two forwards of one image, so that one who comes back later still pays less than a quarter.
TURNS = 8


class Engine(abc.ABC):
    """Weights of a model packed for one precision, and whether they are still the model's."""

    DTYPES: tuple[torch.dtype, ...]  # of models whose weights it packs
    held = False  # whether a captured CUDA graph reads its memory
    last_turn = 0  # when it was asked for, where a model has several
    matrices: Mapping[str, _C.Packed] = MappingProxyType({})  # by parameter, where it holds panels
    own_bytes = 0  # of packed weights that no other engine can share

    def __init__(self, model: ViT, device: str) -> None:
        reason = unpackable(model, device, self.DTYPES)
        if reason:
            raise Unpackable(f"ViT: {reason}")
        self.model = model
        self.config = model.config
        self.parameters = parameters_of(model)
        # Without those that were released: they have no memory.
        self._watched = tuple(p for p in self.parameters if not p.is_meta)
        # Holds the memory, so that none of it can be freed and come back at the same address.
        self._memory = [p.detach() for p in self._watched]
        self.note()

    def note(self) -> None:
        """The parameters' values are now those that are packed."""
        self._places = places(self._watched)
        self._fingerprint = _C.Fingerprint(
            [
                (p.data_ptr(), p.element_size(), p.shape, p.stride())
                for p in self._watched
                if p.device.type == "cpu"
            ]
        )

    def stale(self) -> bool:
        """Whether the model's parameters have other values than those that were packed."""
        # The fingerprint reads the memory that was just found in its place.
        return not (self._places.match(self._watched) and self._fingerprint.matches())

    def in_place(self) -> bool:
        """Whether every parameter still has the memory that it had: only values can differ."""
        return all(
            (p.data_ptr(), p.shape, p.stride(), p.dtype, p.device)
            == (m.data_ptr(), m.shape, m.stride(), m.dtype, m.device)
            for p, m in zip(self._watched, self._memory, strict=True)
        )

    @property
    def graphs(self) -> str:
        """Which forwards are CUDA graphs, for `explain()`; "" where there can be none."""
        return ""

    def refresh(self) -> bool:
        """Pack the parameters' values again into the same memory; False: make a new engine."""
        return False

    @staticmethod
    @abc.abstractmethod
    def why_not(model: ViT, image: Tensor, precision: str) -> str:
        """Why this kind of engine cannot serve a call, in one line; "" if it can."""

    @abc.abstractmethod
    def logits(self, image: Tensor) -> Tensor:
        """What `ViT.forward` returns: (B, classes), or (B, D) without a head."""

    @abc.abstractmethod
    def tokens(self, image: Tensor) -> Tensor:
        """What `ViT.forward_features` returns: (B, S, D)."""

    @abc.abstractmethod
    def blocks(
        self, image: Tensor, take: Sequence[int], stop: int, norm: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """What `ViT.forward_blocks` returns."""

    def mixed_logits(self, images: Sequence[Tensor]) -> Tensor:
        """`logits` of images (1, C, Y, X) of any sizes, in one call: (images, classes).

        Not with pool="none", whose results differ in size. dispatch.py asks no GPU engine for it.
        """
        raise NotImplementedError(f"{type(self).__name__} takes images of one size")

    def mixed_tokens(self, images: Sequence[Tensor]) -> list[Tensor]:
        """`tokens` of images (1, C, Y, X) of any sizes, in one call: (1, S, D) of each."""
        raise NotImplementedError(f"{type(self).__name__} takes images of one size")


class Engines:
    """The engines of one model by precision: packed when first asked for, again when stale.

    Memory that a captured CUDA graph reads is refreshed in place, or kept while the model lives. It
    also owns what is known of the model's modules (structure.py). Several threads may ask at
    once; each gets an engine that it has itself found to be current.
    """

    def __init__(self, model: ViT) -> None:
        self.model = model
        self._retired: list[Engine] = []  # held by graphs, but of weights that moved
        self._structure: Structure | None = None
        self._packed: dict[str, Engine] = {}
        self._turn = 0  # calls of `ready` while there were several engines
        self._lock = threading.RLock()  # two threads must not pack the same weights at once

    def structure(self) -> Structure:
        """What the model's modules are now."""
        found = self._structure
        if found is None or not found.holds(self.model):
            with self._lock:
                found = Structure(self.model)
                self._keep(self._is_of_this_model)
                self._structure = found
        return found

    def known(self, asked: tuple[object, ...]) -> str | None:
        """The precision of the engine that served such a call, if the modules are as they were."""
        found = self._structure
        if found is None:
            return None
        precision = found.served(asked)
        return None if precision is None or not found.holds(self.model) else precision

    def ready(self, precision: str) -> Engine:
        """The engine of the weights as they are; Unpackable where they cannot be packed.

        Call `structure` or `known` before: a change of the modules drops engines of parameters that
        were replaced.
        """
        engine = self._packed.get(precision)
        if engine is None or engine.stale():
            with self._lock:
                engine = self._packed.get(precision)
                if engine is None or (engine.stale() and not engine.refresh()):
                    self._keep(lambda one: one is not engine)
                    kind = engine_class(self.model.device.type)
                    engine = self._packed[precision] = kind(self.model, precision)
        if len(self._packed) > 1:
            self._drop_unused(engine)
        return engine

    def _drop_unused(self, engine: Engine) -> None:
        """Forget the weights packed for another precision once TURNS forwards did without them."""
        with self._lock:
            self._turn += 1
            engine.last_turn = self._turn
            for one in self._packed.values():
                one.last_turn = one.last_turn or self._turn
            oldest = self._turn - TURNS
            self._keep(lambda one: one.held or one.last_turn > oldest)

    def why_not(self, image: Tensor, precision: str) -> str:
        """Why the engine of this device cannot serve an image; "" if it can."""
        try:
            kind = engine_class(image.device.type)
        except ImportError as error:
            return f"what the engine needs is not installed ({error})"
        return kind.why_not(self.model, image, precision)

    def unpackable(self, precision: str) -> str:
        """Why the weights cannot be packed, without packing them; "" if they can, or are."""
        engine = self._packed.get(precision)
        if engine is not None and not engine.stale():
            return ""
        device = self.model.device.type
        return unpackable(self.model, device, engine_class(device).DTYPES)

    def packed(self) -> list[Engine]:
        """The engines that there are, current or not."""
        return list(self._packed.values())

    def repack(self) -> None:
        """Pack the weights as they are: now, where it is done in place, else when asked for."""
        with self._lock:
            self._structure = None
            packing.forget(*parameters_of(self.model))
            self._keep(lambda engine: self._is_of_this_model(engine) and engine.refresh())

    def matrices(self, precision: str) -> dict[str, _C.Packed]:
        """The panels that the engine of this precision holds, if there is one and it is current."""
        engine = self._packed.get(precision)
        return {} if engine is None or engine.stale() else dict(engine.matrices)

    def packed_bytes(self) -> int:
        """Memory of all packed weights; panels that several engines read are counted once."""
        shared = packing.unique_bytes(p for e in self.packed() for p in e.matrices.values())
        return shared + sum(engine.own_bytes for engine in self.packed())

    def forget(self) -> None:
        """Drop engines and findings, which hold parameters: these are about to be replaced."""
        with self._lock:
            self._structure = None
            self._keep(lambda engine: engine.held)

    def drop(self) -> None:
        """Forget all packed weights but those that a CUDA graph reads."""
        with self._lock:
            self._keep(lambda engine: engine.held)

    def _keep(self, wanted: Callable[[Engine], bool]) -> None:
        kept = {name: engine for name, engine in self._packed.items() if wanted(engine)}
        gone = [engine for name, engine in self._packed.items() if name not in kept]
        self._packed, self._retired = kept, self._retired + [one for one in gone if one.held]

    def _is_of_this_model(self, engine: Engine) -> bool:
        now = tuple(map(id, parameters_of(self.model)))
        return engine.config is self.model.config and tuple(map(id, engine.parameters)) == now


@functools.cache
def engine_class(device: str) -> type[Engine]:
    """The engine of a kind of device; an ImportError where what it needs is not installed."""
    if device == "cuda":
        from .gpu import GpuEngine

        return GpuEngine
    from .cpu import CpuEngine

    return CpuEngine


def stored(image: Tensor) -> Tensor:
    """The image with its values in memory, where kernels read them.

    A lazy minus sign (of a conjugate's imaginary part) is not, nor are torch's lazy zeros.
    """
    return image.clone() if image.is_neg() or image._is_zerotensor() else image


def parameters_of(model: ViT) -> tuple[Tensor, ...]:
    """Every parameter once, in order."""
    return tuple(model.parameters())


class Places:
    """`_C.Places` without DLPack, for an older torch or the meta device; three times as slow."""

    READS: tuple[Any, ...] = (
        Tensor._version, Tensor.data_ptr, Tensor.size, Tensor.stride, Tensor.dtype, Tensor.device,
    )  # fmt: skip

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        reads = [read if callable(read) else read.__get__ for read in self.READS]
        self._seen = [tuple(map(read, tensors)) for read in reads]

    def match(self, tensors: tuple[Tensor, ...]) -> bool:
        seen = zip(self.READS, self._seen, strict=True)
        return all(_C.reads(read, tensors, values) for read, values in seen)


def places(tensors: tuple[Tensor, ...]) -> Places | _C.Places:
    """What moves when tensors are written, given other memory, cut or transposed."""
    known = all(t.device.type in ("cpu", "cuda") for t in tensors)
    if known and hasattr(Tensor, "__dlpack_c_exchange_api__"):  # torch >= 2.10
        return _C.Places(Tensor, Tensor._version, tensors)
    return Places(tensors)


def unpackable(model: ViT, device: str, dtypes: tuple[torch.dtype, ...]) -> str:
    """ "" when all parameters can be packed on this device, else the first that cannot and why."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    released = model.released
    for name, parameter in parameters.items():
        if released is not None and released.holds(parameter):
            continue
        if parameter.device.type != device or parameter.dtype not in dtypes:
            kinds = " or ".join(str(dtype)[6:] for dtype in dtypes)
            what = f"{parameter.dtype} on {parameter.device}"
            return f"the engine packs {kinds} on {device}, {name} is {what}"
        if parameter.is_inference():
            return f"{name} is an inference tensor, whose changes cannot be seen"
        if parameter.layout is not torch.strided:
            return f"{name} has layout {parameter.layout}"
        if parameter.is_neg() or parameter._is_zerotensor():
            return f"{name} is a lazy tensor, whose values are not in its memory; clone it"
    shapes = _shapes(model.config)
    for name, parameter in parameters.items():
        wanted = shapes.get(name)
        if wanted is None and name.endswith(".bias"):  # one that the configuration leaves out
            wanted = shapes.get(f"{name[:-5]}.weight", torch.Size())[:1] or None
        if wanted is None:
            return f"{name} is no parameter of the configuration's model"
        if parameter.shape != wanted:
            return f"{name} has shape {tuple(parameter.shape)}, the engine packs {tuple(wanted)}"
    missing = shapes.keys() - parameters.keys()
    if missing:  # a bias may be None, but not hide among the buffers
        buffers = {name for name, _ in model.named_buffers()}
        for name in sorted(missing):
            if name in buffers or not name.endswith(".bias"):
                return f"{name} is no parameter any more"
    return ""


@functools.lru_cache(maxsize=8)
def _shapes(config: ViTConfig) -> dict[str, torch.Size]:
    """What each parameter of a model is like, by name: those of a model without memory."""
    from ..model import ViT

    return {name: p.shape for name, p in ViT(config, device="meta").named_parameters()}
