"""Kernels that a first forward lacks are compiled by several processes."""

import dataclasses
import sys
import textwrap

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.aot_kernels import plain_variant, refused
from tests.gpu.mocked_driver import vendors_driver
from vitkern.gpu import compiler
from vitkern.gpu.runtime import workers
from vitkern.gpu.runtime.binary import BinaryExecutor
from vitkern.gpu.runtime.cache import Cache

VARIANT = plain_variant("sm_80")


def others(count):
    """Variants like it."""
    return [dataclasses.replace(VARIANT, num_warps=2**i) for i in range(count)]


@dataclasses.dataclass
class Launch:
    variant: object


def executor(folder):
    return BinaryExecutor(
        None, 0, "sm_80", vendors_driver("sm_80"), lambda: 0, torch.device("cpu"),
        Cache("sm_80", folder),
    )  # fmt: skip


@pytest.mark.full
def test_a_plan_s_missing_kernels_are_compiled_at_the_same_time(tmp_path, monkeypatch, capfd):
    """And none here; a second time they are found."""
    monkeypatch.setattr(workers, "wanted", lambda kernels: min(kernels, 2))
    variants = others(3)
    one = executor(tmp_path)
    one.cache.compile = None
    one.prepare([Launch(variant) for variant in variants])
    assert one.cache.compiled == 3 and one.loaded == {"binaries": 0, "cache": 3}
    for variant in variants:
        assert one.cache.find(variant).code == compiler.compile_variant(variant, "sm_80").code
    again = executor(tmp_path)
    again.prepare([Launch(variant) for variant in variants])
    assert again.cache.compiled == 0 and capfd.readouterr().out == ""


@pytest.mark.full
def test_a_kernel_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "wanted", lambda kernels: 2)
    bad = plain_variant("sm_80", refused)
    with pytest.raises(RuntimeError, match=r"(?s)cannot compile refused-.*never compiles.*model.p"):
        Cache("sm_80", tmp_path).compile_all([VARIANT, bad])


@pytest.mark.full
def test_a_compiler_that_crashes_takes_no_user_with_it(tmp_path, monkeypatch):
    """The module of one kernel ends its process, as an assertion inside LLVM would."""
    (tmp_path / "fatal.py").write_text(
        textwrap.dedent("""
            import os, sys
            if "fatal_is_harmless" not in sys.modules:
                os._exit(1)
            import triton

            @triton.jit
            def crash(x, y, D, BLOCK):
                pass
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "fatal_is_harmless", sys)
    import fatal

    bad = dataclasses.replace(VARIANT, kernel=fatal.crash)
    found = dict(workers.compile_all([bad, *others(2)], "sm_80", 1))
    assert found.pop(bad).failure == "the compiler crashed"
    assert [made.failure for made in found.values()] == ["", ""], "a new process has the others"
    with pytest.raises(RuntimeError, match=r"cannot compile crash-.*the compiler crashed"):
        monkeypatch.setattr(workers, "wanted", lambda kernels: 1)
        Cache("sm_80", tmp_path / "kept").compile_all([bad])


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
def test_without_processes_they_are_compiled_here(tmp_path, monkeypatch, executable):
    monkeypatch.setattr(workers, "wanted", lambda kernels: 2)
    monkeypatch.setattr(sys, "executable", executable)
    cache = Cache("sm_80", tmp_path)
    cache.compile_all(others(2))
    assert cache.compiled == 2 and all(map(cache.find, others(2)))


def test_few_kernels_are_not_worth_a_process(monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: range(64), raising=False)
    assert [workers.wanted(n) for n in (0, 1, 7, 8, 12, 99)] == [0, 0, 0, 4, 6, 8]
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: range(1), raising=False)
    assert workers.wanted(99) == 0
