"""Every GPU operator in the interpreter, forward and backward, against its reference."""

import pytest
import torch

import vitkern.ops  # noqa: F401  (fills the registry)
from vitkern.registry import LAYOUTS, REGISTRY

pytest.importorskip("triton")
import gpu_contract as contract

OWN_FILE = ("attention", "patch_embed")  # tested in files of their own, with more cases
SPECS = [s for s in REGISTRY.values() if s.op.name not in OWN_FILE]


@pytest.mark.parametrize("spec, axes, numerics", contract.every_case(SPECS))
def test_matches_reference(spec, axes, numerics):
    inputs = spec.make_inputs(axes, contract.DTYPES[numerics])
    with contract.gpu(numerics):
        results = contract.run(spec, inputs)
    contract.check(spec, results, inputs, numerics)


@pytest.mark.parametrize("spec, axes, numerics", contract.every_case(SPECS))
def test_gradients_match_reference(spec, axes, numerics):
    inputs = spec.make_inputs(axes, contract.DTYPES[numerics])
    names = contract.differentiable(spec, inputs)
    with contract.gpu(numerics):
        grads = contract.run_backward(spec, inputs, names)
    contract.check_gradients(spec, grads, inputs, names, numerics)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "packed"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_accepts_any_layout(spec, layout):
    inputs = spec.make_inputs(spec.cases[2], torch.float32, layout)
    names = contract.differentiable(spec, inputs)
    with contract.gpu("fp32"):
        results, grads = contract.run(spec, inputs), contract.run_backward(spec, inputs, names)
    contract.check(spec, results, inputs, "fp32")
    contract.check_gradients(spec, grads, inputs, names, "fp32")
