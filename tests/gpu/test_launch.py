"""Launches as values: what of them is compiled, and how tuples reach a kernel."""

import dataclasses
import importlib
import pkgutil

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import vitkern.gpu
from tests.evidence.interpreter import Interpreter
from vitkern.engines import trace
from vitkern.gpu.compiler import input_of, target_of
from vitkern.gpu.configs import Row
from vitkern.gpu.launch import Recorder, executing, grouped, launch


@triton.jit(do_not_specialize=["sizes"])
def strided(x, y, sizes, strides, factor, SHAPE: tl.constexpr):
    """y (M, N) contiguous = factor * x by strides, in one tile of SHAPE."""
    BM: tl.constexpr = SHAPE[0]
    BN: tl.constexpr = SHAPE[1]
    M, N = sizes
    row_stride, column_stride = strides
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    mask = (m < M) & (n < N)
    values = tl.load(x + m * row_stride + n * column_stride, mask=mask, other=0.0)
    tl.store(y + m * N + n, values * factor, mask=mask)


def start(executor, x, y):
    with executing(executor):
        launch(
            strided, (1,), Row({}, 4, 1, ""), ("y",),
            x=x, y=y, sizes=tuple(x.shape), strides=x.stride(), factor=2.0, SHAPE=(16, 32),
        )  # fmt: skip


def test_a_tuples_elements_are_arguments_of_their_own():
    x, y = torch.empty(64, 16).T, torch.empty(16, 64)
    start(recorder := Recorder("sm_80"), x, y)
    (one,) = recorder.launches
    elements = ("sizes.0", "sizes.1", "strides.0", "strides.1")
    assert one.variant.signature[2:-1] == tuple((name, "i32") for name in elements)
    assert one.variant.divisible[2:] == ("strides.1",), "1 and 16; sizes promise nothing"
    assert list(one.run_time().values())[2:] == [16, 64, 1, 16, 2.0]
    assert one.variant.constants == (("SHAPE", (16, 32)),)
    source, _ = input_of(one.variant, target_of("sm_80"))
    assert source.signature["strides"] == ("i32", "i32") and (3, 1) in source.attrs


def test_a_kernel_gets_its_tuples():
    x, y = torch.randn(20, 11).T, torch.zeros(11, 20)
    start(Interpreter(), x, y)
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_every_variant_has_a_name_of_its_own(arch):
    """Of all that models ask for, and of those whose sizes need 64 bits."""
    mixtures = ("fp32", "tf32", "bf16", "autocast-bf16")
    found = set()
    for case in trace.cases(("S/16",), mixtures, backward=True):
        for one in trace.launches(case, arch):
            found.add(one.variant)
            numbers = {n for n, v in one.arguments.items() if isinstance(v, int)}
            wide = {n: 2**31 + 16 for n in numbers & {"M", "x_stride", "H"}}
            found.add(dataclasses.replace(one, arguments=one.arguments | wide).variant)
    assert len({variant.name for variant in found}) == len(found) > 100


def test_a_size_of_64_bits_is_in_the_name():
    x, y = torch.empty(16, 64), torch.empty(16, 64)
    start(recorder := Recorder("sm_80"), x, y)
    (one,) = recorder.launches
    wide = dataclasses.replace(one, arguments=one.arguments | {"sizes": (16, 2**31)})
    assert dict(wide.variant.signature)["sizes.1"] == "i64"
    assert wide.variant.name != one.variant.name


def test_elements_are_grouped_again():
    flat = [("x", 1), ("strides.0", 2), ("strides.1", 3), ("S", 4)]
    assert grouped(flat) == {"x": 1, "strides": (2, 3), "S": 4}


def test_no_kernel_takes_more_than_25_arguments():
    modules = [importlib.import_module(f"vitkern.gpu.{m.name}") for m in _modules()]
    found = {v for module in modules for v in vars(module).values() if isinstance(v, JITFunction)}
    counts = {kernel.__name__: len(kernel.arg_names) for kernel in found}
    assert len(counts) > 30
    assert not {name: count for name, count in counts.items() if count > 25}


def _modules():
    return [module for module in pkgutil.iter_modules(vitkern.gpu.__path__) if not module.ispkg]
