"""Every operator, on every backend and instruction set this machine has, against its reference.

The truth is the reference in float64; the yardstick is the error torch itself makes at the same
dtype, in an order of summation that no CPU changes (the rule of FlashAttention's tests, with an rms
bound added).
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch

import vitkern.ops as ops
from tests.evidence.fixed_order.torch_mode import FixedOrder, fixed_backwards
from vitkern import cpu
from vitkern.contract import Error, judge
from vitkern.registry import LAYOUTS, REGISTRY
from vitkern.verification.operators import (
    differentiable,
    gradients,
    judge_results,
    native_results,
    reference_results,
)

FP32, BF16 = torch.float32, torch.bfloat16
SPECS = list(REGISTRY.values())


def small_case(spec):
    """The first case beyond 1x1 that is not empty."""
    return next(axes for axes in spec.cases[1:] if all(axes.values()))


ISAS = cpu.operator_isas()


def run_reference(spec, inputs, dtype, save=True):
    with FixedOrder():
        return reference_results(spec, inputs, dtype, save)


def expected(spec, inputs, dtype):
    """The truth, and what torch makes of it at this dtype."""
    return run_reference(spec, inputs, torch.float64), run_reference(spec, inputs, dtype)


@functools.lru_cache(maxsize=4)
def expected_of_case(name, index, dtype):
    """The same for all instruction sets and layouts of a case, which are tested one by one."""
    spec = REGISTRY[name]
    return expected(spec, spec.make_inputs(spec.cases[index], dtype), dtype)


def check(spec, got, inputs, dtype):
    """Each result of `got` within the contract, NaN and Inf where the truth has them."""
    compare(spec, got, *expected(spec, inputs, dtype), dtype)


def compare(spec, got, truths, torchs, dtype):
    for name, verdict in judge_results(spec, got, truths, torchs, dtype).items():
        assert verdict.passed, f"{spec.name}.{name}: {verdict.problem}"


def every_case():
    """Instruction sets and layouts last, so that neighbours share what is expected."""
    for spec in SPECS:
        cases = itertools.product(range(len(spec.cases)), (FP32, BF16), ISAS, LAYOUTS)
        for index, dtype, isa, layout in cases:
            if cpu.operator_isa(isa, dtype) != isa:
                continue  # another set's kernels, which have their own turn
            shape = "x".join(map(str, spec.cases[index].values()))
            name = f"{spec.name}-{isa}-{shape}-{str(dtype)[6:]}-{layout}"
            yield pytest.param(spec, isa, index, dtype, layout, id=name)


@pytest.mark.parametrize("spec, isa, index, dtype, layout", list(every_case()))
def test_matches_reference(spec, isa, index, dtype, layout):
    inputs = spec.make_inputs(spec.cases[index], dtype, layout)
    compare(
        spec, native_results(spec, inputs, isa), *expected_of_case(spec.name, index, dtype), dtype
    )


def own_dtype(isa):
    """Of weights that a set's own operators multiply by: some have them for bf16 alone."""
    return FP32 if cpu.operator_isa(isa, FP32) == isa else BF16


def every_isa(specs=SPECS):
    return [
        pytest.param(spec, isa, spec.cases[3], id=f"{spec.name}-{isa}")
        for spec, isa in itertools.product(specs, ISAS)
    ]


FIRST = {spec.name: spec.inputs[0] for spec in SPECS}
FLOATS = [s for s in SPECS if not s.name.endswith("uint8")]  # pixels are finite and tame
ALONE = [s for s in FLOATS if not s.name.endswith("offsets")]  # one row of sequences is one sample


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("spec, isa, axes", every_isa(FLOATS))
def test_stays_exact_with_outlier_channels(spec, isa, axes, dtype):
    """Real ViTs have rows with large means and a few channels a hundred times the others."""
    inputs = spec.make_inputs(axes, FP32)
    x = inputs[FIRST[spec.name]]
    if spec.op.name == "attention":  # large scores: softmax is nearly one-hot
        x[..., 0] *= 8
    else:
        x += 10
        x[..., ::37] *= 100
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
    check(spec, native_results(spec, inputs, isa), inputs, dtype)


def multiplies_integers(isa, dtype=BF16):
    """Whether a set's own operators multiply this dtype in integers (docs/numerics.md)."""
    return dtype is BF16 and isa in ("avx512_vnni", "avx_vnni", "avx2_int16")


BAD = pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")), ids=str)


