"""Training steps of the linear operators: torch's GEMM, and native kernels for all that is between.

A training step uses a weight once and changes it, so that packing pays less than in inference. With
AVX2 MKL's `torch.mm` is as fast as the native GEMM in fp32 or faster (docs/training.md): there the
matmuls of a step are torch's, and norms, activations, masks, residuals and sums are fused kernels.
So they are in fp32 on a CPU with AMX, which is Intel's: MKL is at its best there. With AVX-512
otherwise, and with bf16 weights, which are multiplied in bf16 or in integers, the native kernels
compute everything (cpu.py, cpu_backward.py), and so they do where an instruction set is asked for
by name.

A function here takes what its namesake there takes. bf16 operands are widened: without bf16
instructions torch's bf16 matmuls are several times slower than its fp32 ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from .cpu_threads import threads
from .operands import (
    ACTIVATIONS,
    DTYPES,
    OFF,
    Maybe,
    Needs,
    Results,
    Sizes,
    address,
    dropout,
    rows,
    vector,
)

Mask = tuple[int, int, float]


def serves(isa: str, x: Tensor, weight: Tensor) -> bool:
    """Whether a training step with these rows and weights is computed here; isa: the one asked
    for, or ""."""
    return not isa and x.numel() > 0 and _is_faster(weight.dtype)


@functools.cache
def _is_faster(weight: torch.dtype) -> bool:
    """Than the native GEMM, on this CPU."""
    native = _C.operator_isa("", DTYPES[weight])
    return native in ("avx2", "portable") or (
        native == "avx512"
        and _C.features()["isa"] in ("amx_fp16", "amx")  # 0.78 of the native step's time
    )


def _in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would cast the operands of torch.mm to bf16 here, too."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args)
        with torch.autocast("cpu", enabled=False):
            return function(*args)

    return call


# ---- Forward -------------------------------------------------------------------------------------


@_in_fp32
def norm_linear(
    n: Sizes, results: Results, x: Tensor, norm_weight: Maybe, norm_bias: Maybe, weight: Tensor,
    bias: Maybe, activation: str, eps: float,
) -> None:  # fmt: skip
    y, stats, pre = results
    h = _normed(x, norm_weight, norm_bias, eps, stats)
    if activation == "none":
        _linear(h, weight, bias, y.view(n["M"], n["N"]))
        return
    sums = _linear(h, weight, bias, pre.view(n["M"], n["N"]))
    y.view(sums.shape).copy_(_hidden(sums, activation, OFF))


@_in_fp32
def linear_residual(
    n: Sizes, results: Results, x: Tensor, weight: Tensor, bias: Maybe, residual: Tensor,
    gamma: Maybe, dropout_p: float, drop_path_p: float, seed: Maybe,
) -> None:  # fmt: skip
    masks = dropout(dropout_p, seed), dropout(drop_path_p, seed)
    _join(results[0], _flat(x), weight, bias, residual, gamma, masks, n["S"])


@_in_fp32
def mlp(
    n: Sizes, results: Results, x: Tensor, norm_weight: Maybe, norm_bias: Maybe,
    fc1_weight: Tensor, fc1_bias: Maybe, fc2_weight: Tensor, fc2_bias: Maybe, gamma: Maybe,
    activation: str, eps: float, dropout_p: float, drop_path_p: float, seed: Maybe,
) -> None:  # fmt: skip
    y, stats, pre = results
    masks = dropout(dropout_p, seed), dropout(drop_path_p, seed)
    h = _normed(x, norm_weight, norm_bias, eps, stats)
    sums = _linear(h, fc1_weight, fc1_bias, pre.view(h.shape[0], n["F"]))
    del h
    hidden = _hidden(sums, activation, masks[0])
    _join(y, hidden, fc2_weight, fc2_bias, x, gamma, masks, n["S"])


def _flat(x: Tensor) -> Tensor:
    """x as rows of fp32, in place if possible."""
    return rows(x.float())[0].reshape(-1, x.shape[-1])


def _normed(x: Tensor, weight: Maybe, bias: Maybe, eps: float, stats: Tensor) -> Tensor:
    """The rows of layernorm(x), fp32."""
    x, x_stride = rows(x.float())
    weight, bias = vector(weight), vector(bias)
    h = torch.empty(x.shape[:-1].numel(), x.shape[-1])
    _C.layernorm(
        "", threads=threads(), dtype=_C.DType.f32, x=address(x),
        weight=address(weight), bias=address(bias), y=address(h), stats=address(stats),
        M=h.shape[0], D=h.shape[1], x_stride=x_stride, eps=eps,
    )  # fmt: skip
    return h


def _linear(x: Tensor, weight: Tensor, bias: Maybe, out: Tensor) -> Tensor:
    """Writes x weight^T + bias to out, and returns it in fp32."""
    sums = out if out.dtype is torch.float32 else torch.empty(out.shape)
    across = weight.float().t()
    if bias is None:
        torch.mm(x, across, out=sums)
    else:
        torch.addmm(vector(bias), x, across, out=sums)
    if sums is not out:
        out.copy_(sums)
    return sums


def _hidden(pre: Tensor, activation: str, mask: Mask) -> Tensor:
    hidden = torch.empty(pre.shape)
    _C.hidden_rows(
        "", threads=threads(), dtype=_C.DType.f32, pre=address(pre),
        hidden=address(hidden), d=0, dbias=0, M=pre.shape[0], F=pre.shape[1],
        activation=ACTIVATIONS[activation], dropout=mask,
    )  # fmt: skip
    return hidden


def _join(
    y: Tensor, x: Tensor, weight: Tensor, bias: Maybe, residual: Tensor, gamma: Maybe,
    masks: tuple[Mask, Mask], S: int,
) -> None:  # fmt: skip
    """y = residual + drop_path(gamma * dropout(x weight^T + bias))."""
    across, N = weight.float().t(), weight.shape[0]
    residual, residual_stride = rows(residual)
    if y.dtype is torch.float32 and gamma is None and not any(mask[1] for mask in masks):
        sums = y.view(-1, N)  # the GEMM adds to what is there
        if bias is None:
            sums.copy_(residual.reshape(-1, N))
        else:
            torch.add(residual.reshape(-1, N), vector(bias), out=sums)
        sums.addmm_(x, across)
        return
    sums, bias, gamma = torch.mm(x, across), vector(bias), vector(gamma)
    _C.branch_rows(
        "", threads=threads(), dtype=DTYPES[y.dtype], x=address(sums),
        bias=address(bias), gamma=address(gamma), residual=address(residual), y=address(y), grad=0,
        scaled=0, M=sums.shape[0], N=N, S=S, residual_stride=residual_stride, dropout=masks[0],
        path=masks[1],
    )  # fmt: skip


# ---- Backward ------------------------------------------------------------------------------------


@_in_fp32
def norm_linear_backward(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs
) -> list[Tensor]:
    names = ("x", "norm_weight", "norm_bias", "weight", "bias")
    given = dict(zip(names, args, strict=False))
    stats, pre = saved
    g, activation = grad.float().reshape(n["M"], n["N"]).contiguous(), args[5]
    grads: dict[str, Tensor] = {}
    if activation != "none":
        g = g.clone() if g.data_ptr() == grad.data_ptr() else g
        grads["bias"] = _hidden_backward(pre, None, g, activation, OFF)
    elif "bias" in needs:
        grads["bias"] = g.sum(0)
    grads |= _norm_linear_backward(g, given, "weight", stats, None, needs)
    return _ordered(given, needs, grads)


@_in_fp32
def linear_residual_backward(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs
) -> list[Tensor]:
    x, weight, bias, residual, gamma, dropout_p, drop_path_p, seed = args
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gamma": gamma}
    masks = dropout(dropout_p, seed), dropout(drop_path_p, seed)
    raw, scaled = _branch_backward(grad, gamma, masks, n["S"])
    grads = _layer_gradients(raw, scaled, _flat(x), given, "", needs)
    if "x" in needs:
        grads["x"] = torch.mm(scaled, weight.float())
    if "residual" in needs:  # an operator must not return its argument
        grads["residual"] = grad.to(residual.dtype, copy=True)
    return _ordered(given, needs, grads)


@_in_fp32
def mlp_backward(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs
) -> list[Tensor]:
    layers = ("norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    given: dict[str, Maybe] = dict(zip(("x", *layers, "gamma"), args, strict=False))
    activation, _, dropout_p, drop_path_p, seed, _ = args[8:]
    masks = dropout(dropout_p, seed), dropout(drop_path_p, seed)
    stats, pre = saved
    raw, scaled = _branch_backward(grad, given["gamma"], masks, n["S"])
    d = hidden = None
    grads: dict[str, Tensor] = {}
    if needs & {"x", "norm_weight", "norm_bias", "fc1_weight", "fc1_bias"}:
        d = torch.mm(scaled, args[5].float())  # (M, F)
    if needs & {"fc2_weight", "gamma"}:
        hidden = torch.empty(raw.shape[0], n["F"])
    if d is not None or hidden is not None:
        grads["fc1_bias"] = _hidden_backward(pre, hidden, d, activation, masks[0])
    grads |= _layer_gradients(raw, scaled, hidden, given, "fc2_", needs)
    del raw, scaled, hidden
    if d is not None:
        grads |= _norm_linear_backward(d, given, "fc1_weight", stats, grad, needs)
    return _ordered(given, needs, grads)


def _branch_backward(
    grad: Tensor, gamma: Maybe, masks: tuple[Mask, Mask], S: int
) -> tuple[Tensor, Tensor]:
    """Rows of the branch's gradient before and after gamma (the same without one), fp32."""
    grad, gamma = grad.contiguous().reshape(-1, grad.shape[-1]), vector(gamma)
    if any(mask[1] for mask in masks):
        raw = torch.empty(grad.shape)
        scaled = None if gamma is None else torch.empty(grad.shape)
        _C.branch_rows(
            "", threads=threads(), dtype=DTYPES[grad.dtype], x=address(raw), bias=0,
            gamma=address(gamma), residual=0, y=0, grad=address(grad), scaled=address(scaled),
            M=grad.shape[0], N=grad.shape[1], S=S, residual_stride=0, dropout=masks[0],
            path=masks[1],
        )  # fmt: skip
        return raw, raw if scaled is None else scaled
    raw = grad.float()
    return raw, raw if gamma is None else raw * gamma


