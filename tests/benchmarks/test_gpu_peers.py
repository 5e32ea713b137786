"""The peers of models on a pretended GPU: timed, missing, failing, or computing another thing."""

import argparse
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu import contract, device, measure, model_peers, tables
from benchmarks.gpu.cases import Case, Selection
from benchmarks.gpu.competitors import training
from tests.gpu import pretend_gpu
from vitkern.contract import Error, on_gpu
from vitkern.precision import PRECISIONS

SMALL = Selection(mode="quick", image_size=32)
EVERYBODY = [*model_peers.PEERS, "native"]


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", {"quick": 0.001})
    yield
    model_peers.original.cache_clear()
    model_peers.timm_original.cache_clear()


def run(kind="model", precision="bf16", batch=1, selection=SMALL) -> measure.Outcome:
    case = Case(kind, "Ti/16", (("B", batch),), precision)
    return measure.measure(case, pretend_gpu.Pretended(), selection, {})


def timed(outcome) -> set[str]:
    return {row["provider"] for row in outcome.rows}


def lost(outcome) -> dict[str, str]:
    return {row["provider"]: row["why"] for row in outcome.skipped}


def stamped(outcome) -> list[dict]:
    facts = {**pretend_gpu.Pretended().facts()}
    stamp = {"machine": facts, "commit": "abc", "date": "2026-01-01"}
    return [{**row, **stamp} for row in (*outcome.rows, *outcome.skipped)]


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins for the optional packages, with their functions' signatures."""
    calls = []

    def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False):
        calls.append("flash_attn")
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale).transpose(1, 2)

    def compile(module, *, ir, inputs, use_explicit_typing, disable_tf32):
        assert ir == "dynamo" and use_explicit_typing and disable_tf32
        calls.append("tensorrt")
        return lambda image: module(image)

    flash = types.SimpleNamespace(flash_attn_qkvpacked_func=flash_attn_qkvpacked_func)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", types.SimpleNamespace(compile=compile))
    return calls


# ---- who takes part ----


def test_everybody_is_timed_or_named_as_missing():
    """flash-attn and TensorRT are not installed on a machine without a GPU."""
    outcome = run()
    for name in EVERYBODY:
        for way in (name, f"{name}_graph"):
            assert (way in timed(outcome)) != (way in lost(outcome)), way
    assert lost(outcome)["flash_attn"] == lost(outcome)["tensorrt_graph"] == "not installed"
    assert lost(outcome)["compile"] == "left out by --compile none"
    shown = tables.summary(stamped(outcome))
    assert shown.count(" not installed |") == 2, "a cell each"
    assert "- flash_attn, flash_attn_graph: not installed (Ti/16 B1 bf16)" in shown
    assert "- compile, compile_graph: left out by --compile none" in shown


def test_optional_packages_are_timed_where_they_are(installed):
    outcome = run()
    for name in ("flash_attn", "tensorrt"):
        assert {name, f"{name}_graph"} <= timed(outcome) and name in installed
    assert "not installed" not in tables.summary(stamped(outcome))


@pytest.mark.full
def test_what_a_package_does_not_do_is_said(installed):
    outcome = run("train", "fp32")
    assert lost(outcome)["flash_attn"] == "flash-attn takes fp16 and bf16 only"
    assert lost(outcome)["tensorrt"] == "TensorRT does not train"
    assert {"torch_graph", "torch_math_graph", "native_graph"} <= timed(outcome)


def test_a_broken_package_is_not_called_missing(monkeypatch):
    def broken(name):
        raise ImportError("libcudart.so.11.0: cannot open shared object file")

    monkeypatch.setattr(model_peers.importlib, "import_module", broken)
    with pytest.raises(ImportError, match="libcudart") as caught:
        model_peers.imported("flash_attn", "flash-attn")
    assert not isinstance(caught.value, device.NotInstalled)

    def needs(name):
        raise ModuleNotFoundError("No module named 'einops'", name="einops")

    monkeypatch.setattr(model_peers.importlib, "import_module", needs)
    with pytest.raises(ModuleNotFoundError, match="einops") as caught:
        model_peers.imported("flash_attn", "flash-attn")
    assert not isinstance(caught.value, device.NotInstalled)


