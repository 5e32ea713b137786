"""layernorm: normalise the last axis, then scale and shift."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..registry import Operator, OpSpec, register
from . import _library
from ._wide import norm_backward, normalised, ordered, row_stats, wide


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor]:
    w, b = (t if t is None else t.to(x.dtype) for t in (weight, bias))
    y = F.layer_norm(x, x.shape[-1:], w, b, eps)
    return y.contiguous(), row_stats(x, eps) if save else wide(x.new_empty(0))


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    given = dict(zip(OP.arguments, args, strict=True))
    xhat = normalised(given["x"], saved[0])
    dx, dweight, dbias = norm_backward(
        wide(grad), xhat, saved[0][:, 1].to(xhat.dtype), given["weight"]
    )
    grads = {"x": lambda: dx, "weight": lambda: dweight, "bias": lambda: dbias}
    return ordered(needs, OP.arguments, grads, given)


OP = Operator(
    name="layernorm",
    schema="Tensor x, Tensor? weight, Tensor? bias, float eps, bool save",
    axes={"x": "... D", "weight": "D", "bias": "D"},
    outputs={"y": ("... D", "x"), "stats": ("M 2", "wide")},
    reference=reference,
    backward=backward,
    differentiable=("x", "weight", "bias"),
    native="vitkern.cpu:layernorm",
)

register(
    OpSpec(
        name="layernorm",
        op=OP,
        formula="y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias",
        inputs=("x", "weight", "bias"),
        scalars={"eps": 1e-6},
        flops=lambda n: 8 * n["M"] * n["D"],
        cases=(
            {"M": 1, "D": 1},
            {"M": 3, "D": 17},
            {"M": 0, "D": 64},
            {"M": 29, "D": 257},
            {"M": 197, "D": 192},
        ),
        bench=tuple({"M": b * 197, "D": d} for b in (1, 8) for d in (192, 384, 768)),
    )
)
_op = _library.define(OP)


def layernorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """LayerNorm over the last axis of x (..., D), fp32 statistics; weight, bias (D,) or None."""
    save = _library.needs_save(x, weight, bias) and _library.has_elements(x)
    return _op(x, weight, bias, eps, save)[0]
