"""norm_linear: LayerNorm in a GEMM's prologue, bias and activation in its epilogue (qkv, fc1)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..registry import Operator, OpSpec, register
from . import _library, activations
from ._wide import norm_backward, normalised, ordered, outer, row_stats, rows_sum, wide


def reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    h = F.layer_norm(x, x.shape[-1:], norm_weight.to(x.dtype), norm_bias.to(x.dtype), eps)
    pre = F.linear(h.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
    y = activations.activation(activation)(pre)
    stats = row_stats(x, eps) if save else wide(x.new_empty(0))
    return y, stats, pre if save and activation != "none" else weight.new_empty(0)


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    given = dict(zip(OP.arguments, args, strict=True))
    stats, pre = saved
    dpre = activations.backward(given["activation"], wide(grad), wide(pre))
    xhat = normalised(given["x"], stats)
    dx, dnorm_weight, dnorm_bias = norm_backward(
        dpre @ wide(given["weight"]), xhat, stats[:, 1].to(xhat.dtype), given["norm_weight"]
    )
    h = xhat * wide(given["norm_weight"]) + wide(given["norm_bias"])
    grads = {
        "x": lambda: dx,
        "norm_weight": lambda: dnorm_weight,
        "norm_bias": lambda: dnorm_bias,
        "weight": lambda: outer(dpre, h),
        "bias": lambda: rows_sum(dpre),
    }
    return ordered(needs, OP.arguments, grads, given)


OP = Operator(
    name="norm_linear",
    schema="Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias,"
    " str activation, float eps, bool save",
    axes={"x": "... K", "norm_weight": "K", "norm_bias": "K", "weight": "N K", "bias": "N"},
    outputs={"y": ("... N", "weight"), "stats": ("M 2", "wide"), "pre": ("... N", "weight")},
    reference=reference,
    backward=backward,
    differentiable=("x", "norm_weight", "norm_bias", "weight", "bias"),
    native="vitkern.cpu:norm_linear",
)

_INPUTS = ("x", "norm_weight", "norm_bias", "weight", "bias")
_CASES = (
    {"M": 1, "K": 1, "N": 1},
    {"M": 0, "K": 8, "N": 3},
    {"M": 23, "K": 17, "N": 13},
    {"M": 31, "K": 257, "N": 67},
    {"M": 197, "K": 192, "N": 576},
)


def _spec(
    suffix: str,
    activation: str,
    formula: str,
    widen: int,
    inputs: tuple[str, ...] = _INPUTS,
    bench: bool = True,
) -> OpSpec:
    return OpSpec(
        name="norm_linear" + suffix,
        op=OP,
        formula=formula,
        inputs=inputs,
        scalars={"activation": activation, "eps": 1e-6},
        flops=lambda n: 2 * n["M"] * n["N"] * n["K"] + 8 * n["M"] * n["K"],
        cases=_CASES,
        bench=tuple(
            {"M": b * 197, "K": d, "N": widen * d} for b in (1, 8) for d in (192, 384, 768) if bench
        ),
    )


register(
    _spec("", "none", "y = layernorm(x) weight^T + bias", 3),
    _spec("+gelu", "gelu", "y = gelu(layernorm(x) weight^T + bias)", 4),
    _spec("+gelu_tanh", "gelu_tanh", "y = gelu_tanh(layernorm(x) weight^T + bias)", 4),
    _spec("+quick_gelu", "quick_gelu", "y = quick_gelu(layernorm(x) weight^T + bias)", 4),
    _spec("+silu", "silu", "y = silu(layernorm(x) weight^T + bias)", 4, bench=False),
    _spec("+tanh", "tanh", "y = tanh(layernorm(x) weight^T)", 1, _INPUTS[:-1]),
)
_op = _library.define(OP)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    eps: float = 1e-6,
) -> Tensor:
    """activation(layernorm(x) @ weight.T + bias) in weight's dtype: (..., K) -> (..., N)."""
    activations.check(activation)
    save = _library.needs_save(x, norm_weight, norm_bias, weight, bias)
    return _op(x, norm_weight, norm_bias, weight, bias, activation, eps, save)[0]
