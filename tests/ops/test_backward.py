"""The native backwards, on every instruction set, against autograd of the float64 reference."""

import itertools

import pytest
import torch

from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.ops.test_ops import BF16, FP32, ISAS, SPECS, own_dtype
from vitkern import _C, cpu, cpu_blas
from vitkern.registry import REGISTRY
from vitkern.verification.operators import (
    NOT_NATIVE,
    gradients,
    judge_gradients,
    native_differentiable,
    native_gradients,
)

BLAS = ""  # no instruction set by name: cpu_blas.py, whatever is faster on this CPU


def cases():
    for spec, isa, dtype in itertools.product(SPECS, (BLAS, *ISAS), (FP32, BF16)):
        if isa and cpu.operator_isa(isa, dtype) != isa:
            continue  # another set's kernels, which have their own turn
        for index, axes in enumerate(spec.cases[1:], 1):  # one element is right or wrong by luck
            if all(axes.values()):
                shape = "x".join(map(str, axes.values()))
                name = f"{spec.name}-{isa or 'blas'}-{shape}-{str(dtype)[6:]}"
                yield pytest.param(spec, isa, index, dtype, id=name)


@pytest.mark.parametrize("spec, isa, index, dtype", list(cases()))
def test_gradients_keep_the_contract(spec, isa, index, dtype, monkeypatch):
    monkeypatch.setattr(cpu_blas, "_is_faster", lambda weight: True)
    inputs = spec.make_inputs(spec.cases[index], dtype)
    names = native_differentiable(spec, inputs)
    truths = gradients(spec, inputs, names, torch.float64, spec.op.reference)
    with FixedOrder():
        torchs = gradients(spec, inputs, names, dtype, spec.op.reference)
    ours = native_gradients(spec, inputs, names, isa)
    for name, verdict in judge_gradients(spec, names, ours, truths, torchs, dtype).items():
        assert verdict.passed, f"{name}: {verdict.problem}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS, ids=[s.name for s in SPECS])
def test_gradients_are_those_asked_for(spec, isa):
    """Each alone is bit for bit what it is among all, for any number of threads."""
    inputs = spec.make_inputs(spec.cases[3], own_dtype(isa))
    names = native_differentiable(spec, inputs)
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
    spec, dtype = REGISTRY["attention"], own_dtype(isa)
    inputs = spec.make_inputs({"B": 1, "S": S, "H": 2, "E": 8}, dtype)
    (truth,) = gradients(spec, inputs, ["qkv"], torch.float64, spec.op.reference)
    with FixedOrder():
        (theirs,) = gradients(spec, inputs, ["qkv"], dtype, spec.op.reference)
    (got,) = native_gradients(spec, inputs, ["qkv"], isa)
    (verdict,) = judge_gradients(spec, ["qkv"], [got], [truth], [theirs], dtype).values()
    assert verdict.passed, verdict.problem


@pytest.mark.parametrize("name", sorted(NOT_NATIVE))
def test_what_no_kernel_has_is_the_references(name):
    uses = {"image": "patch_embed", "attention.bias": "attention+bias", "rotary.table": "rotary"}
    argument, spec = name.rpartition(".")[2], REGISTRY[uses[name]]
    inputs = spec.make_inputs(spec.cases[2], FP32)
    assert native_gradients(spec, inputs, [argument]) is None
    (truth,) = gradients(spec, inputs, [argument], torch.float64, spec.op.reference)
    (got,) = gradients(spec, inputs, [argument], FP32, spec.torch_op())
    assert torch.allclose(got.double(), truth, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_many_rows_and_columns(isa):
    """More rows than a slab has steps, more columns than a chunk has rows; all odd."""
    spec, dtype = REGISTRY["linear_residual"], own_dtype(isa)
    inputs = spec.make_inputs({"B": 1, "S": 1801, "K": 37, "N": 2081}, dtype)
    names = ["x", "weight", "bias"]
    truths = gradients(spec, inputs, names, torch.float64, spec.op.reference)
    for got, truth in zip(native_gradients(spec, inputs, names, isa), truths, strict=True):
        error = (got.double() - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt()
        assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.skipif("avx512_vnni" not in cpu.isas(), reason="needs AVX-512 VNNI")
def test_bf16_weights_are_multiplied_in_what_pays(monkeypatch):
    """In bf16 or in integers, unless a set is named or forced: then nothing stands in for it."""
    bf16 = next(row for row in _C.instruction_sets() if row["name"] == "avx512_bf16")
    faster = bf16["runs_here"] and bf16["pays"]
    monkeypatch.delenv("VITKERN_ISA", raising=False)
    if cpu.isa() == "avx512_vnni":  # no AMX
        assert cpu.operator_isa("", BF16) == ("avx512_bf16" if faster else "avx512_vnni")
    assert cpu.operator_isa("avx512_vnni", BF16) == "avx512_vnni"
    assert cpu.operator_isa("avx512_vnni", FP32) == "avx512"
    monkeypatch.setenv("VITKERN_ISA", "avx512_vnni")
    assert cpu.operator_isa("", BF16) == "avx512_vnni"


def test_a_step_s_matmuls_are_torch_s_in_fp32_without_avx512_and_beside_amx(monkeypatch):
    x = torch.ones(1)
    machines = (
        "amx_fp16",
        "amx",
        "avx512_vnni",
        "avx512_bf16",
        "avx512",
        "avx2_int16",
        "avx2",
        "portable",
    )
    for machine in machines:
        monkeypatch.setattr(cpu_blas._C, "features", lambda machine=machine: {"isa": machine})
        for isa in machines:
            cpu_blas._is_faster.cache_clear()
            monkeypatch.setattr(cpu_blas._C, "operator_isa", lambda _, weight, isa=isa: isa)
            beside_amx = machine in ("amx_fp16", "amx") and isa == "avx512"
            assert cpu_blas.serves("", x, x) == (isa in ("avx2", "portable") or beside_amx)
            assert not cpu_blas.serves(isa, x, x)
    cpu_blas._is_faster.cache_clear()


@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("isa", cpu.isas())
def test_weights_choose_the_kernels_of_their_dtype(isa, dtype):
    """Of an engine's set those of another: the bits are that set's."""
    spec = REGISTRY["mlp"]
    inputs = spec.make_inputs(spec.cases[-1], dtype)
    names = native_differentiable(spec, inputs)
    there = cpu.operator_isa(isa, dtype)
    ours, theirs = (native_gradients(spec, inputs, names, isa=name) for name in (isa, there))
    assert all(map(torch.equal, ours, theirs))
    base = next(row["base"] for row in _C.instruction_sets() if row["name"] == isa)
    if base != isa:
        plain = native_gradients(spec, inputs, names, isa=base)
        assert all(map(torch.equal, ours, plain)) == (dtype is FP32)
