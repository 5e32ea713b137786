"""The activations an epilogue can apply, and their derivatives, in plain torch.

GELU is the exact erf one, `gelu_tanh` its tanh approximation, `quick_gelu` is
x * sigmoid(1.702 x), and `silu` x * sigmoid(x).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh")


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The plain-torch function called `name`; a ValueError lists the names there are."""
    check(name)
    return _FORWARD[name]


def check(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown: use one of {', '.join(ACTIVATIONS)}")


def backward(name: str, grad: Tensor, pre: Tensor) -> Tensor:
    """Gradient of the pre-activation, given the gradient of the result."""
    if name == "none":
        return grad
    if name in ("gelu", "gelu_tanh"):
        return torch.ops.aten.gelu_backward(grad, pre, approximate=_APPROXIMATE[name])
    if name in ("quick_gelu", "silu"):
        rate = 1.702 if name == "quick_gelu" else 1.0
        s = torch.sigmoid(rate * pre)
        return grad * (s + rate * pre * s * (1 - s))
    return grad * (1 - torch.tanh(pre).square())


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "tanh": torch.tanh,
}
