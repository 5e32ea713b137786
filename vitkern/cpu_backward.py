"""The operators' backwards on the CPU, as cpu.py for their forwards.

Each takes (sizes, grad, arguments, saved, needs) and returns the gradients asked for, in argument
order and in their arguments' dtypes. `None` means that no native kernel has them: gradients of
pixels and of an attention bias are the reference's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C, cpu, cpu_blas
from .cpu import attention_layout
from .cpu_threads import threads
from .operands import (
    ACTIVATIONS,
    DTYPES,
    IMAGE_DTYPES,
    Maybe,
    Needs,
    Sizes,
    address,
    dropout,
    rows,
    vector,
)

Gradients = list[Tensor] | None


class _Wanted:
    """Room for the gradients asked for; vectors are computed in fp32 and cast when all is done."""

    def __init__(self, given: Mapping[str, Tensor | None], needs: Needs) -> None:
        self._given = {name: t for name, t in given.items() if name in needs and t is not None}
        self._made: dict[str, Tensor] = {}

    def matrix(self, name: str) -> int:
        """The address of room for a gradient in its argument's dtype, or 0: not asked for."""
        return self._make(name, None)

    def vector(self, name: str) -> int:
        """The same in fp32."""
        return self._make(name, torch.float32)

    def _make(self, name: str, dtype: torch.dtype | None) -> int:
        if name not in self._given:
            return 0
        like = self._given[name]
        self._made[name] = torch.empty(like.shape, dtype=dtype or like.dtype)
        return self._made[name].data_ptr()

    def result(self) -> list[Tensor]:
        return [self._made[name].to(t.dtype) for name, t in self._given.items()]


def layernorm(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs,
    isa: str = "",
) -> Gradients:  # fmt: skip
    given = dict(zip(("x", "weight", "bias"), args, strict=False))
    wanted = _Wanted(given, needs)
    (x, x_stride), grad, weight = rows(given["x"]), grad.contiguous(), vector(given["weight"])
    _C.layernorm_backward(
        isa, threads=threads(), dtype=DTYPES[x.dtype], grad_dtype=DTYPES[grad.dtype],
        grad=address(grad), x=address(x), stats=address(saved[0]), weight=address(weight), bias=0,
        onto=0, dx=wanted.matrix("x"), dweight=wanted.vector("weight"),
        dbias=wanted.vector("bias"), y=0, M=n["M"], D=n["D"], x_stride=x_stride,
    )  # fmt: skip
    return wanted.result()


def norm_linear(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs,
    isa: str = "",
) -> Gradients:  # fmt: skip
    if cpu_blas.serves(isa, args[0], args[3]):
        return cpu_blas.norm_linear_backward(n, grad, args, saved, needs)
    names = ("x", "norm_weight", "norm_bias", "weight", "bias")
    given = dict(zip(names, args, strict=False))
    wanted, activation = _Wanted(given, needs), args[5]
    (x, x_stride), grad, weight = rows(given["x"]), grad.contiguous(), given["weight"].contiguous()
    norm_weight, norm_bias = vector(given["norm_weight"]), vector(given["norm_bias"])
    stats, pre = saved
    _C.norm_linear_backward(
        isa, threads=threads(), x_dtype=DTYPES[x.dtype], w_dtype=DTYPES[weight.dtype],
        grad=address(grad), x=address(x), stats=address(stats), norm_weight=address(norm_weight),
        norm_bias=address(norm_bias), weight=address(weight), pre=address(pre),
        dx=wanted.matrix("x"), dnorm_weight=wanted.vector("norm_weight"),
        dnorm_bias=wanted.vector("norm_bias"), dweight=wanted.matrix("weight"),
        dbias=wanted.vector("bias"), M=n["M"], K=n["K"], N=n["N"], x_stride=x_stride,
        activation=ACTIVATIONS[activation],
    )  # fmt: skip
    return wanted.result()


def attention(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs,
    isa: str = "",
) -> Gradients:  # fmt: skip
    if "bias" in needs:
        return None
    qkv, bias, scale, dropout_p, seed, offsets = args[:6]
    wanted, grad = _Wanted({"qkv": qkv}, needs), grad.contiguous()
    tensors, layout = attention_layout(n, qkv, bias, offsets)
    _C.attention_backward(
        isa, threads=threads(), dtype=DTYPES[qkv.dtype], grad=address(grad),
        dqkv=wanted.matrix("qkv"), B=n["B"], S=n["S"], H=n["H"], E=n["E"], scale=scale,
        dropout=dropout(dropout_p, seed), **{name: address(t) for name, t in tensors.items()},
        **layout,
    )  # fmt: skip
    return wanted.result()


