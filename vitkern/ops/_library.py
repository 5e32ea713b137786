"""Declares operators to torch: schema, fake kernel, autograd, and who computes where.

`Library.define/impl` rather than `@custom_op`: the same torch.compile support at 3 us a call
instead of 6-12 us (torch 2.13, CPU). Kernels are imported on their first call: those of `cpu.py`,
and those of `gpu/<operator>.py` on CUDA and ROCm devices. A dtype or device without a kernel
(float64, float16 on the CPU, other accelerators, a GPU without Triton or with one that is too old)
runs the reference, which is exact but slower; `ViT.explain()` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..precision import chosen_tf32, fp32_as
from ..registry import CallShape, Operator, resolve

_LIBRARY = torch.library.Library("vitkern", "DEF")
NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16})
GPU_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
SHAPES_KEPT = 256  # per operator


def define(op: Operator) -> Callable[..., Any]:
    """Declare `op` and `op`_backward; returns the callable torch operator."""
    results = ", ".join(["Tensor"] * len(op.outputs))
    _LIBRARY.define(f"{op.name}({op.schema}) -> ({results})")
    torch.library.register_fake(
        f"vitkern::{op.name}",
        lambda *args: _bare(op.call_shape(_named(op, args)).allocate(args[0])),
        lib=_LIBRARY,
    )
    _LIBRARY.impl(op.name, _checked_reference(op), "CompositeExplicitAutograd")
    _LIBRARY.impl(op.name, _by_shape(op, lambda: resolve(op.native), NATIVE_DTYPES), "CPU")
    gpu = _by_shape(op, lambda: _gpu(op, "forward"), GPU_DTYPES, op.on_gpu)
    _LIBRARY.impl(op.name, gpu, "CUDA")
    _define_backward(op)
    return _transformable(op)


def _transformable(op: Operator) -> Callable[..., Any]:
    """The torch operator, or its reference under torch.func and forward-mode derivatives.

    Those look inside a function; an opaque operator would give them zeros.
    """
    opaque = getattr(torch.ops.vitkern, op.name).default
    forward_mode = torch.autograd.forward_ad

    def call(*args: Any) -> Any:
        if not torch.compiler.is_compiling() and (
            torch._C._functorch.peek_interpreter_stack() is not None
            or forward_mode._current_level >= 0
        ):
            op.bind(_named(op, args))
            return _bare(op.reference(*args))
        return opaque(*args)

    return call


def _named(op: Operator, args: Sequence[Any]) -> Mapping[str, Any]:
    return dict(zip(op.arguments, args, strict=True))


def _bare(results: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """What torch wants back: a tensor for a single result, else a tuple."""
    return results[0] if len(results) == 1 else tuple(results)


def _checked_reference(op: Operator) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        shape = op.call_shape(_named(op, args))
        return _bare(shape.allocate(args[0]) if shape.is_empty else op.reference(*args))

    return call


def _gpu(op: Operator, direction: str) -> Callable[..., Any] | None:
    """The operator's Triton launcher, or None where Triton is not installed or too old."""
    try:
        return resolve(f"{op.gpu}:{direction}")
    except ImportError as error:
        if error.name != "triton":
            raise
        return None


def _by_shape(
    op: Operator,
    load: Callable[[], Callable[..., Any] | None],
    dtypes: frozenset[torch.dtype],
    serves: Callable[[dict[str, int]], bool] = lambda sizes: True,
) -> Callable[..., Any]:
    """The kernel that `load` imports, for the dtypes and sizes it serves, else the reference.

    Checking shapes by their axis strings takes 20 us: those of a call are kept for the next call
    with the same shapes and dtypes.
    """
    reference, load = _checked_reference(op), functools.cache(load)
    shapes: dict[tuple[Any, ...], CallShape] = {}

    def call(*args: Any) -> Any:
        kernel = load()
        if kernel is None:
            return reference(*args)
        key = _kind(args)
        shape = shapes.get(key)
        if shape is None:
            if not dtypes.issuperset(_float_dtypes(args)):
                return reference(*args)
            if len(shapes) >= SHAPES_KEPT:
                shapes.clear()
            shape = op.call_shape(_named(op, args))
            if not serves(shape.sizes):
                return reference(*args)
            shapes[key] = shape
        results = shape.allocate(args[0])
        if not shape.is_empty:
            kernel(shape.sizes, results, *args)
        return _bare(results)

    return call


def _kind(args: Sequence[Any]) -> tuple[Any, ...]:
    """All of a call that its checks look at."""
    return tuple([(a.shape, a.dtype, a.device) if isinstance(a, Tensor) else a for a in args])


def _float_dtypes(args: Sequence[Any]) -> set[torch.dtype]:
    return {a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()}