def test_compilers_are_asked_unless_the_run_is_quick():
    given = dict(model=None, batch=None, dtype=None, image_size=224, full=False)

    def chosen(**more):
        return Selection.of(argparse.Namespace(**given, **more)).compile

    assert chosen(compile=None, quick=False) == "max-autotune"
    assert chosen(compile=None, quick=True) == "none"
    assert chosen(compile="default", quick=False) == "default"
    for provider, chose, left in (("compile", "default", False), ("compile_max", "default", True)):
        refused = pytest.raises(device.LeftOut, match="left out by --compile default")
        if left:
            with refused:
                model_peers.refuse_compile(provider, Selection(compile=chose))
        else:
            model_peers.refuse_compile(provider, Selection(compile=chose))


def test_graphs_of_training_steps_do_not_share_memory_with_others():
    case = Case("train", "Ti/16", (("B", 1),), "fp32")
    found = training(case, pretend_gpu.Pretended(), SMALL)
    together, *alone = found.rounds()
    assert not any(name.endswith("_graph") for name in together)
    assert {"native_graph", "compile_max_graph"} <= {name for (name,) in alone}


# ---- who fails, or computes something else ----


def test_a_peer_that_fails_is_a_note_and_the_others_go_on(monkeypatch):
    def fails(provider, wanted):
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(model_peers, "_math", fails)
    outcome = run()
    reason = "RuntimeError: CUDA error: no kernel image is available"
    assert lost(outcome)["torch_math"] == lost(outcome)["torch_math_graph"] == reason
    assert {"torch", "torch_graph", "native", "native_graph"} <= timed(outcome)
    assert not outcome.broken and f"- torch_math, torch_math_graph: {reason}" in (
        tables.text(stamped(outcome))
    )


@pytest.mark.parametrize("wrong", ["off", "nan", "shape"])
def test_a_peer_with_another_result_is_not_timed(monkeypatch, wrong):
    def other(provider, wanted):
        peer = model_peers._plain(provider, wanted)
        change = {
            "off": lambda y: y + 0.3 * y.std(),
            "nan": lambda y: y * float("nan"),
            "shape": lambda y: y[:, :10],
        }[wrong]
        return model_peers.Peer(peer.module, lambda image: change(peer.run(image)))

    monkeypatch.setattr(model_peers, "_math", other)
    outcome = run()
    assert "torch_math" not in timed(outcome) and "torch_math_graph" not in timed(outcome)
    assert "its result is" in lost(outcome)["torch_math"]
    assert {"torch", "native"} <= timed(outcome)


def test_gradients_are_compared_too():
    agreement = measure.Agreement(unit=2**-7)

    def step(gradient):
        function = lambda: torch.ones(())  # noqa: E731
        function.probe = lambda: gradient
        return function

    right = torch.linspace(-1, 1, 50)
    agreement.check(step(right), torch.ones(()))
    agreement.check(step(right * 1.01), torch.ones(()))
    with pytest.raises(measure.Differs, match="another one"):
        agreement.check(step(right.flip(0)), torch.ones(()))
    with pytest.raises(measure.Differs, match="another one"):
        agreement.check(step(right), 2 * torch.ones(()))


def test_without_eager_pytorch_the_first_that_runs_is_compared_with(monkeypatch):
    def too_large(provider, wanted):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(model_peers, "_plain", too_large)
    outcome = run()
    assert lost(outcome)["torch"] == "out of memory"
    assert {"torch_math", "native"} <= timed(outcome)


# ---- fp32's room ----


def verdict(arch, operator, times) -> bool:
    """Whether an error of so many times PyTorch's rms passes the run's check in fp32."""
    torchs = Error(1e-4, 1e-5)
    ours = Error(1e-4, times * 1e-5)
    one = contract.Check("x", "fp32", lambda: [(torchs, ours)], operator=operator)
    gpu = pretend_gpu.Pretended()
    gpu.arch = arch
    return contract.verify(one, gpu).passed


def test_fp32_has_more_room_only_where_it_is_three_tf32_matmuls():
    assert verdict("sm_80", "mlp", 1.2) and verdict("gfx942", "mlp", 1.2)
    assert verdict("sm_80", "mlp", 1.8) and verdict("sm_120", "", 1.8)
    assert not verdict("sm_80", "mlp", 1.95)
    assert not verdict("gfx942", "mlp", 1.8), "AMD multiplies fp32 itself"
    assert not verdict("sm_80", "layernorm", 1.8), "nothing is multiplied"
    for name in ("tf32", "bf16", "fp16"):
        assert on_gpu(PRECISIONS[name], "sm_90").gpu_room == 1.0