@BAD
@pytest.mark.parametrize("spec, isa, axes", every_isa(ALONE))
def test_nan_and_inf_come_out_where_the_reference_has_them(spec, isa, axes, bad):
    inputs = spec.make_inputs(axes, own_dtype(isa))
    x = inputs[FIRST[spec.name]]
    x.view(-1)[x.numel() // 2] = bad
    got, (truths, torchs) = (
        native_results(spec, inputs, isa),
        expected(spec, inputs, own_dtype(isa)),
    )
    if multiplies_integers(isa):  # NaN where the reference has Inf
        if spec.op.name == "attention":
            return  # below
        truths = [t.where(t.isfinite(), float("nan")) for t in truths]
        got = [t.where(t.isfinite(), float("nan")) for t in got]  # of lone norms and activations
    compare(spec, got, truths, torchs, own_dtype(isa))


@BAD
@pytest.mark.parametrize("isa", [isa for isa in ISAS if multiplies_integers(isa)])
@pytest.mark.parametrize(
    "spec", [s for s in ALONE if s.op.name == "attention"], ids=lambda spec: spec.name
)
def test_integers_of_attention_that_are_not_finite_stay_in_their_head(spec, isa, bad):
    inputs = spec.make_inputs(spec.cases[3], BF16)
    clean = native_results(spec, inputs, isa)
    qkv = inputs["qkv"]  # (B, S, 3, H, E)
    place = np.unravel_index(qkv.numel() // 2, tuple(qkv.shape))
    qkv[place] = bad
    got, (truths, _) = native_results(spec, inputs, isa), expected(spec, inputs, BF16)
    for ours, truth in zip(got, truths, strict=True):
        assert not ours[~truth.isfinite()].isfinite().any()
    apart = torch.ones(qkv.shape[0], qkv.shape[3], dtype=torch.bool)
    apart[place[0], place[3]] = False
    for ours, before in zip(got, clean, strict=True):  # y (B, S, H, E), lse (B, H, S)
        heads = (t.transpose(1, 2) if t.ndim == 4 else t for t in (ours, before))
        assert torch.equal(*(t[apart] for t in heads))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("D", (5, 768, 1024))
def test_a_row_of_equal_numbers_has_no_spread(D, isa):
    """1 / sqrt(eps) is 1000: a mean that is off by one rounding would show."""
    spec = REGISTRY["layernorm"]
    inputs = spec.make_inputs({"M": 7, "D": D}, FP32)
    inputs["x"] = torch.randn(7, 1, generator=torch.Generator().manual_seed(2)).expand(7, D) * 3
    check(spec, native_results(spec, inputs, isa), inputs, FP32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ops.ACTIVATIONS)
def test_activations_keep_nan_and_inf(name, isa):
    dtype = own_dtype(isa)
    plain = REGISTRY["norm_linear"]
    spec = dataclasses.replace(plain, scalars={**plain.scalars, "activation": name})
    inputs = spec.make_inputs({"M": 3, "K": 5, "N": 7}, dtype)
    special = torch.tensor([0.0, -0.0, 3e38, -3e38, float("inf"), float("-inf"), float("nan")])
    inputs["weight"] = torch.zeros(7, 5, dtype=dtype)
    inputs["bias"] = special.to(dtype)
    check(spec, native_results(spec, inputs, isa), inputs, dtype)


@pytest.mark.parametrize("isa", ISAS)
def test_masked_keys_and_rows(isa):
    """-inf in the bias hides a key; a row with no key left is NaN, as in softmax."""
    spec = REGISTRY["attention+bias"]
    inputs = spec.make_inputs({"B": 2, "S": 301, "H": 2, "E": 16}, FP32)
    inputs["bias"][:, :, :, :290] = float("-inf")  # whole first blocks of keys hidden
    inputs["bias"][0, 1, 7] = float("-inf")
    got = native_results(spec, inputs, isa)
    truth = run_reference(spec, inputs, torch.float64)
    assert got[0][0, 7, 1].isnan().all() and got[0].isnan().sum() == 16
    assert torch.equal(got[0].isnan(), truth[0].isnan())
    ok = truth[0].isfinite()
    assert Error.of(got[0][ok], truth[0][ok]).worst < 1e-5


MLPS = [s for s in SPECS if s.op.name == "mlp"]


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("spec", MLPS, ids=[s.name for s in MLPS])
@pytest.mark.parametrize("isa", ISAS)
def test_hidden_columns_of_an_mlp_in_parts(isa, spec, dtype):
    """Where they are many, fc2's sum is cut (csrc/cpu: hidden_columns), with masks and without."""
    inputs = spec.make_inputs({"B": 1, "S": 37, "D": 40, "F": 1700}, dtype)
    check(spec, native_results(spec, inputs, isa), inputs, dtype)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("isa", ISAS)
def test_scores_of_any_size(isa, dtype):
    """Some queries' scores are in the hundreds: those rows are right, others keep their bits."""
    spec = REGISTRY["attention"]
    tame = spec.make_inputs({"B": 1, "S": 300, "H": 2, "E": 24}, dtype)
    wild = {**tame, "qkv": tame["qkv"].clone()}
    wild["qkv"][:, ::7, 0] *= 100
    got = native_results(spec, wild, isa)
    check(spec, got, wild, dtype)
    others = torch.arange(300) % 7 != 0
    assert torch.equal(got[0][:, others], native_results(spec, tame, isa)[0][:, others])


@pytest.mark.parametrize("isa", ISAS)
def test_bias_broadcasts(isa):
    spec = REGISTRY["attention+bias"]
    inputs = spec.make_inputs({"B": 2, "S": 19, "H": 3, "E": 8}, FP32)
    for shape in ((1, 3, 19, 19), (2, 1, 19, 19), (1, 1, 19, 19)):
        part = {**inputs, "bias": inputs["bias"][: shape[0], : shape[1]]}
        check(spec, native_results(spec, part, isa), part, FP32)


@pytest.mark.parametrize("spec, isa, axes", every_isa())
def test_is_deterministic_for_any_number_of_threads(spec, isa, axes):
    inputs = spec.make_inputs(axes, own_dtype(isa))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(native_results(spec, inputs, isa))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "spec, isa, axes",
    every_isa(
        [s for s in SPECS if not {"seed", "offsets"} & set(s.inputs)]
    ),  # masks go by position
)
def test_a_row_does_not_depend_on_its_neighbours(spec, isa, axes):
    """Batch invariance, bit for bit: half of the batch gives half of the result."""
    axes = {**axes, "B": 3} if "B" in axes else {**axes, "M": 61}
    letter = "B" if "B" in axes else "M"
    inputs = spec.make_inputs(axes, own_dtype(isa))
    whole = native_results(spec, inputs, isa, save=False)[0]
    strings = {n: spec.op.axes[n].replace("...", "M").split()[0] for n in inputs}
    last = {n: t[-1:] if strings[n].rstrip("?") == letter else t for n, t in inputs.items()}
    assert torch.equal(native_results(spec, last, isa, save=False)[0], whole[-1:])


@pytest.mark.parametrize("spec", SPECS, ids=[s.name for s in SPECS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_a_well_behaved_torch_op(spec, layout):
    inputs = spec.make_inputs(small_case(spec), FP32, layout)
    for name in spec.op.differentiable:
        if name in inputs and inputs[name].is_floating_point():
            inputs[name].requires_grad_()
    args = spec.arguments(inputs, save=True)
    torch.library.opcheck(spec.torch_op(), tuple(args))
    results = spec.torch_op()(*args)
    y, *saved = results if isinstance(results, tuple) else (results,)
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    needs = [isinstance(a, torch.Tensor) and a.requires_grad for a in args]
    backward = getattr(torch.ops.vitkern, f"{spec.op.name}_backward").default
    tests = ("test_schema", "test_faketensor")  # it has no gradient of its own
    given = (torch.ones_like(y), *plain, [s.detach() for s in saved], needs)
    torch.library.opcheck(backward, given, test_utils=tests)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("spec", SPECS, ids=[s.name for s in SPECS])
def test_gradients_match_reference(spec, dtype):
    """Through the operator, against autograd of the float64 reference, by the same contract."""
    inputs = {
        n: t.to(dtype) if t.is_floating_point() else t
        for n, t in spec.make_inputs(spec.cases[3], FP32).items()
    }
    names = differentiable(spec, inputs)
    truths = gradients(spec, inputs, names, torch.float64, spec.op.reference)
    with FixedOrder():
        torchs = gradients(spec, inputs, names, dtype, spec.op.reference)
    with fixed_backwards():
        ours = gradients(spec, inputs, names, dtype, spec.torch_op())
    for name, got, truth, theirs in zip(names, ours, truths, torchs, strict=True):
        verdict = judge(got, theirs, truth, dtype=dtype, slack=spec.slack)
        assert verdict.passed, f"d{name}: {verdict.problem}"


@pytest.mark.parametrize("spec", SPECS, ids=[s.name for s in SPECS])
def test_gradients_match_finite_differences(spec):
    inputs = spec.make_inputs(small_case(spec), torch.float64)
    names = differentiable(spec, inputs)

    def function(*tensors):
        result = spec.torch_op()(
            *spec.arguments({**inputs, **dict(zip(names, tensors, strict=True))}, True)
        )
        return result if isinstance(result, torch.Tensor) else result[0]

    tensors = [inputs[n].requires_grad_() for n in names]
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
