"""The kernel interpreter refuses what a GPU does not forgive, and leaves the compiler alone."""

import os
import threading

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice
from triton.runtime.jit import JITFunction

from tests.evidence.interpreter import Interpreter
from tests.evidence.interpreter.numerics import check_version
from tests.evidence.interpreter.test_interpreter import language, product, run
from tests.threads import run_together


@triton.jit
def shift(x, y, n, by, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i + by, mask=i < n, other=0.0), mask=i < n)


@pytest.mark.parametrize("by", [-1, 1, 2**30])
def test_reads_outside_of_an_argument_are_refused(by):
    x, y = torch.arange(100.0), torch.empty(100)
    run(shift, (2,), x=x, y=y, n=100, by=0, B=64)
    assert torch.equal(x, y)
    with pytest.raises(IndexError, match=r"kernel shift, program \(., 0, 0\), reads outside.*`x`"):
        run(shift, (2,), x=x, y=y, n=100, by=by, B=64)


def test_writes_outside_of_an_argument_are_refused():
    with pytest.raises(IndexError, match="writes outside of argument `y`"):
        run(shift, (2,), x=torch.zeros(128), y=torch.empty(100), n=128, by=0, B=64)


def test_writes_to_what_the_launch_only_reads_are_refused():
    with pytest.raises(IndexError, match="writes to `y`, which its launch lists as only read"):
        run(shift, (2,), writes="x", x=torch.zeros(128), y=torch.empty(128), n=128, by=0, B=64)


def test_masked_pointers_are_never_followed():
    y = torch.full((64,), 7.0)
    run(shift, (1,), x=torch.zeros(4), y=y, n=0, by=2**30, B=64)
    assert (y == 7).all()


@triton.jit
def unfilled(x, y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n))


def test_masked_elements_without_other_are_not_zero():
    y = torch.empty(16)
    run(unfilled, (1,), x=torch.ones(4), y=y, n=4, B=16)
    assert (y[:4] == 1).all() and y[4:].isnan().all()


@triton.jit
def same_place(y, own, SPREAD: tl.constexpr):
    tl.store(y + tl.program_id(0) * SPREAD, own + tl.program_id(0))


@triton.jit
def neighbours(x, n):
    i = tl.program_id(0)
    tl.store(x + i, tl.load(x + (i + 1) % n) + 1.0)


def test_programs_that_depend_on_each_other_are_refused():
    watching = Interpreter(races=True)
    run(same_place, (4,), interpreter=watching, y=torch.empty(4), own=1.0, SPREAD=1)
    with pytest.raises(IndexError, match="`y` than another program"):
        run(same_place, (4,), interpreter=watching, y=torch.empty(4), own=1.0, SPREAD=0)
    for order in ("linear", "shuffled"):
        with pytest.raises(IndexError, match="another program"):
            watching = Interpreter(races=True, order=order)
            run(neighbours, (4,), "x", interpreter=watching, x=torch.zeros(4), n=4)


def test_results_do_not_depend_on_the_order_of_programs():
    x, results = torch.randn(1000), []
    for seed, order in enumerate(["linear", "shuffled", "shuffled"]):
        results.append(torch.empty(1000))
        interpreter = Interpreter(order=order, seed=seed)
        run(shift, (16,), interpreter=interpreter, x=x, y=results[-1], n=1000, by=0, B=64)
    assert all(torch.equal(x, y) for y in results)


def test_runs_on_addresses():
    x, y = torch.randn(100).bfloat16(), torch.empty(100).bfloat16()
    values = {"x": ("*bf16", x.data_ptr()), "y": ("*bf16", y.data_ptr())}
    values |= {"n": ("i32", 100), "by": ("i64", 0)}
    Interpreter().run_raw(shift, (2,), values, {"B": 64})
    assert torch.equal(x, y)


# ---- beside the compiler ----


def compiled(kernel, signature, constants):
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]


def language_now():
    modules = (tl, tl.core, tl.math, tl.standard, libdevice, tl.tensor, tl.dtype, JITFunction)
    return [dict(vars(module)) for module in modules]


def test_kernels_stay_compilable_and_triton_stays_itself():
    before, environment = language_now(), dict(os.environ)
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "by": "i32"}
    first = compiled(shift, signature, {"B": 64})
    for by in (0, 1):  # the second run fails
        try:
            run(shift, (2,), x=torch.zeros(128), y=torch.empty(128), n=128, by=by, B=64)
        except IndexError:
            assert by == 1
    assert compiled(shift, signature, {"B": 64}) == first
    pointers = {"x": "*fp32", "codes": "*u8", "bias": "*fp32", "y": "*fp32", "n": "i32"}
    assert "tanh" in compiled(language, pointers, {"absent": None, "B": 32})
    assert dict(os.environ) == environment and not triton.knobs.runtime.interpret
    for old, new in zip(before, language_now(), strict=True):
        assert old.keys() == new.keys()
        assert all(old[name] is new[name] for name in old)


def test_tf32_dots_compile_to_what_is_modelled():
    signature = {"x": "*fp32", "w": "*fp32", "y": "*fp32", "K": "i32"}
    sizes = {"M": 64, "N": 32, "BK": 32}
    ptx = compiled(product, signature, {"P": "tf32", **sizes})
    assert "tf32.tf32" in ptx and "cvt.rna.tf32" not in ptx  # the tensor core truncates
    assert "cvt.rna.tf32" in compiled(product, signature, {"P": "tf32x3", **sizes})


def test_threads_take_turns():
    x, results = torch.randn(2000), [torch.empty(2000) for _ in range(4)]

    def work(y):
        run(shift, (32,), x=x, y=y, n=2000, by=0, B=64)

    threads = [threading.Thread(target=work, args=(y,)) for y in results]
    run_together(threads)
    assert all(torch.equal(x, y) for y in results)


def test_another_triton_is_refused():
    check_version("3.7.1")
    with pytest.raises(ImportError, match=r"needs triton 3\.7, but 3\.8\.0 is installed"):
        check_version("3.8.0")