def _layer_gradients(
    raw: Tensor, scaled: Tensor, x: Maybe, given: Mapping[str, Maybe], prefix: str, needs: Needs
) -> dict[str, Tensor]:
    """Of the linear layer that ends a branch, and of gamma: one GEMM for both.

    gamma scales rows of the weight, so dweight[n] = gamma[n] (raw^T x)[n], and
    dgamma[n] = sum_k (raw^T x)[n][k] weight[n][k] + bias[n] sum_m raw[m][n].
    """
    weight, bias, gamma = given[f"{prefix}weight"], given[f"{prefix}bias"], given["gamma"]
    grads: dict[str, Tensor] = {}
    if f"{prefix}bias" in needs:
        grads[f"{prefix}bias"] = scaled.sum(0)
    if x is None or weight is None or not needs & {f"{prefix}weight", "gamma"}:
        return grads
    both = torch.mm(raw.t(), x)  # (N, K)
    if "gamma" in needs:
        grads["gamma"] = (both * weight.float()).sum(1)
        if bias is not None:
            grads["gamma"] += raw.sum(0) * bias.float()
    if f"{prefix}weight" in needs:
        grads[f"{prefix}weight"] = both if gamma is None else both.mul_(vector(gamma).unsqueeze(1))
    return grads


def _hidden_backward(
    pre: Tensor, hidden: Maybe, d: Maybe, activation: str, mask: Mask
) -> Tensor:  # fmt: skip
    """Makes hidden again, and of its gradient d that of pre, in place; returns the sum of d."""
    F = pre.shape[-1]
    pre, dbias = pre.contiguous(), torch.empty(F)
    _C.hidden_rows(
        "", threads=threads(), dtype=DTYPES[pre.dtype], pre=address(pre),
        hidden=address(hidden), d=address(d), dbias=0 if d is None else address(dbias),
        M=pre.numel() // F, F=F, activation=ACTIVATIONS[activation], dropout=mask,
    )  # fmt: skip
    return dbias


