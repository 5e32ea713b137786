"""One operator against its reference in float64: results and gradients, on one instruction set of
the CPU or on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import Verdict, judge
from ..precision import Precision
from ..registry import Axes, OpSpec, resolve

Inputs = Mapping[str, Tensor]
# Gradients that the CPU has no kernel for: PyTorch computes them (cpu_backward.py).
NOT_NATIVE = {"image", "attention.bias", "rotary.table"}


def differentiable(spec: OpSpec, inputs: Inputs) -> list[str]:
    """The floating-point inputs that the operator has gradients of."""
    names = (name for name in spec.op.differentiable if name in inputs)
    return [name for name in names if inputs[name].is_floating_point()]


def native_differentiable(spec: OpSpec, inputs: Inputs) -> list[str]:
    """Those of which the CPU's kernels compute the gradients."""
    skipped = {name.removeprefix(f"{spec.op.name}.") for name in NOT_NATIVE}
    return [name for name in differentiable(spec, inputs) if name not in skipped]


def cast(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}


def native_results(
    spec: OpSpec, inputs: Inputs, isa: str = "", save: bool = True
) -> Sequence[Tensor]:
    """Of the CPU kernel of one instruction set, called as the dispatcher would."""
    args = spec.arguments(inputs, save)
    shape = spec.op.call_shape(dict(zip(spec.op.arguments, args, strict=True)))
    results = shape.allocate(next(t for t in args if isinstance(t, Tensor)))
    spec.load("native")(shape.sizes, results, *args, isa=isa)
    return results


def operator_results(spec: OpSpec, inputs: Inputs) -> Sequence[Tensor]:
    """Of the operator as torch calls it, on the device of its tensors."""
    found = spec.torch_op()(*spec.arguments(inputs, save=True))
    return found if isinstance(found, tuple | list) else (found,)


def reference_results(
    spec: OpSpec, inputs: Inputs, dtype: torch.dtype, save: bool = True
) -> Sequence[Tensor]:
    """What PyTorch makes of the inputs at a dtype; float64: the truth."""
    return spec.op.reference(*spec.arguments(cast(inputs, dtype), save))


def _weights(result: Tensor) -> Tensor:
    """The gradient of the result, drawn on the CPU in float64: the same for every contestant."""
    g = torch.Generator().manual_seed(1)
    made = torch.randn(result.shape, generator=g, dtype=torch.float64)
    return made.to(result.device, result.dtype)


def gradients(
    spec: OpSpec,
    inputs: Inputs,
    names: Sequence[str],
    dtype: torch.dtype,
    function: Callable[..., Any],
) -> Sequence[Tensor]:
    """By autograd, through the operator (`spec.torch_op()`) or its reference."""
    held = cast(inputs, dtype)
    for name in names:
        held[name].requires_grad_()
    result = function(*spec.arguments(held, save=True))
    result = result[0] if isinstance(result, tuple) else result
    return torch.autograd.grad(result, [held[n] for n in names], _weights(result))


def native_gradients(
    spec: OpSpec, inputs: Inputs, names: Sequence[str], isa: str = ""
) -> Sequence[Tensor]:
    """By the CPU kernels of one instruction set, of the same weights as `gradients`."""
    args = spec.arguments(inputs, save=True)
    y, *saved = operator_results(spec, inputs)
    sizes = spec.op.bind(dict(zip(spec.op.arguments, args, strict=True)))
    backward = resolve(spec.op.native_backward)
    return backward(sizes, _weights(y), args, saved, frozenset(names), isa=isa)


def judge_results(
    spec: OpSpec,
    got: Sequence[Tensor],
    truths: Sequence[Tensor],
    torchs: Sequence[Tensor],
    dtype: torch.dtype,
    gpu: Precision | None = None,
) -> dict[str, Verdict]:
    """A verdict for each result of a call, by its name."""
    found = {}
    for name, g, truth, t in zip(spec.op.outputs, got, truths, torchs, strict=True):
        kind = dtype if g.dtype == dtype else torch.float32  # statistics are fp32
        found[name] = judge(g, t, truth, dtype=kind, slack=spec.slack, gpu=gpu)
    return found


def judge_gradients(
    spec: OpSpec,
    names: Sequence[str],
    got: Sequence[Tensor],
    truths: Sequence[Tensor],
    torchs: Sequence[Tensor],
    dtype: torch.dtype,
    gpu: Precision | None = None,
) -> dict[str, Verdict]:
    """A verdict for each gradient, by its name: "dx"."""
    rows = zip(names, got, truths, torchs, strict=True)
    return {
        f"d{name}": judge(g, t, truth, dtype=dtype, slack=spec.slack, gpu=gpu, gradient=True)
        for name, g, truth, t in rows
    }


def cases(spec: OpSpec, quick: bool = False) -> list[Axes]:
    """The shapes of the table that have elements: all, or one odd shape."""
    if quick:
        return [spec.cases[3]]
    return [axes for axes in spec.cases if all(axes.values())]
