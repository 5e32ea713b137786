"""mlp: x + fc2(act(fc1(layernorm(x)))): the statistics and two GEMMs, each with its epilogue.

The backward's GEMM with fc2 writes both the gradient before the activation and the hidden rows
themselves, recomputed from `pre`, so that nothing F-wide but `pre` is kept between the passes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import layernorm
from .elementwise import masked_gradient
from .gemm_backward import input_gradient, weight_gradient
from .linear_residual import residual_linear
from .norm_linear import normalised_linear, normalised_linear_backward

_NAMES = (
    "x", "norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "gamma",
)  # fmt: skip


def forward(
    n, results, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, gamma,
    activation, eps, dropout_p, drop_path_p, seed, save,
) -> None:  # fmt: skip
    y, stats, pre = results
    stats = layernorm.row_stats(x, eps, stats if save else None)
    hidden = fc1_weight.new_empty(n["B"], n["S"], n["F"])
    normalised_linear(
        x, stats, norm_weight, norm_bias, fc1_weight, fc1_bias, hidden, pre if save else None,
        activation, dropout_p, seed,
    )  # fmt: skip
    residual_linear(
        hidden, fc2_weight, fc2_bias, x, gamma, y, None, dropout_p, drop_path_p, seed, n["S"]
    )


def backward(grad, args, saved, needs) -> list[Tensor]:
    (
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, gamma,
        activation, _, dropout_p, drop_path_p, seed, _,
    ) = args  # fmt: skip
    stats, pre = saved
    raw = masked_gradient(grad, fc2_weight.dtype, dropout_p, drop_path_p, seed)
    dpre, hidden = input_gradient(
        raw, fc2_weight, gamma, fc1_weight.dtype, pre, activation, dropout_p, seed
    )
    grads: dict[str, Any] = {}
    if hidden is not None and needs & {"fc2_weight", "fc2_bias", "gamma"}:
        found = weight_gradient(raw, hidden, fc2_weight, fc2_bias, gamma)
        grads |= dict(zip(("fc2_weight", "fc2_bias", "gamma"), found, strict=True))
    if needs & set(_NAMES[:5]):
        grads |= normalised_linear_backward(
            dpre, x, stats, norm_weight, norm_bias, fc1_weight, fc1_bias, needs, _NAMES[:5], grad
        )
    return [grads[name] for name in _NAMES if name in needs]