def _norm_linear_backward(
    g: Tensor, given: Mapping[str, Maybe], name: str, stats: Tensor, onto: Maybe, needs: Needs
) -> dict[str, Tensor]:
    """From g, the gradient of layernorm(x) weight^T + bias: those of x, the norm and the weight.

    onto: what is added to x's, in its dtype.
    """
    x, weight = given["x"], given[name]
    norm_weight, norm_bias = vector(given["norm_weight"]), vector(given["norm_bias"])
    if x is None or weight is None:
        raise TypeError("norm_linear: no x or no weight")
    through, K = needs & {"x", "norm_weight", "norm_bias"}, x.shape[-1]
    if not through and name not in needs:
        return {}
    dh = torch.mm(g, weight.float()) if through else torch.empty(g.shape[0], K)
    room = {
        "x": torch.empty(x.shape, dtype=x.dtype) if "x" in needs else None,
        "norm_weight": torch.empty(K) if "norm_weight" in needs else None,
        "norm_bias": torch.empty(K) if "norm_bias" in needs else None,
    }
    source, x_stride = rows(x)
    onto = None if onto is None else onto.contiguous()
    _C.layernorm_backward(
        "", threads=threads(), dtype=DTYPES[x.dtype], grad_dtype=_C.DType.f32,
        grad=address(dh), x=address(source), stats=address(stats), weight=address(norm_weight),
        bias=address(norm_bias), onto=address(onto), dx=address(room["x"]),
        dweight=address(room["norm_weight"]), dbias=address(room["norm_bias"]),
        y=address(dh) if name in needs else 0, M=dh.shape[0], D=K, x_stride=x_stride,
    )  # fmt: skip
    grads = {key: t for key, t in room.items() if t is not None}
    if name in needs:
        grads[name] = torch.mm(g.t(), dh)  # dh is layernorm(x) now
    return grads


def _ordered(given: Mapping[str, Maybe], needs: Needs, grads: Mapping[str, Tensor]) -> list[Tensor]:
    """In argument order, in their arguments' shapes and dtypes."""
    return [
        grads[name].reshape(t.shape).to(t.dtype)
        for name, t in given.items()
        if name in needs and t is not None
    ]