def linear_residual(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs,
    isa: str = "",
) -> Gradients:  # fmt: skip
    if cpu_blas.serves(isa, args[0], args[1]):
        return cpu_blas.linear_residual_backward(n, grad, args, saved, needs)
    x, weight, bias, residual, gamma, dropout_p, drop_path_p, seed = args
    wanted = _Wanted({"x": x, "weight": weight, "bias": bias, "gamma": gamma}, needs)
    grad, weight = grad.contiguous(), weight.contiguous()
    (x, x_stride), bias, gamma = rows(x), vector(bias), vector(gamma)
    _C.linear_residual_backward(
        isa, threads=threads(), x_dtype=DTYPES[x.dtype], w_dtype=DTYPES[weight.dtype],
        y_dtype=DTYPES[residual.dtype], grad=address(grad), x=address(x), weight=address(weight),
        bias=address(bias), gamma=address(gamma), dx=wanted.matrix("x"),
        dweight=wanted.matrix("weight"), dbias=wanted.vector("bias"),
        dgamma=wanted.vector("gamma"), B=n["B"], S=n["S"], K=n["K"], N=n["N"], x_stride=x_stride,
        dropout=dropout(dropout_p, seed), path=dropout(drop_path_p, seed),
    )  # fmt: skip
    gradients = wanted.result()
    if "residual" in needs:  # behind x, weight and bias; an operator must not return its argument
        before = len(needs & {"x", "weight", "bias"})
        gradients.insert(before, grad.to(residual.dtype, copy=True))
    return gradients


def mlp(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs,
    isa: str = "",
) -> Gradients:  # fmt: skip
    if cpu_blas.serves(isa, args[0], args[3]):
        return cpu_blas.mlp_backward(n, grad, args, saved, needs)
    layers = ("norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    given: dict[str, Maybe] = dict(zip(("x", *layers, "gamma"), args, strict=False))
    activation, _, dropout_p, drop_path_p, seed, _ = args[8:]
    wanted, grad = _Wanted(given, needs), grad.contiguous()
    x, x_stride = rows(args[0])
    fc1_weight, fc2_weight = args[3].contiguous(), args[5].contiguous()
    vectors = {
        name: vector(given[name]) for name in ("norm_weight", "norm_bias", "fc2_bias", "gamma")
    }
    stats, pre = saved
    _C.mlp_backward(
        isa, threads=threads(), x_dtype=DTYPES[x.dtype],
        w_dtype=DTYPES[fc1_weight.dtype], grad=address(grad), x=address(x), stats=address(stats),
        pre=address(pre), fc1_weight=address(fc1_weight), fc2_weight=address(fc2_weight),
        dx=wanted.matrix("x"), dnorm_weight=wanted.vector("norm_weight"),
        dnorm_bias=wanted.vector("norm_bias"), dfc1_weight=wanted.matrix("fc1_weight"),
        dfc1_bias=wanted.vector("fc1_bias"), dfc2_weight=wanted.matrix("fc2_weight"),
        dfc2_bias=wanted.vector("fc2_bias"), dgamma=wanted.vector("gamma"), B=n["B"], S=n["S"],
        D=n["D"], F=n["F"], x_stride=x_stride, activation=ACTIVATIONS[activation],
        dropout=dropout(dropout_p, seed), path=dropout(drop_path_p, seed),
        **{name: address(t) for name, t in vectors.items()},
    )  # fmt: skip
    return wanted.result()


def rotary(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs,
    isa: str = "",
) -> Gradients:  # fmt: skip
    if "table" in needs:
        return None
    qkv, table, half = args
    dqkv = torch.empty(qkv.shape, dtype=grad.dtype)
    cpu.rotary(n, [dqkv], grad, table, half, back=True, isa=isa)
    return [dqkv.to(qkv.dtype)]


def swiglu(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs,
    isa: str = "",
) -> Gradients:  # fmt: skip
    wanted = _Wanted({"x": args[0]}, needs)
    (x, x_stride), grad = rows(args[0]), grad.to(args[0].dtype).contiguous()
    _C.swiglu_backward(
        isa, threads=threads(), dtype=DTYPES[x.dtype], grad=address(grad), x=address(x),
        dx=wanted.matrix("x"), M=n["M"], F=n["F"], x_stride=x_stride,
    )  # fmt: skip
    return wanted.result()


def patch_embed(
    n: Sizes, grad: Tensor, args: Sequence[Any], saved: Sequence[Tensor], needs: Needs,
    isa: str = "",
) -> Gradients:  # fmt: skip
    if "image" in needs:
        return None
    image, weight, bias, prefix, position, mean, std, dropout_p, seed = args
    given = {"weight": weight, "bias": bias, "prefix": prefix, "position": position}
    wanted, grad, mean, std = _Wanted(given, needs), grad.contiguous(), vector(mean), vector(std)
    b_stride, c_stride, y_stride, x_stride = image.stride()
    _C.patch_embed_backward(
        isa, threads=threads(), image_dtype=IMAGE_DTYPES[image.dtype],
        w_dtype=DTYPES[weight.dtype], grad=address(grad), image=address(image), mean=address(mean),
        std=address(std), dweight=wanted.matrix("weight"), dbias=wanted.vector("bias"),
        dprefix=wanted.vector("prefix"), dposition=wanted.vector("position"), B=n["B"], C=n["C"],
        Y=n["Y"], X=n["X"], py=n["py"], px=n["px"], D=n["D"], T=n.get("T", 0), b_stride=b_stride,
        c_stride=c_stride, y_stride=y_stride, x_stride=x_stride, dropout=dropout(dropout_p, seed),
    )  # fmt: skip
    return wanted.result()
