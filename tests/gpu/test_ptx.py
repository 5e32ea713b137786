"""Every GPU operator as the compiler wrote it: its PTX for sm_80, emulated, against the reference.

Where the interpreter checks the kernels' source, this checks what Triton made of it: layouts,
pipelines, barriers, masks, conversions. By default each operator runs on one small shape; the cases
of the table, in all dtypes and layouts, and other architectures are `make ptx-check` (marker
ptx_full). Whole blocks with many rows are in test_ptx_block.py.
"""

import dataclasses
import functools

import pytest
import torch

import vitkern.ops  # noqa: F401  (fills the registry)
from vitkern.registry import LAYOUTS, REGISTRY

pytest.importorskip("triton")
from tests.evidence import ptx
from tests.gpu import contract

SPECS = list(REGISTRY.values())
# Whole tiles and a rest in every loop, rows that 128-bit accesses fit.
SMALL = dict(M=70, K=96, N=80, B=1, S=72, H=1, E=64, D=64, F=80, C=3, Y=32, X=32, py=16, px=16)
SMALL |= dict(T=1, O=2)
# What runs by default; the rest is ptx_full.
DEFAULT = {(spec.name, "bf16") for spec in SPECS} | {
    (name, numerics)
    for name in ("attention", "layernorm", "norm_linear+gelu", "linear_residual")
    for numerics in ("fp32", "fp16")
}
DEFAULT_GRADIENTS = {(spec.op.name, "bf16") for spec in SPECS} | {("linear_residual", "fp32")}

# Kernels whose wgmma ptxas runs one by one: Triton overwrites a matmul's left operand, which is in
# registers, before the wait for it.
SERIALISED = {"patch_embed_image_gradient"}


def small(spec):
    return {letter: SMALL[letter] for letter in spec.cases[0]}


def every(default, wanted=lambda spec, axes: True) -> list:
    """(spec, axes, numerics): the small shape, by default or not, and those of the table."""
    found = []
    for spec in SPECS:
        for axes in filter(functools.partial(wanted, spec), (small(spec), *spec.cases)):
            for numerics in contract.DTYPES:
                quick = axes not in spec.cases and (spec.name, numerics) in default
                name = f"{spec.name}-{'x'.join(map(str, axes.values()))}-{numerics}"
                marks = () if quick else pytest.mark.ptx_full
                found.append(pytest.param(spec, axes, numerics, id=name, marks=marks))
    return found


def has_gradient(spec, axes) -> bool:
    """A row of one number is normalised to 0, whatever it is: its gradient is rounding noise."""
    width = {"layernorm": "D", "norm_linear": "K", "mlp": "D"}.get(spec.op.name)
    return width is None or axes[width] > 1


@pytest.mark.parametrize("spec, axes, numerics", every(DEFAULT))
def test_matches_reference(spec, axes, numerics):
    inputs = spec.make_inputs(axes, contract.DTYPES[numerics])
    with contract.gpu(numerics, ptx.PtxExecutor()):
        results = contract.run(spec, inputs)
    contract.check(spec, results, inputs, numerics)


@pytest.mark.parametrize("spec, axes, numerics", every(DEFAULT_GRADIENTS, has_gradient))
def test_gradients_match_reference(spec, axes, numerics):
    inputs = spec.make_inputs(axes, contract.DTYPES[numerics])
    names = contract.differentiable(spec, inputs)
    with contract.gpu(numerics, ptx.PtxExecutor()):
        grads = contract.run_backward(spec, inputs, names)
    contract.check_gradients(spec, grads, inputs, names, numerics)


@pytest.mark.ptx_full
@pytest.mark.parametrize("arch", ("sm_86", "sm_89", "sm_90", "sm_120"))
@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_settings_of_other_architectures(spec, numerics, arch):
    """Their rows of the launch table, their PTX."""
    inputs = spec.make_inputs(small(spec), contract.DTYPES[numerics])
    executor = ptx.PtxExecutor(arch)
    contract.check_both(spec, inputs, numerics, executor)
    assert {one.kernel.__name__ for one in executor.serialised} <= SERIALISED


@pytest.mark.ptx_full
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "packed"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_accepts_any_layout(spec, layout):
    inputs = spec.make_inputs(small(spec), torch.bfloat16, layout)
    names = contract.differentiable(spec, inputs)
    with contract.gpu("bf16", ptx.PtxExecutor()):
        results, grads = contract.run(spec, inputs), contract.run_backward(spec, inputs, names)
    contract.check(spec, results, inputs, "bf16")
    contract.check_gradients(spec, grads, inputs, names, "bf16")


def is_wgmma(i, what):
    return i.op == "wgmma" and i.modifiers[0] == what


SYNCHRONISATION = {
    "barriers": (
        "sm_80", lambda i: i.op == "bar" and "warp" not in i.modifiers, "another warp just",
    ),
    "waits": ("sm_80", lambda i: "wait_group" in i.modifiers, "cp.async has yet to write"),
    "proxy-fences": ("sm_90", lambda i: i.op == "fence", "no fence.proxy.async"),
    "wgmma-fences": ("sm_90", lambda i: is_wgmma(i, "fence"), "without a wgmma.fence"),
    "wgmma-waits": ("sm_90", lambda i: is_wgmma(i, "wait_group"), "wgmma has yet to"),
    "wgmma-commits": ("sm_90", lambda i: is_wgmma(i, "commit_group"), "wgmma has yet to"),
}  # fmt: skip


@pytest.mark.parametrize("what", SYNCHRONISATION)
def test_missing_synchronisation_is_found(what, monkeypatch):
    """A compiled kernel without its barriers, its fences or some of its waits does not pass."""
    arch, missing, complaint = SYNCHRONISATION[what]
    # What ptxas would wait for in the whole kernel, it cannot know of the maimed one.
    monkeypatch.setattr(ptx.executor, "is_serialised", lambda program: False)
    as_compiled = ptx.executor.compiled

    def maimed(variant, arch):
        program, shared = as_compiled(variant, arch)
        nothing = {"op": "membar", "modifiers": ("cta",), "operands": ()}
        code = [
            dataclasses.replace(i, **nothing) if missing(i) else i for i in program.instructions
        ]
        assert code != program.instructions
        return dataclasses.replace(program, instructions=code), shared

    monkeypatch.setattr(ptx.executor, "compiled", maimed)
    spec = REGISTRY["linear_residual"]
    inputs = spec.make_inputs(small(spec), torch.bfloat16)
    executor = ptx.PtxExecutor(arch)
    with contract.gpu("bf16", executor), pytest.raises(ptx.PtxError, match=complaint):
        contract.run(spec, inputs)


def test_every_launch_is_emulated():
    """The executor takes part: nothing falls back to the reference."""
    spec, executor = REGISTRY["layernorm"], ptx.PtxExecutor()
    inputs = spec.make_inputs(small(spec), torch.float32)
    with contract.gpu("fp32", executor):
        contract.run(spec, inputs)
    assert executor.launches
