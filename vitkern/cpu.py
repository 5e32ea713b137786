"""The native CPU backend: lays tensors out for the kernels, hands raw pointers to vitkern._C.

_C does not link against torch, so one build serves every torch version. A kernel reads matrices in
place when their last axis is contiguous, and per-channel vectors (norms, biases, gamma) in fp32;
anything else is copied first. Sizes were checked and results allocated by the caller
(registry.CallShape).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _C, cpu_blas, packing
from .cpu_threads import threads
from .operands import (
    ACTIVATIONS,
    DTYPES,
    IMAGE_DTYPES,
    Maybe,
    Results,
    Sizes,
    address,
    dropout,
    rows,
    vector,
)

PRECISIONS = {name: getattr(_C.Precision, name) for name in _C.Precision.__members__}


class _Matrices(NamedTuple):
    at: list[int]
    packed: bool
    memory: Sequence[object]  # keeps it until the call returns


def isas() -> list[str]:
    """Instruction sets this build and this CPU have, best first."""
    return _C.isas()


def operator_isas() -> list[str]:
    """Those of `isas()` with operators of their own; `avx512_bf16` has them for bf16 weights."""
    return _C.operator_isas()


def operator_isa(isa: str, weight: torch.dtype = torch.float32) -> str:
    """The set whose operators run where this one is asked for, by the dtype of their weights.

    `avx512` for `avx512_vnni`, or with bf16 weights `avx512_bf16` where that is faster.
    """
    return _C.operator_isa(isa, DTYPES[weight])


def engine_isa(precision: str, isa: str = "") -> str:
    """The set whose kernels the engine of this precision runs, by default or where `isa` is named.

    On a CPU with AMX fp32 is multiply-adds unless `amx` or `amx_fp16` is asked for, here or by
    VITKERN_ISA.
    """
    return _C.engine_isa(isa, PRECISIONS[precision])


def has_tiles(isa: str) -> bool:
    """Whether this set multiplies by AMX's tiles: only there tf32 is not fp32."""
    return isa in ("amx_fp16", "amx")


def _matrices(isa: str, weights: tuple[Tensor, ...], save: bool = False) -> _Matrices:
    """Weight matrices as a kernel gets them: in panels where those are kept (packing.py).

    save: a backward follows, and after it the weights change.
    """
    panels = None if save else packing.lone(isa, weights)
    if panels is not None:
        return _Matrices([one.panels for one in panels], True, panels)
    plain = [weight.contiguous() for weight in weights]
    return _Matrices([address(one) for one in plain], False, plain)


def layernorm(
    n: Sizes, results: Results, x: Tensor, weight: Maybe, bias: Maybe, eps: float, save: bool,
    isa: str = "",
) -> None:  # fmt: skip
    x, x_stride = rows(x)
    weight, bias = vector(weight), vector(bias)
    _C.layernorm(
        isa, threads=threads(), dtype=DTYPES[x.dtype], x=address(x),
        weight=address(weight), bias=address(bias), y=address(results[0]),
        stats=address(results[1]), M=n["M"], D=n["D"], x_stride=x_stride, eps=eps,
    )  # fmt: skip


def norm_linear(
    n: Sizes, results: Results, x: Tensor, norm_weight: Maybe, norm_bias: Maybe, weight: Tensor,
    bias: Maybe, activation: str, eps: float, save: bool, isa: str = "",
) -> None:  # fmt: skip
    if save and cpu_blas.serves(isa, x, weight):
        cpu_blas.norm_linear(
            n, results, x, norm_weight, norm_bias, weight, bias, activation, eps
        )  # fmt: skip
        return
    x, x_stride = rows(x)
    weights = _matrices(isa, (weight,), save)
    norm_weight, norm_bias, bias = vector(norm_weight), vector(norm_bias), vector(bias)
    y, stats, pre = results
    _C.norm_linear(
        isa, threads=threads(), x_dtype=DTYPES[x.dtype], w_dtype=DTYPES[weight.dtype],
        x=address(x), norm_weight=address(norm_weight), norm_bias=address(norm_bias),
        weight=weights.at[0], packed=weights.packed, bias=address(bias), y=address(y),
        stats=address(stats), pre=address(pre), M=n["M"], K=n["K"], N=n["N"], x_stride=x_stride,
        eps=eps, activation=ACTIVATIONS[activation],
    )  # fmt: skip


