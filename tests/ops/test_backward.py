"""The native backwards, on every instruction set, against autograd of the float64 reference."""

import itertools

import pytest
import torch

from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.ops.test_ops import BF16, FP32, ISAS, SPECS, gradients
from vitkern.contract import judge
from vitkern.registry import REGISTRY, resolve

CHOSEN = ""  # by cpu_blas.py, where that is faster
# Gradients that are the reference's (cpu_backward.py).
NOT_NATIVE = {"image": "patch_embed", "attention.bias": "attention+bias", "rotary.table": "rotary"}


def names_of(spec, inputs):
    """The floating-point inputs that a native backward has gradients of."""
    skipped = {n.removeprefix(f"{spec.op.name}.") for n in NOT_NATIVE}
    return [
        n
        for n in spec.op.differentiable
        if n in inputs and inputs[n].is_floating_point() and n not in skipped
    ]


def native_gradients(spec, inputs, names, isa=""):
    """The gradients of `names` by one instruction set, of the same weights as `gradients`."""
    args = spec.arguments(inputs, save=True)
    result = spec.torch_op()(*args)
    y, *saved = result if isinstance(result, tuple) else (result,)
    g = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)
    sizes = spec.op.bind(dict(zip(spec.op.arguments, args, strict=True)))
    backward = resolve(spec.op.native_backward)
    return backward(sizes, grad, args, saved, frozenset(names), isa=isa)


def cases():
    for spec, isa, dtype in itertools.product(SPECS, (CHOSEN, *ISAS), (FP32, BF16)):
        for index, axes in enumerate(spec.cases[1:], 1):  # one element is right or wrong by luck
            if all(axes.values()):
                shape = "x".join(map(str, axes.values()))
                name = f"{spec.name}-{isa or 'chosen'}-{shape}-{str(dtype)[6:]}"
                yield pytest.param(spec, isa, index, dtype, id=name)


@pytest.mark.parametrize("spec, isa, index, dtype", list(cases()))
def test_gradients_keep_the_contract(spec, isa, index, dtype):
    inputs = spec.make_inputs(spec.cases[index], dtype)
    names = names_of(spec, inputs)
    truths = gradients(spec, inputs, names, torch.float64, spec.op.reference)
    with FixedOrder():
        torchs = gradients(spec, inputs, names, dtype, spec.op.reference)
    ours = native_gradients(spec, inputs, names, isa)
    for name, got, truth, theirs in zip(names, ours, truths, torchs, strict=True):
        verdict = judge(got, theirs, truth, dtype=dtype, slack=spec.slack, gradient=True)
        assert verdict.passed, f"d{name}: {verdict.problem}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS, ids=[s.name for s in SPECS])
def test_gradients_are_those_asked_for(spec, isa):
    """Each alone is bit for bit what it is among all, for any number of threads."""
    inputs = spec.make_inputs(spec.cases[3], FP32)
    names = names_of(spec, inputs)
    together = native_gradients(spec, inputs, names, isa)
    before = torch.get_num_threads()
    try:
        for threads, (name, expected) in itertools.product(
            (1, 3), zip(names, together, strict=True)
        ):
            torch.set_num_threads(threads)
            (alone,) = native_gradients(spec, inputs, [name], isa)
            assert alone.shape == inputs[name].shape and torch.equal(alone, expected), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("S", (257, 530))
def test_attention_takes_tiles_of_queries(S, isa):
    """More queries than one tile has: dk and dv add up what each tile gives."""
    spec = REGISTRY["attention"]
    inputs = spec.make_inputs({"B": 1, "S": S, "H": 2, "E": 8}, FP32)
    (truth,) = gradients(spec, inputs, ["qkv"], torch.float64, spec.op.reference)
    with FixedOrder():
        (theirs,) = gradients(spec, inputs, ["qkv"], FP32, spec.op.reference)
    (got,) = native_gradients(spec, inputs, ["qkv"], isa)
    verdict = judge(got, theirs, truth, dtype=FP32, slack=spec.slack, gradient=True)
    assert verdict.passed, verdict.problem


@pytest.mark.parametrize("name", sorted(NOT_NATIVE))
def test_what_no_kernel_has_is_the_references(name):
    argument, spec = name.rpartition(".")[2], REGISTRY[NOT_NATIVE[name]]
    inputs = spec.make_inputs(spec.cases[2], FP32)
    assert native_gradients(spec, inputs, [argument]) is None
    (truth,) = gradients(spec, inputs, [argument], torch.float64, spec.op.reference)
    (got,) = gradients(spec, inputs, [argument], FP32, spec.torch_op())
    assert torch.allclose(got.double(), truth, atol=1e-4)
