"""What every engine needs to know of the model it was made from: whether that is still the model.

An engine is a snapshot of the weights. `stale()` tells when a parameter was replaced, changed in
place or given other memory since. A write through `parameter.data` leaves no such trace: on the CPU
a fingerprint (csrc/cpu/fingerprint.hpp) sees one that changes every element; on a GPU reading the
weights would wait for the device. Call `model.repack()` after the others.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _C
from ..config import ViTConfig

if TYPE_CHECKING:
    from ..model import ViT


def _count_fused_steps(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Optimizers with fused=True write parameters behind the version counter's back."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(group["params"])


register_optimizer_step_post_hook(_count_fused_steps)


class Snapshot:
    """Base of the engines: remembers every parameter's identity, version, memory and layout."""

    def __init__(self, model: ViT, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
        reason = unpackable(model, device, dtypes)
        if reason:
            raise ValueError(f"ViT: {reason}")
        self.model = model
        self._config = model.config
        self._owners = [module._parameters for module in model.modules()]
        self._slots = [(owner, *slot) for owner in self._owners for slot in owner.items()]
        seen = {id(parameter): parameter for *_, parameter in self._slots if parameter is not None}
        self._parameters = list(seen.values())
        self._matrices = [p for p in self._parameters if p.ndim > 1]
        # Holds the memory, so that none of it can be freed and come back at the same address.
        self._memory = [p.detach() for p in self._parameters]
        self._layout = self._look()
        self._fingerprint = _C.Fingerprint(
            [
                (p.data_ptr(), p.element_size(), p.shape, p.stride())
                for p in self._parameters
                if p.device.type == "cpu"
            ]
        )

    def _look(self) -> tuple[list, ...]:
        """What moves when parameters are written, given other memory, transposed or cut.

        Together 50 us for ViT-B's 152 parameters, in C loops where Python has them.
        """
        return (
            list(map(Tensor._version.__get__, self._parameters)),
            list(map(Tensor.data_ptr, self._parameters)),
            list(map(Tensor.numel, self._parameters)),
            list(map(Tensor.stride, self._matrices)),
        )

    def stale(self) -> bool:
        """Whether the model has other weights than those that were packed."""
        return (
            self.model.config is not self._config
            or sum(map(len, self._owners)) != len(self._slots)
            or any([owner.get(key) is not seen for owner, key, seen in self._slots])
            or self._look() != self._layout
            or not self._fingerprint.matches()  # reads the memory that was just found in its place
        )


_seen = threading.local()  # .engine: a weak reference to the last one this thread found current


def current(model: ViT, precision: str) -> Snapshot | None:
    """The model's engine for a precision; None when there is none, a stale one is dropped."""
    engine = model._engines.get(precision)
    if engine is None or not engine.stale():
        _seen.engine = weakref.ref(engine) if engine else None
        return engine
    if model._engines.get(precision) is engine:  # no other thread has packed it again meanwhile
        model._engines.pop(precision, None)
    return None


def just_seen(engine: Snapshot) -> bool:
    """Whether this thread's `current` gave this engine, so that a forward asks only once.

    Another thread may have put another engine in its place since: one of weights that are gone.
    """
    seen = getattr(_seen, "engine", None)
    return seen is not None and seen() is engine


def unpackable(model: ViT, device: str, dtypes: tuple[torch.dtype, ...]) -> str:
    """ "" when all parameters can be packed on this device, else the first that cannot and why."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if parameter.device.type != device or parameter.dtype not in dtypes:
            wanted = " or ".join(str(dtype)[6:] for dtype in dtypes)
            what = f"{parameter.dtype} on {parameter.device}"
            return f"the engine packs {wanted} on {device}, {name} is {what}"
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
            wanted = shapes.get(f"{name[:-5]}.weight", ())[:1] or None
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
