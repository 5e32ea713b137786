"""The GPU's attention in the interpreter, forward and backward, against its reference."""

import math

import pytest
import torch

import vitkern.ops  # noqa: F401  (fills the registry)
from vitkern.registry import LAYOUTS, REGISTRY

pytest.importorskip("triton")
from tests.evidence.interpreter import Interpreter
from tests.gpu import contract
from vitkern.gpu import attention, configs
from vitkern.gpu.launch import Recorder, executing
from vitkern.verification.operators import cast

FP32, BF16 = torch.float32, torch.bfloat16
SPECS = [s for s in REGISTRY.values() if s.op.name == "attention"]
PLAIN, BIASED, DROPPED, PACKED = (
    REGISTRY[f"attention{use}"] for use in ("", "+bias", "+dropout", "+offsets")
)
HEAD_DIMS = (32, 40, 64, 72, 80, 88, 96, 128)


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_accepts_any_layout(spec, layout):
    contract.check_both(spec, spec.make_inputs(spec.cases[2], FP32, layout), "fp32")


@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
@pytest.mark.parametrize("E", (1, 8, *HEAD_DIMS, 160, 192, 256))
def test_any_head_dim(E, numerics):
    inputs = PLAIN.make_inputs({"B": 1, "S": 37, "H": 2, "E": E}, contract.DTYPES[numerics])
    contract.check_both(PLAIN, inputs, numerics)


@pytest.mark.parametrize("S", (1, 15, 16, 17, 63, 64, 65, 197))
def test_any_length(S):
    axes = {"B": 2, "S": S, "H": 1, "E": 32}
    for spec, numerics in ((PLAIN, "fp32"), (BIASED, "bf16"), (DROPPED, "fp16")):
        if S > 1 or numerics != "fp32":  # torch gives v itself for a lone key, without rounding
            contract.check_both(spec, spec.make_inputs(axes, contract.DTYPES[numerics]), numerics)


@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_stays_exact_with_outlier_channels(spec, numerics):
    """Large scores, a nearly one-hot softmax: a log-sum-exp in fp32 alone would not suffice."""
    inputs = spec.make_inputs(spec.cases[3], FP32)
    inputs["qkv"][..., 0] *= 8
    contract.check_both(spec, cast(inputs, contract.DTYPES[numerics]), numerics)


@pytest.mark.parametrize("numerics", contract.DTYPES)
def test_what_all_keys_share_cancels(numerics):
    """v and dy with large means: dP is nearly the same for all keys, and dq its small rest."""
    inputs = PLAIN.make_inputs(PLAIN.cases[3], FP32)
    inputs["qkv"][:, :, 2] += 8
    contract.check_both(PLAIN, cast(inputs, contract.DTYPES[numerics]), numerics)


@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
@pytest.mark.parametrize("arch", configs.ARCHS)
def test_settings_of_every_architecture(arch, numerics):
    for E in (64, 80, 128):
        inputs = BIASED.make_inputs({"B": 1, "S": 77, "H": 1, "E": E}, contract.DTYPES[numerics])
        contract.check_both(BIASED, inputs, numerics, Interpreter(arch))


@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_a_sample_does_not_depend_on_its_batch(arch):
    """Many programs get larger tiles than few; the results are the same, bit for bit."""
    inputs = PLAIN.make_inputs({"B": 3, "S": 128, "H": 43, "E": 64}, BF16)
    whole = attend(inputs, 128, arch=arch)
    assert torch.equal(attend({"qkv": inputs["qkv"][-1:]}, 128, arch=arch), whole[-1:])
    assert torch.equal(attend(inputs, 1, arch=arch), whole[:, :1])


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", configs.ARCHS)
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("fp32", "bf16"))
def test_first_queries_alone_are_the_first_rows(arch, dtype):
    inputs = BIASED.make_inputs({"B": 2, "S": 131, "H": 2, "E": 64}, dtype)
    whole = attend(inputs, 131, arch=arch)
    for queries in (1, 5):
        assert torch.equal(attend(inputs, queries, arch=arch), whole[:, :queries])


@pytest.mark.parametrize("shape", ((1, 3), (2, 1), (1, 1)), ids=("batch", "heads", "both"))
@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
def test_bias_broadcasts(shape, numerics):
    inputs = BIASED.make_inputs({"B": 2, "S": 70, "H": 3, "E": 8}, contract.DTYPES[numerics])
    inputs["bias"] = inputs["bias"][: shape[0], : shape[1]]
    contract.check_both(BIASED, inputs, numerics)


