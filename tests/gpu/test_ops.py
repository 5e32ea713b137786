"""Every GPU operator in the interpreter, forward and backward, against its reference."""

import pytest
import torch

import vitkern.ops  # noqa: F401  (fills the registry)
from vitkern.registry import LAYOUTS, REGISTRY

pytest.importorskip("triton")
from tests.evidence.interpreter import Interpreter
from tests.gpu import contract
from vitkern.gpu.configs import ARCHS
from vitkern.verification.operators import cast

ALL = list(REGISTRY.values())
OWN_FILE = ("attention", "patch_embed")  # with more cases in files of their own
SPECS = [s for s in ALL if s.op.name not in OWN_FILE]


@pytest.mark.parametrize("spec, axes, numerics", contract.every_case(ALL))
def test_matches_reference_in_both_directions(spec, axes, numerics):
    contract.check_both(spec, spec.make_inputs(axes, contract.DTYPES[numerics]), numerics)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "packed"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_accepts_any_layout(spec, layout):
    inputs = spec.make_inputs(spec.cases[2], torch.float32, layout)
    contract.check_both(spec, inputs, "fp32")


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_accepts_vectors_whose_numbers_are_apart(spec):
    inputs = spec.make_inputs(spec.cases[3], torch.float32)
    apart = {
        n: torch.stack([t, t * 0], -1)[..., 0] if t.ndim == 1 and t.is_floating_point() else t
        for n, t in inputs.items()
    }
    names = contract.differentiable(spec, inputs)
    with contract.gpu("fp32"):
        results, grads = contract.run(spec, apart), contract.run_backward(spec, apart, names)
    contract.check(spec, results, inputs, "fp32")
    contract.check_gradients(spec, grads, inputs, names, "fp32")


def test_asks_for_no_more_gradients_than_needed():
    """Any subset, in argument order, with the same numbers as all of them."""
    spec = REGISTRY["mlp+dropout"]
    inputs = spec.make_inputs(spec.cases[2], torch.float32)
    names = contract.differentiable(spec, inputs)
    with contract.gpu("fp32"):
        everything = dict(zip(names, contract.run_backward(spec, inputs, names), strict=True))
        for subset in (names[:1], names[1:2], names[3:5], names[5:6], names[-1:]):
            for name, g in zip(subset, contract.run_backward(spec, inputs, subset), strict=True):
                assert torch.equal(g, everything[name]), name


LARGE = {  # more rows than the table's bucket for few, and every tile cut off somewhere
    "norm_linear+gelu": {"M": 600, "K": 128, "N": 272},
    "linear_residual+gamma": {"B": 3, "S": 200, "K": 192, "N": 144},
    "mlp": {"B": 3, "S": 200, "D": 144, "F": 272},
    "layernorm": {"M": 70, "D": 1100},
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", LARGE)
def test_the_settings_of_every_architecture_are_right(name, arch):
    spec, axes = REGISTRY[name], LARGE[name]
    inputs = spec.make_inputs(axes, torch.bfloat16)
    contract.check_both(spec, inputs, "bf16", Interpreter(arch))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_is_the_same_in_any_order_of_programs_and_has_no_races(spec):
    inputs = spec.make_inputs(spec.cases[3], torch.bfloat16)
    names = contract.differentiable(spec, inputs)
    both = []
    for executor in (
        Interpreter("sm_80", races=True),
        Interpreter("sm_80", order="shuffled", seed=1),
    ):
        with contract.gpu("bf16", executor):
            both.append([*contract.run(spec, inputs), *contract.run_backward(spec, inputs, names)])
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("weights", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", ("norm_linear+gelu", "linear_residual", "mlp"))
def test_narrow_weights_with_a_wide_stream(name, weights):
    """As under autocast: x and the residual stream in fp32, matrices in 16 bits."""
    spec = REGISTRY[name]
    inputs = spec.make_inputs(spec.cases[3], torch.float32)
    matrices = [n for n in inputs if n.endswith("weight") and inputs[n].ndim > 1]
    mixed = {n: t.to(weights) if n in matrices else t for n, t in inputs.items()}
    contract.check_both(spec, mixed, {torch.bfloat16: "bf16", torch.float16: "fp16"}[weights])


@pytest.mark.parametrize("bad", (float("nan"), float("inf")), ids=str)
@pytest.mark.parametrize("numerics", ("fp32", "tf32", "bf16"))
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_nan_and_inf_come_out_where_the_reference_has_them(spec, numerics, bad):
    inputs = spec.make_inputs(spec.cases[3], contract.DTYPES[numerics])
    x = next(iter(inputs.values()))
    x.view(-1)[x.numel() // 2] = bad
    with contract.gpu(numerics):
        results = contract.run(spec, inputs)
    contract.check(spec, results, inputs, numerics)


@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_stays_exact_with_outlier_channels(spec, numerics):
    inputs = spec.make_inputs(spec.cases[3], torch.float32)
    x = next(iter(inputs.values()))
    x += 10
    x[..., ::37] *= 100
    inputs = cast(inputs, contract.DTYPES[numerics])
    with contract.gpu(numerics):
        results = contract.run(spec, inputs)
    contract.check(spec, results, inputs, numerics)
