"""The GPU operators on this machine: their launchers with an executor for CPU tensors, checked by
the contract of every backend. Four numerics: fp32 (three tf32 products), tf32, fp16 and bf16.
"""

import contextlib
import importlib
import itertools

import pytest
import torch

from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.evidence.interpreter import Interpreter
from vitkern.contract import judge, on_gpu
from vitkern.gpu.launch import executing
from vitkern.precision import PRECISIONS
from vitkern.verification.operators import differentiable, gradients, reference_results

DTYPES = {name: row.dtype for name, row in PRECISIONS.items()}
LONG = 500  # tokens: a case of many seconds in the interpreter
REAL = 190  # tokens: a case of seconds


def problem(got, torchs, truth, slack, numerics, operator="") -> str:
    """What breaks the contract of every backend at the precision of a GPU's GEMMs; or ""."""
    row = on_gpu(PRECISIONS[numerics], "sm_80", operator)
    return judge(got, torchs, truth, dtype=got.dtype, slack=slack, gpu=row).problem


def yardstick(numerics: str) -> FixedOrder:
    """Where torch itself is run: with the same result on any CPU."""
    return FixedOrder(tf32=numerics == "tf32")


@contextlib.contextmanager
def gpu(numerics: str, executor=None):
    """Launches go to `executor` (the interpreter), fp32 products are those of `numerics`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if numerics == "tf32" else "highest")
    try:
        with executing(executor or Interpreter("sm_80")):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def operator(spec):
    return importlib.import_module(f"vitkern.gpu.{spec.op.name}")


def run(spec, inputs, save=True):
    """The GPU forward as the dispatcher would call it."""
    args = spec.arguments(inputs, save)
    shape = spec.op.call_shape(dict(zip(spec.op.arguments, args, strict=True)))
    results = shape.allocate(args[0])
    for result in results:  # what a kernel leaves out must not look right by accident
        result.fill_(float("nan"))
    operator(spec).forward(shape.sizes, results, *args)
    return results


def check(spec, got, inputs, numerics, slack=None):
    """Each result within the contract, NaN and Inf where the truth has them."""
    truths = reference_results(spec, inputs, torch.float64)
    with yardstick(numerics):
        torchs = reference_results(spec, inputs, DTYPES[numerics])
    for name, g, truth, t in zip(spec.op.outputs, got, truths, torchs, strict=True):
        wrong = problem(g, t, truth, slack or spec.slack, numerics, spec.op.name)
        assert not wrong, f"{spec.name}.{name}: {wrong}"


def gradient_of(spec, shape, dtype):
    g = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def run_backward(spec, inputs, names, results=None):
    """The GPU backward after the GPU forward: gradients of the named arguments, in order."""
    args = tuple(spec.arguments(inputs, True))
    y, *saved = results or run(spec, inputs)
    grad = gradient_of(spec, y.shape, y.dtype)
    return operator(spec).backward(grad, args, saved, frozenset(names))


def reference_gradients(spec, inputs, names, dtype):
    return gradients(spec, inputs, names, dtype, spec.op.reference)


def check_gradients(spec, got, inputs, names, numerics, slack=None):
    truths = reference_gradients(spec, inputs, names, torch.float64)
    with yardstick(numerics):
        torchs = reference_gradients(spec, inputs, names, DTYPES[numerics])
    for name, g, truth, t in zip(names, got, truths, torchs, strict=True):
        assert g.dtype == inputs[name].dtype, f"{spec.name} d{name}"
        wrong = problem(g, t, truth, slack or spec.slack, numerics, spec.op.name)
        assert not wrong, f"{spec.name} d{name}: {wrong}"


def check_both(spec, inputs, numerics="fp32", executor=None):
    """Results and gradients of one call within the contract; returns both."""
    names = differentiable(spec, inputs)
    with gpu(numerics, executor):
        results = run(spec, inputs)
        grads = run_backward(spec, inputs, names, results)
    check(spec, results, inputs, numerics)
    check_gradients(spec, grads, inputs, names, numerics)
    return results, grads


def every_case(specs) -> list:
    """(spec, axes, numerics) as pytest parameters with readable ids.

    Of long sequences one or two dtypes are enough for every day: they add tiles, not roundings.
    """

    def case(spec, axes, numerics):
        name = f"{spec.name}-{'x'.join(map(str, axes.values()))}-{numerics}"
        tokens = axes.get("S", axes.get("M", 0))
        daily = ("bf16",) if tokens > LONG else ("bf16", "fp32") if tokens > REAL else DTYPES
        long = numerics not in daily
        return pytest.param(spec, axes, numerics, id=name, marks=[pytest.mark.full] if long else [])

    return [case(*c) for s in specs for c in itertools.product([s], s.cases, DTYPES)]