def test_bias_of_another_dtype():
    inputs = BIASED.make_inputs({"B": 2, "S": 33, "H": 2, "E": 16}, BF16)
    wide = {**inputs, "bias": inputs["bias"].float()}  # the same numbers
    (y, _), (dqkv, dbias) = contract.check_both(BIASED, inputs, "bf16")
    with contract.gpu("bf16"):
        results = contract.run(BIASED, wide)
        grads = contract.run_backward(BIASED, wide, ["qkv", "bias"])
    assert torch.equal(results[0], y) and torch.equal(grads[0], dqkv)
    assert grads[1].dtype == FP32 and torch.equal(grads[1].to(BF16), dbias)


@pytest.mark.parametrize("needs", (["qkv"], ["bias"]), ids=lambda n: n[0])
def test_gradients_one_at_a_time(needs):
    inputs = BIASED.make_inputs({"B": 2, "S": 33, "H": 2, "E": 16}, FP32)
    with contract.gpu("fp32"):
        alone = contract.run_backward(BIASED, inputs, needs)
        both = contract.run_backward(BIASED, inputs, ("qkv", "bias"))
    assert len(alone) == 1 and torch.equal(alone[0], both[needs == ["bias"]])


def test_gradient_of_a_bias_for_no_samples_is_zero():
    inputs = BIASED.make_inputs({"B": 0, "S": 5, "H": 2, "E": 8}, FP32)
    inputs["bias"] = torch.randn(1, 2, 5, 5)
    with contract.gpu("fp32"):
        dqkv, dbias = contract.run_backward(BIASED, inputs, ("qkv", "bias"))
    assert dqkv.shape == (0, 5, 3, 2, 8) and not dbias.any()


@pytest.mark.parametrize("S", (32, 33))  # four keys of a row share random words, or do not
def test_dropout_of_everything(S):
    inputs = DROPPED.make_inputs({"B": 1, "S": S, "H": 2, "E": 8}, FP32)
    y, lse = torch.full((1, S, 2, 8), math.nan), torch.empty(1, 2, S)
    args = (inputs["qkv"], None, 0.125, 1.0, inputs["seed"], None, True)
    with contract.gpu("fp32"):
        attention.forward({"S": S}, [y, lse], *args)
        (dqkv,) = attention.backward(torch.randn(1, S, 2, 8), args, [lse], frozenset({"qkv"}))
    assert not y.any() and not dqkv.any()


@pytest.mark.parametrize("S", (64, 197))
def test_dropout_masks_are_the_references(S):
    """With v = 1 for one key at a time, y shows which probabilities were kept."""
    inputs = DROPPED.make_inputs({"B": 1, "S": S, "H": 1, "E": 32}, FP32)
    inputs["qkv"][:, :, 2] = torch.eye(S)[None, :, None, :32]
    with contract.gpu("fp32"):
        y, _ = contract.run(DROPPED, inputs)
    truth = DROPPED.op.reference(*DROPPED.arguments(inputs, True))[0]
    assert torch.equal(y == 0, truth == 0) and (y == 0).any()


def test_sequences_do_not_see_each_other():
    """More of them than are looked at together, some empty; each as if it were alone."""
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 4, (150,), generator=g)
    lengths[7], lengths[90] = 70, 0
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
    S = int(offsets[-1])
    inputs = PLAIN.make_inputs({"B": 1, "S": S, "H": 2, "E": 16}, FP32)
    (y, _), _ = contract.check_both(PACKED, {**inputs, "offsets": offsets}, "fp32")
    for i in (0, 7, 149):
        part = inputs["qkv"][:, offsets[i] : offsets[i + 1]]
        alone = attend({"qkv": part}, part.shape[1])
        assert torch.equal(alone, y[:, offsets[i] : offsets[i + 1]])


@pytest.mark.parametrize("scale", (0.0, -0.5, 2.0))
def test_any_scale(scale):
    inputs = PLAIN.make_inputs({"B": 1, "S": 35, "H": 2, "E": 24}, FP32)
    y, lse = torch.full((1, 35, 2, 24), math.nan), torch.empty(1, 2, 35)
    args = (inputs["qkv"], None, scale, 0.0, None, None, True)
    with contract.gpu("fp32"):
        attention.forward({"S": 35}, [y, lse], *args)
        (dqkv,) = attention.backward(
            torch.ones(()).expand(y.shape), args, [lse], frozenset({"qkv"})
        )
    wide = inputs["qkv"].double().requires_grad_()
    truth, levels = PLAIN.op.reference(wide, *args[1:])
    (dtruth,) = torch.autograd.grad(truth.sum(), wide)
    assert torch.allclose(y.double(), truth, atol=1e-5)
    assert torch.allclose(lse.double(), levels, atol=1e-5)
    assert torch.allclose(dqkv.double(), dtruth, atol=1e-4)