def _define_backward(op: Operator) -> None:
    """`op`_backward(grad, arguments, saved, needs) -> the gradients asked for, in argument order.

    An operator of its own, so that torch.compile sees one opaque node and a fused kernel can
    replace it without a change of schema.
    """
    name, count = f"{op.name}_backward", len(op.arguments)
    _LIBRARY.define(f"{name}(Tensor grad, {op.schema}, Tensor[] saved, bool[] needs) -> Tensor[]")

    def wanted(rest: Sequence[Any]) -> list[Tensor]:
        return [a for a, need in zip(rest[:count], rest[-1], strict=True) if need]

    def call(grad: Tensor, *rest: Any) -> list[Tensor]:
        args, (saved, needs) = rest[:count], rest[count:]
        if not grad.numel():  # of an empty result: nothing was saved, and nothing depends on it
            return [a.new_zeros(a.shape) for a in wanted(rest)]
        return op.backward(grad, args, saved, _named_needs(op, needs))

    @functools.cache
    def native() -> Callable[..., list[Tensor] | None]:
        return resolve(op.native_backward)

    def cpu(grad: Tensor, *rest: Any) -> list[Tensor]:
        args, (saved, needs) = rest[:count], rest[count:]
        if grad.numel() and NATIVE_DTYPES.issuperset(_float_dtypes((grad, *args))):
            sizes, asked = op.bind(_named(op, args)), _named_needs(op, needs)
            gradients = native()(sizes, grad, args, saved, asked)
            if gradients is not None:
                return gradients
        return call(grad, *rest)

    @functools.cache
    def kernel() -> Callable[..., Any] | None:
        return _gpu(op, "backward")

    served: dict[tuple[Any, ...], bool] = {}  # by the kinds of calls

    def serves(grad: Tensor, args: Sequence[Any]) -> bool:
        known = GPU_DTYPES.issuperset(_float_dtypes((grad, *args))) and grad.numel()
        return bool(known) and op.on_gpu(op.bind(_named(op, args)))

    def gpu(grad: Tensor, *rest: Any) -> list[Tensor]:
        args, (saved, needs) = rest[:count], rest[count:]
        launch = kernel()
        if launch is None:
            return call(grad, *rest)
        key = _kind((grad, *args))
        good = served.get(key)
        if good is None:
            if len(served) >= SHAPES_KEPT:
                served.clear()
            good = served[key] = serves(grad, args)
        if not good:
            return call(grad, *rest)
        return launch(grad, args, saved, _named_needs(op, needs))

    def fake(grad: Tensor, *rest: Any) -> list[Tensor]:
        return [a.new_empty(a.shape) for a in wanted(rest)]

    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, gpu, "CUDA")
    torch.library.register_fake(f"vitkern::{name}", fake, lib=_LIBRARY)
    backward_op = getattr(torch.ops.vitkern, name).default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        output = (output,) if isinstance(output, Tensor) else output
        ctx.plain = [None if isinstance(a, Tensor) else a for a in inputs]
        ctx.tf32 = chosen_tf32()
        ctx.places = [i for i, a in enumerate(inputs) if isinstance(a, Tensor)]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        if not _named(op, inputs).get("save", True) and output[0].numel():
            raise RuntimeError(
                f"{op.name}: an argument requires a gradient, so pass save=True"
                f" (vitkern.ops.{op.name} does it by itself)"
            )
        ctx.save_for_backward(*(inputs[i] for i in ctx.places), *output[1:])

    def backward(ctx: Any, grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * count
        args, saved = list(ctx.plain), ctx.saved_tensors
        for place, tensor in zip(ctx.places, saved, strict=False):
            args[place] = tensor
        needs = [
            bool(need) and name in op.differentiable
            for name, need in zip(op.arguments, ctx.needs_input_grad, strict=False)
        ]
        if torch.is_grad_enabled():  # a derivative of this one will be asked for: by the definition
            return _differentiate_reference(op, grad, args, needs)
        passed = [
            need and name in op.passed for name, need in zip(op.arguments, needs, strict=True)
        ]
        asked = [need and not through for need, through in zip(needs, passed, strict=True)]
        grads: Any = iter(())
        if any(asked):
            with fp32_as(ctx.tf32):
                grads = iter(backward_op(grad, *args, list(saved[len(ctx.places) :]), asked))
        return tuple(
            grad if through else next(grads) if need else None
            for need, through in zip(asked, passed, strict=True)
        )

    torch.library.register_autograd(
        f"vitkern::{op.name}", backward, setup_context=setup_context, lib=_LIBRARY
    )


def _differentiate_reference(
    op: Operator, grad: Tensor, args: list[Any], needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients as functions of the arguments and of grad, for derivatives of higher order.

    By aliases: an argument may be a function of another (a branch, of its residual), and the way
    through that one is not this operator's to differentiate.
    """
    args = [a.view_as(a) if need else a for a, need in zip(args, needs, strict=True)]
    wanted = [a for a, need in zip(args, needs, strict=True) if need]
    y = op.reference(*args)[0]
    grads = iter(torch.autograd.grad(y, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(grads) if need else None for need in needs)


def _named_needs(op: Operator, needs: list[bool]) -> frozenset[str]:
    return frozenset(n for n, need in zip(op.arguments, needs, strict=True) if need)


def needs_save(*tensors: Tensor | None) -> bool:
    """Whether a backward may follow, so that the results only it needs are worth keeping."""
    tracked = (isinstance(t, Tensor) and t.requires_grad for t in tensors)
    return torch.is_grad_enabled() and any(tracked)


def has_elements(operand: object) -> bool:
    """Whether there is anything to compute with; what is no tensor is refused by the operator."""
    return isinstance(operand, Tensor) and operand.numel() > 0
