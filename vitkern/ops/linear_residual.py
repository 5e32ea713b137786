"""linear_residual: GEMM + bias + LayerScale + drop-path + residual (attention's proj, fc2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .. import philox
from ..registry import Axes, Operator, OpSpec, register
from . import _library
from ._wide import ordered, outer, rows_sum, wide


def branch(
    y: Tensor, gamma: Tensor | None, dropout_p: float, drop_path_p: float, seed: Tensor | None
) -> Tensor:
    """What happens to a branch before it joins the residual stream."""
    y = philox.dropout(y, dropout_p, seed)
    if gamma is not None:
        y = y * gamma.to(y.dtype)
    return philox.drop_path(y, drop_path_p, seed)


def branch_backward(
    grad: Tensor, dropout_p: float, drop_path_p: float, seed: Tensor | None
) -> Tensor:
    """Gradient of gamma * (x weight^T + bias), wide: masks are linear, so they apply to grad."""
    return philox.dropout(philox.drop_path(wide(grad), drop_path_p, seed), dropout_p, seed)


def gamma_grad(dweight: Tensor, dbias: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """LayerScale's gradient from those of the layer behind it (both taken before gamma).

    sum_m g[m, n] * (sum_k x[m, k] weight[n, k] + bias[n]): no need to keep or recompute the branch.
    """
    d = (dweight * wide(weight)).sum(1)
    return d if bias is None else d + dbias * wide(bias)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gamma: Tensor | None,
    dropout_p: float,
    drop_path_p: float,
    seed: Tensor | None,
) -> tuple[Tensor]:
    y = F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
    y = branch(y, gamma, dropout_p, drop_path_p, seed)
    return ((residual + y.to(residual.dtype)).contiguous(),)


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    given = dict(zip(OP.arguments, args, strict=True))
    x, weight, bias, _, gamma, dropout_p, drop_path_p, seed = args
    raw = branch_backward(grad, dropout_p, drop_path_p, seed)  # before gamma
    scaled = raw if gamma is None else raw * wide(gamma)
    grads = {
        "x": lambda: scaled @ wide(weight),
        "weight": lambda: outer(scaled, wide(x)),
        "bias": lambda: rows_sum(scaled),
        "residual": lambda: grad.clone(),  # an operator must not return its own argument
        "gamma": lambda: gamma_grad(outer(raw, wide(x)), rows_sum(raw), weight, bias),
    }
    return ordered(needs, OP.arguments, grads, given)


OP = Operator(
    name="linear_residual",
    schema="Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor? gamma,"
    " float dropout_p, float drop_path_p, Tensor? seed",
    axes={
        "x": "B S K",
        "weight": "N K",
        "bias": "N",
        "residual": "B S N",
        "gamma": "N",
        "seed": "1",
    },
    outputs={"y": ("B S N", "residual")},
    reference=reference,
    backward=backward,
    differentiable=("x", "weight", "bias", "residual", "gamma"),
    native="vitkern.cpu:linear_residual",
    passed=frozenset({"residual"}),
)

_CASES = (
    {"B": 1, "S": 1, "K": 1, "N": 1},
    {"B": 0, "S": 3, "K": 8, "N": 3},
    {"B": 2, "S": 3, "K": 17, "N": 5},
    {"B": 3, "S": 11, "K": 257, "N": 67},
    {"B": 1, "S": 197, "K": 768, "N": 192},
)


def _spec(
    suffix: str,
    formula: str,
    inputs: tuple[str, ...],
    p: float,
    path: float,
    bench: tuple[Axes, ...] = (),
) -> OpSpec:
    return OpSpec(
        name="linear_residual" + suffix,
        op=OP,
        formula=formula,
        inputs=inputs,
        scalars={"dropout_p": p, "drop_path_p": path},
        makers={"seed": philox.make_seed},
        flops=lambda n: 2 * n["B"] * n["S"] * n["N"] * (n["K"] + 1),
        cases=_CASES,
        bench=bench,
    )


_BENCH = tuple(
    {"B": b, "S": 197, "K": k * d, "N": d} for b in (1, 8) for d in (192, 384, 768) for k in (1, 4)
)
register(
    _spec(
        "",
        "y = residual + x weight^T + bias",
        ("x", "weight", "bias", "residual"),
        0.0,
        0.0,
        _BENCH,
    ),
    _spec(
        "+gamma",
        "y = residual + gamma * (x weight^T)",
        ("x", "weight", "residual", "gamma"),
        0.0,
        0.0,
    ),
    _spec(
        "+dropout",
        "y = residual + drop_path(gamma * dropout(x weight^T + bias))",
        ("x", "weight", "bias", "residual", "gamma", "seed"),
        0.2,
        0.4,
    ),
)
_op = _library.define(OP)


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gamma: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """residual (B, S, N) + drop_path(gamma * dropout(x @ weight.T + bias)), x (B, S, K)."""
    philox.check("linear_residual", seed, dropout_p=dropout_p, drop_path_p=drop_path_p)
    return _op(x, weight, bias, residual, gamma, dropout_p, drop_path_p, seed)
