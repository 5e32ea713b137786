"""swiglu: the gate of an MLP, silu(first half) * second half of each row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import Operator, OpSpec, register
from . import _library
from ._wide import ordered, wide


def reference(x: Tensor) -> tuple[Tensor]:
    gate, value = x.chunk(2, -1)
    return ((F.silu(gate) * value).contiguous(),)


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    (x,), g = args, wide(grad)
    gate, value = wide(x).chunk(2, -1)
    s = torch.sigmoid(gate)
    dgate = g * value * (s + gate * s * (1 - s))
    grads = {"x": lambda: torch.cat([dgate, g * gate * s], -1)}
    return ordered(needs, OP.arguments, grads, {"x": x})


OP = Operator(
    name="swiglu",
    schema="Tensor x",
    axes={"x": "... N"},
    outputs={"y": ("... F", "x")},
    reference=reference,
    backward=backward,
    differentiable=("x",),
    native="vitkern.cpu:swiglu",
    derive=lambda n: {"F": n["N"] // 2},
)

register(
    OpSpec(
        name="swiglu",
        op=OP,
        formula="y = silu(x[:F]) * x[F:]",
        inputs=("x",),
        scalars={},
        flops=lambda n: 6 * n["M"] * n["N"],
        cases=(
            {"M": 1, "N": 2},
            {"M": 0, "N": 16},
            {"M": 23, "N": 34},
            {"M": 31, "N": 514},
            {"M": 197, "N": 1024},
        ),
        bench=tuple({"M": b * 197, "N": 2 * f} for b in (1, 8) for f in (512, 1024, 2048)),
    )
)
_op = _library.define(OP)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * value for x (..., 2F), the gate first: (..., F), in x's dtype."""
    if isinstance(x, Tensor) and x.ndim and x.shape[-1] % 2:
        raise ValueError(f"swiglu: a row is a gate and as many values, {x.shape[-1]} is odd")
    return _op(x)
