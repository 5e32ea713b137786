"""What every engine needs to know of the model it was made from: whether that is still the model.

An engine is a snapshot of the weights. `stale()` tells when a parameter was replaced, changed in
place or given other memory since. In-place writes through `parameter.data` leave no trace: call
`model.repack()` after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

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

    def __init__(self, model: ViT) -> None:
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
    for name, parameter in model.named_parameters():
        if parameter.device.type != device or parameter.dtype not in dtypes:
            wanted = " or ".join(str(dtype)[6:] for dtype in dtypes)
            what = f"{parameter.dtype} on {parameter.device}"
            return f"the engine packs {wanted} on {device}, {name} is {what}"
        if parameter.is_inference():
            return f"{name} is an inference tensor, whose changes cannot be seen"
    return ""


def _state(parameter: Tensor | None) -> tuple[int, int]:
    """What moves when a parameter is changed in place or given other memory."""
    return (0, 0) if parameter is None else (parameter._version, parameter.data_ptr())
