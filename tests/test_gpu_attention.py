"""The GPU's attention in the interpreter, forward and backward, against its reference."""

import math

import pytest
import torch

import vitkern.ops  # noqa: F401  (fills the registry)
from vitkern.registry import LAYOUTS, REGISTRY

pytest.importorskip("triton")
import gpu_contract as contract

from vitkern.gpu import attention, configs
from vitkern.gpu.interpreter import Interpreter
from vitkern.gpu.launch import Recorder, executing

FP32, BF16 = torch.float32, torch.bfloat16
SPECS = [s for s in REGISTRY.values() if s.op.name == "attention"]
PLAIN, BIASED, DROPPED, PACKED = (
    REGISTRY[f"attention{use}"] for use in ("", "+bias", "+dropout", "+offsets")
)
HEAD_DIMS = (32, 40, 64, 72, 80, 88, 96, 128)


def check_both(spec, inputs, numerics, executor=None):
    """Results and gradients of one call within the contract."""
    names = contract.differentiable(spec, inputs)
    with contract.gpu(numerics, executor):
        results = contract.run(spec, inputs)
        grads = contract.run_backward(spec, inputs, names)
    contract.check(spec, results, inputs, numerics)
    contract.check_gradients(spec, grads, inputs, names, numerics)
    return results, grads


def attend(inputs, queries, scale=0.125, arch="sm_80"):
    """y of the first rows, by the launcher that plans use."""
    B, _, _, H, E = inputs["qkv"].shape
    y = inputs["qkv"].new_full((B, queries, H, E), math.nan)
    with executing(Interpreter(arch)):
        attention.attend(
            inputs["qkv"], y, None, inputs.get("bias"), scale, 0.0, None, None, queries
        )
    return y


# ---- the contract --------------------------------------------------------------------------------


@pytest.mark.parametrize("spec, axes, numerics", contract.every_case(SPECS))
def test_matches_reference(spec, axes, numerics):
    inputs = spec.make_inputs(axes, contract.DTYPES[numerics])
    with contract.gpu(numerics):
        results = contract.run(spec, inputs)
    contract.check(spec, results, inputs, numerics)


@pytest.mark.parametrize("spec, axes, numerics", contract.every_case(SPECS))
def test_gradients_match_reference(spec, axes, numerics):
    if axes["S"] > 500 and numerics == "tf32":
        pytest.skip("the interpreter takes seconds, and fp32 has the same tiles")
    inputs = spec.make_inputs(axes, contract.DTYPES[numerics])
    names = contract.differentiable(spec, inputs)
    with contract.gpu(numerics):
        grads = contract.run_backward(spec, inputs, names)
    contract.check_gradients(spec, grads, inputs, names, numerics)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_accepts_any_layout(spec, layout):
    check_both(spec, spec.make_inputs(spec.cases[2], FP32, layout), "fp32")


@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
@pytest.mark.parametrize("E", (1, 8, *HEAD_DIMS, 160, 192, 256))
def test_any_head_dim(E, numerics):
    inputs = PLAIN.make_inputs({"B": 1, "S": 37, "H": 2, "E": E}, contract.DTYPES[numerics])
    check_both(PLAIN, inputs, numerics)


@pytest.mark.parametrize("spec, numerics", ((PLAIN, "fp32"), (BIASED, "bf16"), (DROPPED, "fp16")),
                         ids=("fp32", "bias-bf16", "dropout-fp16"))  # fmt: skip
@pytest.mark.parametrize("S", (1, 15, 16, 17, 63, 64, 65, 197))
def test_any_length(S, spec, numerics):
    inputs = spec.make_inputs({"B": 2, "S": S, "H": 1, "E": 32}, contract.DTYPES[numerics])
    check_both(spec, inputs, numerics)


@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_stays_exact_with_outlier_channels(spec, numerics):
    """Large scores, a nearly one-hot softmax: a log-sum-exp in fp32 alone would not suffice."""
    inputs = spec.make_inputs(spec.cases[3], FP32)
    inputs["qkv"][..., 0] *= 8
    check_both(spec, contract.cast(inputs, contract.DTYPES[numerics]), numerics)


@pytest.mark.parametrize("numerics", contract.DTYPES)
def test_what_all_keys_share_cancels(numerics):
    """v and dy with large means: dP is nearly the same for all keys, and dq its small rest."""
    inputs = PLAIN.make_inputs(PLAIN.cases[3], FP32)
    inputs["qkv"][:, :, 2] += 8
    check_both(PLAIN, contract.cast(inputs, contract.DTYPES[numerics]), numerics)


@pytest.mark.parametrize("arch", configs.ARCHS)
@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
def test_settings_of_every_architecture(arch, numerics):
    for E in (64, 80):
        inputs = BIASED.make_inputs({"B": 1, "S": 77, "H": 1, "E": E}, contract.DTYPES[numerics])
        check_both(BIASED, inputs, numerics, Interpreter(arch))
        many = PLAIN.make_inputs({"B": 1, "S": 77, "H": 129, "E": E}, contract.DTYPES[numerics])
        with contract.gpu(numerics, Recorder(arch)) as recorder:
            contract.run(PLAIN, many)
        few = PLAIN.make_inputs({"B": 1, "S": 77, "H": 1, "E": E}, contract.DTYPES[numerics])
        del recorder, few


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ((1, 3), (2, 1), (1, 1)), ids=("batch", "heads", "both"))
@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
def test_bias_broadcasts(shape, numerics):
    inputs = BIASED.make_inputs({"B": 2, "S": 70, "H": 3, "E": 8}, contract.DTYPES[numerics])
    inputs["bias"] = inputs["bias"][: shape[0], : shape[1]]
    check_both(BIASED, inputs, numerics)