def attention_layout(
    n: Sizes, qkv: Tensor, bias: Maybe, offsets: Maybe
) -> tuple[dict[str, Maybe], dict[str, int]]:
    """The tensors of an attention call as the kernels read them, and their strides by name."""
    if qkv.stride(4) != 1 and n["E"] > 1:
        qkv = qkv.contiguous()
    sequences = 1
    if offsets is not None:
        ends = offsets.tolist()  # a wrong one would be read beyond the tensor's end
        ascend = len(ends) > 1 and [ends[0], ends[-1]] == [0, n["S"]] and sorted(ends) == ends
        if not ascend or n["B"] != 1:
            raise ValueError(
                f"attention: offsets must ascend from 0 to S={n['S']} with B=1, got"
                f" {ends[:4]}{'...' if len(ends) > 4 else ''} with B={n['B']}"
            )
        offsets, sequences = offsets.to(torch.int32).contiguous(), len(ends) - 1
    bias_strides = (0, 0, 0)
    if bias is not None:
        bias = bias.to(torch.float32)
        if bias.stride(3) != 1:
            bias = bias.contiguous()
        broad = [
            0 if size == 1 else stride
            for size, stride in zip(bias.shape, bias.stride(), strict=True)
        ]
        bias_strides = (broad[0], broad[1], bias.stride(2))
    names = ("b_stride", "s_stride", "part_stride", "h_stride")
    layout = dict(zip(names, qkv.stride(), strict=False))
    layout |= {
        f"bias_{name}": stride
        for name, stride in zip(("b_stride", "h_stride", "s_stride"), bias_strides, strict=True)
    }
    return {"qkv": qkv, "bias": bias, "offsets": offsets}, {**layout, "sequences": sequences}


def attention(
    n: Sizes, results: Results, qkv: Tensor, bias: Maybe, scale: float, dropout_p: float,
    seed: Maybe, offsets: Maybe, save: bool, isa: str = "",
) -> None:  # fmt: skip
    tensors, layout = attention_layout(n, qkv, bias, offsets)
    _C.attention(
        isa, threads=threads(), dtype=DTYPES[qkv.dtype], y=address(results[0]),
        lse=address(results[1]), B=n["B"], S=n["S"], H=n["H"], E=n["E"], scale=scale,
        dropout=dropout(dropout_p, seed), **{name: address(t) for name, t in tensors.items()},
        **layout,
    )  # fmt: skip


def linear_residual(
    n: Sizes, results: Results, x: Tensor, weight: Tensor, bias: Maybe, residual: Tensor,
    gamma: Maybe, dropout_p: float, drop_path_p: float, seed: Maybe, isa: str = "",
) -> None:  # fmt: skip
    if (x.requires_grad or residual.requires_grad) and cpu_blas.serves(isa, x, weight):
        cpu_blas.linear_residual(
            n, results, x, weight, bias, residual, gamma, dropout_p, drop_path_p, seed
        )  # fmt: skip
        return
    (x, x_stride), (residual, residual_stride) = rows(x), rows(residual)
    weights, bias, gamma = _matrices(isa, (weight,)), vector(bias), vector(gamma)
    _C.linear_residual(
        isa, threads=threads(), x_dtype=DTYPES[x.dtype], w_dtype=DTYPES[weight.dtype],
        y_dtype=DTYPES[residual.dtype], x=address(x), weight=weights.at[0], packed=weights.packed,
        bias=address(bias), residual=address(residual), gamma=address(gamma), y=address(results[0]),
        B=n["B"], S=n["S"], K=n["K"], N=n["N"], x_stride=x_stride, residual_stride=residual_stride,
        dropout=dropout(dropout_p, seed), path=dropout(drop_path_p, seed),
    )  # fmt: skip


def mlp(
    n: Sizes, results: Results, x: Tensor, norm_weight: Maybe, norm_bias: Maybe,
    fc1_weight: Tensor, fc1_bias: Maybe, fc2_weight: Tensor, fc2_bias: Maybe, gamma: Maybe,
    activation: str, eps: float, dropout_p: float, drop_path_p: float, seed: Maybe, save: bool,
    isa: str = "",
) -> None:  # fmt: skip
    if save and cpu_blas.serves(isa, x, fc1_weight):
        cpu_blas.mlp(
            n, results, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias,
            gamma, activation, eps, dropout_p, drop_path_p, seed,
        )  # fmt: skip
        return
    x, x_stride = rows(x)
    weights = _matrices(isa, (fc1_weight, fc2_weight), save)
    vectors = {
        "norm_weight": norm_weight, "norm_bias": norm_bias, "fc1_bias": fc1_bias,
        "fc2_bias": fc2_bias, "gamma": gamma,
    }  # fmt: skip
    vectors = {name: vector(t) for name, t in vectors.items()}
    y, stats, pre = results
    _C.mlp(
        isa, threads=threads(), x_dtype=DTYPES[x.dtype],
        w_dtype=DTYPES[fc1_weight.dtype], x=address(x), fc1_weight=weights.at[0],
        fc2_weight=weights.at[1], packed=weights.packed, y=address(y), stats=address(stats),
        pre=address(pre), B=n["B"], S=n["S"], D=n["D"], F=n["F"], x_stride=x_stride, eps=eps,
        activation=ACTIVATIONS[activation], dropout=dropout(dropout_p, seed),
        path=dropout(drop_path_p, seed), **{name: address(t) for name, t in vectors.items()},
    )  # fmt: skip


