"""What every engine needs to know of the model it was made from: whether that is still the model.

An engine is a snapshot of the weights. `stale()` tells when a parameter was replaced, changed in
place or given other memory since. In-place writes through `parameter.data` leave no trace: call
`model.repack()` after them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .config import ViTConfig

if TYPE_CHECKING:
    from .model import ViT


def _count_fused_steps(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Optimizers with fused=True write parameters behind the version counter's back."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(group["params"])


register_optimizer_step_post_hook(_count_fused_steps)


class Snapshot:
    """Base of the engines: remembers every parameter's identity, version and address."""

    def __init__(self, model: ViT, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
        reason = unpackable(model, device, dtypes)
        if reason:
            raise ValueError(f"ViT: {reason}")
        self.model = model
        self._config = model.config
        self._watched = [
            (module._parameters, key, parameter, *_state(parameter))
            for module in model.modules()
            for key, parameter in module._parameters.items()
        ]

    def stale(self) -> bool:
        """Whether a parameter was replaced or changed in place since."""
        return self.model.config is not self._config or any(
            parameters.get(key) is not seen or _state(seen) != (version, address)
            for parameters, key, seen, version, address in self._watched
        )


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
    return ""


@functools.lru_cache(maxsize=8)
def _shapes(config: ViTConfig) -> dict[str, torch.Size]:
    """What each parameter of a model is like, by name: those of a model without memory."""
    from .model import ViT

    return {name: p.shape for name, p in ViT(config, device="meta").named_parameters()}


def _state(parameter: Tensor | None) -> tuple[int, int]:
    """What moves when a parameter is changed in place or given other memory."""
    return (0, 0) if parameter is None else (parameter._version, parameter.data_ptr())
