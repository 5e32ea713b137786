"""mlp: x + fc2(act(fc1(layernorm(x)))) as one operator, whose F-wide rows stay in cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import philox
from ..registry import Axes, Operator, OpSpec, register
from . import _library, activations
from ._wide import norm_backward, normalised, ordered, outer, row_stats, rows_sum, wide
from .linear_residual import branch, branch_backward, gamma_grad


def reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    gamma: Tensor | None,
    activation: str,
    eps: float,
    dropout_p: float,
    drop_path_p: float,
    seed: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = fc1_weight.dtype
    if not save and not x.numel():  # whose hidden rows may be more than any memory holds
        y = x.clone(memory_format=torch.contiguous_format)
        return y, wide(x.new_empty(0)), fc1_weight.new_empty(0)
    b1, b2 = (b if b is None else b.to(dtype) for b in (fc1_bias, fc2_bias))
    h = F.layer_norm(x, x.shape[-1:], norm_weight.to(x.dtype), norm_bias.to(x.dtype), eps)
    pre = F.linear(h.to(dtype), fc1_weight, b1)  # (B, S, F)
    hidden = philox.dropout(activations.activation(activation)(pre), dropout_p, seed, philox.HIDDEN)
    y = branch(F.linear(hidden, fc2_weight, b2), gamma, dropout_p, drop_path_p, seed)
    stats = row_stats(x, eps) if save else wide(x.new_empty(0))
    return (x + y.to(x.dtype)).contiguous(), stats, pre if save else fc1_weight.new_empty(0)


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    given = dict(zip(OP.arguments, args, strict=True))
    activation, p, seed = given["activation"], given["dropout_p"], given["seed"]
    gamma, norm_weight = given["gamma"], given["norm_weight"]
    stats, pre = saved
    pre = wide(pre)
    hidden = philox.dropout(activations.activation(activation)(pre), p, seed, philox.HIDDEN)
    raw = branch_backward(grad, p, given["drop_path_p"], seed)  # before gamma
    scaled = raw if gamma is None else raw * wide(gamma)
    dhidden = philox.dropout(scaled @ wide(given["fc2_weight"]), p, seed, philox.HIDDEN)
    dpre = activations.backward(activation, dhidden, pre)
    xhat = normalised(given["x"], stats)
    dx, dnorm_weight, dnorm_bias = norm_backward(
        dpre @ wide(given["fc1_weight"]), xhat, stats[:, 1].to(xhat.dtype), norm_weight
    )
    h = xhat * wide(norm_weight) + wide(given["norm_bias"])
    grads = {
        "x": lambda: wide(grad) + dx,
        "norm_weight": lambda: dnorm_weight,
        "norm_bias": lambda: dnorm_bias,
        "fc1_weight": lambda: outer(dpre, h),
        "fc1_bias": lambda: rows_sum(dpre),
        "fc2_weight": lambda: outer(scaled, hidden),
        "fc2_bias": lambda: rows_sum(scaled),
        "gamma": lambda: gamma_grad(
            outer(raw, hidden), rows_sum(raw), given["fc2_weight"], given["fc2_bias"]
        ),
    }
    return ordered(needs, OP.arguments, grads, given)


OP = Operator(
    name="mlp",
    schema="Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor fc1_weight, Tensor? fc1_bias,"
    " Tensor fc2_weight, Tensor? fc2_bias, Tensor? gamma, str activation, float eps,"
    " float dropout_p, float drop_path_p, Tensor? seed, bool save",
    axes={
        "x": "B S D",
        "norm_weight": "D",
        "norm_bias": "D",
        "fc1_weight": "F D",
        "fc1_bias": "F",
        "fc2_weight": "D F",
        "fc2_bias": "D",
        "gamma": "D",
        "seed": "1",
    },
    outputs={"y": ("B S D", "x"), "stats": ("M 2", "wide"), "pre": ("B S F", "fc1_weight")},
    reference=reference,
    backward=backward,
    differentiable=(
        "x",
        "norm_weight",
        "norm_bias",
        "fc1_weight",
        "fc1_bias",
        "fc2_weight",
        "fc2_bias",
        "gamma",
    ),
    native="vitkern.cpu:mlp",
    derive=lambda n: {"M": n["B"] * n["S"]},
    alike=("fc1_weight", "fc2_weight"),
)

_INPUTS = OP.differentiable[:-1]


def _spec(
    suffix: str,
    activation: str,
    formula: str,
    inputs: tuple[str, ...],
    p: float = 0.0,
    path: float = 0.0,
    bench: tuple[Axes, ...] = (),
) -> OpSpec:
    return OpSpec(
        name="mlp" + suffix,
        op=OP,
        formula=formula,
        inputs=inputs,
        scalars={"activation": activation, "eps": 1e-6, "dropout_p": p, "drop_path_p": path},
        makers={"seed": philox.make_seed},
        flops=lambda n: 4 * n["B"] * n["S"] * n["D"] * n["F"],
        cases=(
            {"B": 1, "S": 1, "D": 1, "F": 1},
            {"B": 0, "S": 2, "D": 8, "F": 5},
            {"B": 2, "S": 5, "D": 17, "F": 31},
            {"B": 3, "S": 7, "D": 131, "F": 257},
            {"B": 1, "S": 197, "D": 192, "F": 768},
        ),
        bench=bench,
    )


register(
    _spec(
        "",
        "gelu",
        "y = x + gelu(layernorm(x) fc1^T + b1) fc2^T + b2",
        _INPUTS,
        bench=tuple(
            {"B": b, "S": 197, "D": d, "F": 4 * d} for b in (1, 8) for d in (192, 384, 768)
        ),
    ),
    _spec(
        "+dropout",
        "quick_gelu",
        "y = x + drop_path(gamma * dropout(fc2(dropout(quick_gelu(fc1(layernorm(x)))))))",
        (*_INPUTS, "gamma", "seed"),
        0.2,
        0.4,
    ),
)
_op = _library.define(OP)


def mlp(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    gamma: Tensor | None = None,
    *,
    activation: str = "gelu",
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """A transformer block's whole second half: x (B, S, D) -> x + branch, in x's dtype."""
    activations.check(activation)
    philox.check("mlp", seed, dropout_p=dropout_p, drop_path_p=drop_path_p)
    weights = (norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, gamma)
    save = _library.needs_save(x, *weights) and _library.has_elements(x)
    return _op(x, *weights, activation, eps, dropout_p, drop_path_p, seed, save)[0]
