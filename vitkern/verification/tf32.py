"""PyTorch's fp32 as a TF32 unit computes it, on any device: the yardstick of the precision tf32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
OPERANDS = {  # which arguments are multiplied
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.convolution), slice(0, 2)),
    **dict.fromkeys((_aten.addmm, _aten.baddbmm), slice(1, 3)),
}


def round_to_tf32(t: Tensor) -> Tensor:
    """fp32 with 10 bits after the binary point, to the nearest, ties away from zero (cvt.rna)."""
    if t.dtype != torch.float32:
        return t
    return ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def rounded_operands(packet: Any, arguments: tuple) -> tuple:
    """The arguments of a matmul with its factors rounded; others as they are."""
    place = OPERANDS.get(packet)
    if place is None:
        return arguments
    factors = map(round_to_tf32, arguments[place])
    return (*arguments[: place.start], *factors, *arguments[place.stop :])


class Tf32(TorchDispatchMode):
    """Within it, matmuls of fp32 tensors round their factors as a TF32 unit does.

    Not in inference mode, where a linear layer arrives here before it is taken apart.
    """

    def __enter__(self) -> Any:
        self._attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        self._attention.__enter__()  # as separate matmuls
        return super().__enter__()

    def __exit__(self, *failure: Any) -> Any:
        self._attention.__exit__(*failure)
        return super().__exit__(*failure)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return function(*rounded_operands(function.overloadpacket, args), **(kwargs or {}))