def test_heads_beyond_256_channels_are_refused():
    with pytest.raises(ValueError, match="E=257"):
        attention.parts(257)


# ---- numbers that are none -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf), ids=str)
@pytest.mark.parametrize("numerics", ("fp32", "tf32", "bf16"))
@pytest.mark.parametrize("place", ("q", "k", "v"))
def test_nan_and_inf_come_out_where_the_reference_has_them(place, numerics, bad):
    inputs = PLAIN.make_inputs({"B": 2, "S": 70, "H": 2, "E": 32}, contract.DTYPES[numerics])
    inputs["qkv"][1, 33, "qkv".index(place), 1, 3] = bad
    with contract.gpu(numerics):
        results = contract.run(PLAIN, inputs)
    contract.check(PLAIN, results, inputs, numerics)


def test_nan_gradients_come_out_where_the_reference_has_them():
    inputs = PLAIN.make_inputs({"B": 2, "S": 35, "H": 2, "E": 16}, FP32)
    inputs["qkv"][1, 20, 0, 1, 3] = math.nan  # a query
    with contract.gpu("fp32"):
        (got,) = contract.run_backward(PLAIN, inputs, ["qkv"])
    (truth,) = contract.reference_gradients(PLAIN, inputs, ["qkv"], torch.float64)
    assert torch.equal(got.isnan(), truth.isnan()) and 0 < got.isnan().sum() < got.numel()


@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
@pytest.mark.parametrize("hidden", (-math.inf, torch.finfo(BF16).min), ids=("inf", "lowest"))
def test_masked_keys_and_rows(hidden, numerics):
    """A bias that hides keys, whole first tiles of them, and all keys of one row."""
    inputs = BIASED.make_inputs({"B": 1, "S": 150, "H": 2, "E": 16}, contract.DTYPES[numerics])
    inputs["bias"][:, :, :, :140] = hidden
    inputs["bias"][0, 1, 7] = hidden
    with contract.gpu(numerics):
        results = contract.run(BIASED, inputs)
    contract.check(BIASED, results, inputs, numerics)
    assert results[0].isnan().any() == math.isinf(hidden)
    if not math.isinf(hidden):
        contract.check_both(BIASED, inputs, numerics)


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_programs_do_not_depend_on_each_other(spec):
    """Any order gives the same bits, and no program reads or writes what another one writes."""
    inputs = spec.make_inputs(spec.cases[3], FP32)
    names = contract.differentiable(spec, inputs)
    every = []
    for executor in (Interpreter(), Interpreter(order="shuffled", seed=1, races=True)):
        with contract.gpu("fp32", executor):
            every.append([*contract.run(spec, inputs), *contract.run_backward(spec, inputs, names)])
    assert all(torch.equal(a, b) for a, b in zip(*every, strict=True))


def test_nothing_is_saved_without_a_backward():
    inputs = PLAIN.make_inputs({"B": 1, "S": 20, "H": 1, "E": 8}, FP32)
    with contract.gpu("fp32"):
        y, lse = contract.run(PLAIN, inputs, save=False)
        assert lse.numel() == 0 and torch.equal(y, contract.run(PLAIN, inputs)[0])


@pytest.mark.parametrize("arch", configs.ARCHS)
def test_the_launch_table_serves_every_head_dim(arch):
    """Launches on the meta device; heads are padded by less than half of a 16."""
    for E in (1, *range(8, 257, 8)):
        for dtype in (FP32, BF16):
            qkv = torch.empty(2, 50, 3, 2, E, dtype=dtype, device="meta")
            y, lse = torch.empty_like(qkv[:, :, 0]), torch.empty(2, 2, 50, device="meta")
            args = (qkv, None, 1.0, 0.0, None, None, True)
            with executing(Recorder(arch)) as recorder:
                attention.forward({"S": 50}, [y, lse], *args)
                attention.backward(y, args, [lse], frozenset({"qkv"}))
            kernels = [launch.kernel.__name__ for launch in recorder.launches]
            assert kernels == [f"attention_{k}" for k in ("forward", "backward_queries",
                                                          "backward_keys")]  # fmt: skip
    assert [sum(attention.parts(E)) for E in (32, 40, 72, 80, 88, 96, 128)] == [
        32, 48, 80, 80, 96, 96, 128
    ]  # fmt: skip