def rotary(
    n: Sizes, results: Results, qkv: Tensor, table: Tensor, half: bool, back: bool = False,
    isa: str = "",
) -> None:  # fmt: skip
    if qkv.stride(4) != 1:
        qkv = qkv.contiguous()
    table = vector(table)
    b_stride, s_stride, part_stride, h_stride, _ = qkv.stride()
    _C.rotary(
        isa, threads=threads(), dtype=DTYPES[qkv.dtype], qkv=address(qkv), table=address(table),
        y=address(results[0]), B=n["B"], S=n["S"], H=n["H"], E=n["E"], P=table.shape[0],
        b_stride=b_stride, s_stride=s_stride, part_stride=part_stride, h_stride=h_stride,
        half=half, back=back,
    )  # fmt: skip


def swiglu(n: Sizes, results: Results, x: Tensor, isa: str = "") -> None:
    x, x_stride = rows(x)
    _C.swiglu(
        isa, threads=threads(), dtype=DTYPES[x.dtype], x=address(x), y=address(results[0]),
        M=n["M"], F=n["F"], x_stride=x_stride,
    )  # fmt: skip


def patch_embed(
    n: Sizes, results: Results, image: Tensor, weight: Tensor, bias: Maybe, prefix: Maybe,
    position: Maybe, mean: Maybe, std: Maybe, dropout_p: float, seed: Maybe, isa: str = "",
) -> None:  # fmt: skip
    weights = _matrices(isa, (weight,))
    vectors = {"bias": bias, "prefix": prefix, "position": position, "mean": mean, "std": std}
    vectors = {name: vector(t) for name, t in vectors.items()}
    b_stride, c_stride, y_stride, x_stride = image.stride()
    _C.patch_embed(
        isa, threads=threads(), image_dtype=IMAGE_DTYPES[image.dtype],
        w_dtype=DTYPES[weight.dtype], image=address(image), weight=weights.at[0],
        packed=weights.packed, y=address(results[0]), B=n["B"], C=n["C"], Y=n["Y"], X=n["X"],
        py=n["py"], px=n["px"], D=n["D"], T=n.get("T", 0), b_stride=b_stride, c_stride=c_stride,
        y_stride=y_stride, x_stride=x_stride, dropout=dropout(dropout_p, seed),
        **{name: address(t) for name, t in vectors.items()},
    )  # fmt: skip


def calibrate(
    precision: str = "fp32", data: Tensor | None = None, seconds: float = 0.02, isa: str = ""
) -> float:
    """What this machine can do with torch's threads, measured for `seconds`.

    Flops a second of multiply-adds in L1, as the engine multiplies at a precision; with
    `data` (fp32), bytes a second of reading it over and over, each thread its own part.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"calibrate: precision is {precision!r}, expected {', '.join(PRECISIONS)}")
    if data is not None and (
        data.dtype != torch.float32 or data.device.type != "cpu" or not data.is_contiguous()
    ):
        raise ValueError(
            f"calibrate: data is {data.dtype} on {data.device}, expected contiguous float32 on cpu"
        )
    count = threads()
    if data is not None and data.numel() < count * 16:
        raise ValueError(
            f"calibrate: data has {data.numel()} elements, too few for {count} threads to read"
        )
    rates = torch.zeros(count, dtype=torch.float64)
    _C.calibrate(
        isa, threads=count, precision=PRECISIONS[precision], data=address(data),
        floats=0 if data is None else data.numel(), seconds=seconds, rates=address(rates),
    )  # fmt: skip
    return rates.sum().item()


def isa() -> str:
    """The instruction set in use: VITKERN_ISA, or the best this CPU has."""
    return _C.features()["isa"]


def profile(forward: Callable[[], object]) -> dict[str, float]:
    """Seconds that the engine's threads spent in each step while `forward` ran, summed over them.

    Of this process: forwards of other threads at the same time are counted, too.
    """
    _C.profile_steps(True)
    try:
        forward()
    finally:
        found = _C.profile_steps(False)
    return found
