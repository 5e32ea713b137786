"""The GPU benchmarks without a GPU: the whole run on a pretended one, and every way it can fail."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from benchmarks import rows
from benchmarks.gpu import competitors, device, measure, model_peers, publish, tables
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.cases import Case, Selection, cases
from tests.conftest import ROOT
from tests.gpu import pretend_gpu
from vitkern.__main__ import main as command
from vitkern.cli import bench
from vitkern.engines import cpu as engine
from vitkern.registry import REGISTRY

TINY = ("--quick", "--image-size", "32", "--model", "Ti/16", "--dtype", "fp32")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    """The device is pretended, turns are few, and nothing is cached between tests."""
    pretend_gpu.install(monkeypatch)
    monkeypatch.setattr(measure, "SECONDS", {"quick": 0.001, "default": 0.001, "full": 0.001})
    published = rows.CUDA.exists()
    yield
    assert rows.CUDA.exists() == published, "a test published its results"
    model_peers.original.cache_clear()
    model_peers.timm_original.cache_clear()


def run(tmp_path, *arguments) -> tuple[int, list[dict]]:
    path = tmp_path / "gpu.jsonl"
    status = main([*arguments, "--output", str(path)])
    return status, rows.read(path) if path.exists() else []


def timed(found: list[dict], kind: str) -> dict[str, dict]:
    return {row["provider"]: row for row in found if row["kind"] == kind and "us" in row}


# ---- The whole run ----


# Compiling takes most of the time.
@pytest.mark.parametrize(
    "compiled", ((), pytest.param(("compile", "compile_max"), marks=pytest.mark.full))
)
def test_models_are_checked_timed_and_drawn(compiled, tmp_path, capsys):
    ways = ("--compile", "max-autotune") if compiled else ()
    status, found = run(tmp_path, *TINY, "--batch", "2", *ways)
    said = capsys.readouterr()
    assert status == 0, said.err
    there = ("torch", "torch_math", *compiled, "native")
    everyone = {name + way for name in there for way in ("", "_graph")}
    assert timed(found, "model").keys() >= everyone
    assert timed(found, "train").keys() >= everyone
    ours = timed(found, "model")["native"]
    assert ours["path"] == "engine" and ours["precision"] == "fp32" and ours["axes"] == {"B": 2}
    assert ours["ratio"] > 0 and ours["of_peak_flops"] >= 0 and ours["of_peak_gbs"] >= 0
    assert ours["machine"]["device"] == pretend_gpu.NAME
    assert {"capability", "runtime", "triton", "torch", "memory_gib"} <= ours["machine"].keys()
    checked = [row for row in found if row["kind"] == "verified"]
    assert {row["name"] for row in checked} == {"Ti/16 logits", "Ti/16 gradients"}
    assert all(row["passed"] for row in checked)
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {"gpu_models_fp32.svg", "gpu_training_fp32.svg"}
    assert "(" in said.out and "ok" in said.out and str(tmp_path) in said.out


def test_operators_are_checked_timed_and_drawn(tmp_path, monkeypatch):
    """Two rows of the table stand for all: attention, with its backends, and layernorm."""
    small = {name: REGISTRY[name] for name in ("attention", "layernorm")}
    for module in ("cases", "contract"):
        monkeypatch.setattr(f"benchmarks.gpu.{module}.REGISTRY", small)
    monkeypatch.setattr("benchmarks.gpu.cases.MODELS", ())
    status, found = run(tmp_path, "--quick", "--image-size", "32", "--dtype", "bf16")
    assert status == 0
    for kind in ("op", "op_train"):
        assert {row["name"] for row in found if row["kind"] == kind} == set(small)
    attention = [row for row in found if row["kind"] == "op" and row["name"] == "attention"]
    assert {"torch", "torch_fused", "sdpa_flash", "native"} <= {r["provider"] for r in attention}
    lost = [row for row in found if row["kind"] == "skipped"]
    assert {row["provider"] for row in lost} >= {"sdpa_efficient", "sdpa_cudnn"}, "not on a CPU"
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "gpu_ops_bf16.svg", "gpu_ops_training_bf16.svg"
    }  # fmt: skip
    assert "| layernorm | M197 D192 | bf16 |" in tables.text(found)


def test_a_complete_run_is_what_gets_published():
    assert publish.destination(Selection(), whole=True) == rows.CUDA
    parts = [Selection(mode="quick"), Selection(models=("B/16",)), Selection(batches=(1,))]
    parts += [Selection(precisions=("bf16",)), Selection(image_size=384)]
    assert all(publish.destination(part, whole=True) == rows.PARTIAL for part in parts)
    assert publish.destination(Selection(), whole=False) == rows.PARTIAL
    mine = pathlib.Path("mine.jsonl")
    assert publish.destination(Selection(), False, mine) == mine


def test_the_suite_covers_sizes_and_precisions():
    found = cases(Selection())
    assert len(found) == len(set(found)) == len({case.id for case in found})
    models = {case for case in found if case.kind == "model"}
    assert {case.name for case in models} == {"Ti/16", "S/16", "B/16", "L/16"}
    assert {dict(case.axes)["B"] for case in models} == {1, 8, 64, 256}
    assert {case.precision for case in models} == set(bench.DTYPES)
    uses = {spec.name for spec in REGISTRY.values() if spec.bench}
    for kind in ("op", "op_train"):
        assert {case.name for case in found if case.kind == kind} == uses
    assert {dict(c.axes)["M"] for c in found if c.name == "layernorm"} == {197, 64 * 197}
    assert {c.kind for c in cases(Selection(models=("B/16",)))} == {"model", "train"}


# ---- What can go wrong ----


def test_a_wrong_result_stops_before_anything_is_timed(tmp_path, capsys, monkeypatch):
    right = engine.CpuEngine.logits
    monkeypatch.setattr(engine.CpuEngine, "logits", lambda self, image: 1.001 * right(self, image))
    status, found = run(tmp_path, *TINY)
    said = capsys.readouterr()
    assert status == 1 and not found
    assert "FAILED: 1 of 2 checks, so nothing was timed: Ti/16 logits fp32" in said.err
    assert "TOO LARGE" in said.out


def test_a_kernel_that_raises_is_a_failed_check(tmp_path, capsys, monkeypatch):
    def broken(self, image):
        raise RuntimeError("no binary for this architecture")

    monkeypatch.setattr(engine.CpuEngine, "logits", broken)
    status, found = run(tmp_path, *TINY)
    said = capsys.readouterr()
    assert status == 1 and not found
    assert "FAILED: RuntimeError: no binary for this architecture" in said.out


@pytest.mark.full
def test_who_does_not_fit_into_memory_is_left_out(tmp_path, capsys, monkeypatch):
    def too_large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

    monkeypatch.setattr(model_peers, "timm_twin", too_large)
    status, found = run(tmp_path, *TINY)
    assert status == 0
    there = ("torch", "torch_math", "native")
    assert timed(found, "model").keys() == {n + way for n in there for way in ("", "_graph")}
    lost = {row["provider"]: row["why"] for row in found if row["kind"] == "skipped"}
    assert lost["timm"] == lost["timm_graph"] == "out of memory"
    assert "without timm: out of memory" in capsys.readouterr().out
    assert "- timm, timm_graph: out of memory (Ti/16 B1 fp32" in tables.text(found)


def test_vitkern_itself_out_of_memory_is_a_note_and_the_run_goes_on(tmp_path, monkeypatch):
    """It happens in the turns, after a first call that went well."""
    gpu, calls = pretend_gpu.Pretended(), []

    def grows() -> None:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("CUDA error: out of memory")

    builds = {"torch": lambda: lambda: None, "native": lambda: grows}
    contest = competitors.Contest(builds, 10**6, 10**6, 10**6)
    monkeypatch.setattr(measure, "contest", lambda *_: contest)
    case = Case("model", "Ti/16", (("B", 256),), "bf16")
    outcome = measure.measure(case, gpu, Selection(mode="quick"), {})
    assert [row["provider"] for row in outcome.rows] == ["torch"]
    assert [(r["provider"], r["why"]) for r in outcome.skipped] == [("native", "out of memory")]
    assert not outcome.broken and gpu.cuda.freed
    assert "of_peak_flops" not in outcome.rows[0], "a share of an unknown peak"
    stamped = {"machine": gpu.facts(), "commit": "abc", "date": "2026-01-01"}
    found = [{**row, **stamped} for row in (*outcome.rows, *outcome.skipped)]
    cells = ["0.00 / –", *["–"] * 10]  # PyTorch's, six other peers, vitkern, images/s, speed-ups
    assert f"| Ti/16 | 256 | bf16 | {' | '.join(cells)} |" in tables.text(found)
    assert tables.draw(found, tmp_path) == []


def test_inputs_that_do_not_fit_are_a_note(monkeypatch):
    def too_large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measure, "contest", too_large)
    case = Case("op", "layernorm", (("M", 197), ("D", 192)), "bf16")
    outcome = measure.measure(case, pretend_gpu.Pretended(), Selection(), {})
    assert not outcome.rows and not outcome.broken
    assert outcome.skipped[0]["why"] == "out of memory"


def test_a_lost_device_ends_the_run_and_keeps_the_rows(tmp_path, capsys, monkeypatch):
    lost = []

    def dies(*arguments):
        lost.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def synchronize(self):
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(competitors, "training", dies)
    monkeypatch.setattr(pretend_gpu.Cuda, "synchronize", synchronize)
    status, found = run(tmp_path, *TINY)
    assert status == 1
    assert "native" in timed(found, "model") and not timed(found, "train")
    assert "the device stopped working" in capsys.readouterr().err


def test_a_competitor_may_fail_without_taking_the_device_along(monkeypatch):
    gpu = pretend_gpu.Pretended()
    error = RuntimeError("CUDA error: operation not permitted when stream is capturing\nhint")
    assert gpu.reason(error).endswith("when stream is capturing")


def test_a_graph_with_another_result_ends_the_run(tmp_path, capsys, monkeypatch):
    class Forgetful(pretend_gpu.Pretended):
        def graph(self, function):
            result = function()
            return lambda: result.add(1)

    monkeypatch.setattr(device, "open_device", lambda name: Forgetful())
    status, found = run(tmp_path, *TINY)
    assert status == 1 and not found
    assert "a CUDA graph of vitkern gives another result" in capsys.readouterr().err


def test_plain_pytorch_is_not_timed_under_our_name(tmp_path, capsys, monkeypatch):
    said = "path: fused (x)\nnote: the operators run their PyTorch references on this device"
    monkeypatch.setattr("vitkern.ViT.explain", lambda self, image=None: said)
    status, found = run(tmp_path, *TINY)
    assert status == 1 and not found
    assert "vitkern has no kernels for this" in capsys.readouterr().err


def test_an_interrupted_run_keeps_its_rows(tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(competitors, "training", stop)
    status, found = run(tmp_path, *TINY)
    assert status == 1 and "native" in timed(found, "model")
    assert "FAILED: interrupted" in capsys.readouterr().err


# ---- The command line ----


@without_gpu
def test_without_a_gpu_the_error_is_one_line(capfd):
    assert command(["bench", "--device", "cuda"]) == 2
    said = capfd.readouterr()
    assert said.err.startswith("vitkern bench: --device cuda: ") and said.err.count("\n") == 1


@without_gpu
def test_without_a_gpu_pytest_says_the_same():
    arguments = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only"]
    said = subprocess.run(
        [*arguments, "--device", "cuda"], cwd=ROOT, capture_output=True, text=True
    )
    assert said.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --device cuda: " in said.stderr and "Traceback" not in said.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--batch", "0"), "no list of sizes such as 1,8,64"),
        (("--dtype", "fp8"), "choose from bf16,fp16,tf32,fp32"),
        (("--model", "Q/16"), "unknown variant"),
        (("--image-size", "100"), "100"),
    ],
)
def test_impossible_options_are_refused(capsys, arguments, said):
    try:
        status = main(list(arguments))
    except SystemExit as stop:  # argparse's own
        status = stop.code
    assert status == 2 and said in capsys.readouterr().err


def test_the_command_hands_its_options_over(monkeypatch):
    calls = []
    done = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(bench.subprocess, "run", lambda c, **_: calls.append(c) or done)
    given = "--model S/16,B/16 --batch 1,8 --dtype bf16 --compile --output r.jsonl --quick"
    assert command(["bench", "--device", "cuda:1", *given.split()]) == 1
    (call,) = calls
    assert call[1:5] == ["-m", "benchmarks.gpu", "--device", "cuda:1"]
    for option, value in (("--model", "S/16,B/16"), ("--batch", "1,8"), ("--compile", "default")):
        assert call[call.index(option) + 1] == value
    assert call[call.index("--output") + 1] == str(pathlib.Path("r.jsonl").resolve())


@pytest.mark.parametrize("arguments", [("--dtype", "bf16"), ("--compile",)])
def test_options_of_a_gpu_are_refused_on_the_cpu(capsys, arguments):
    assert command(["bench", *arguments]) == 2
    assert "is for a GPU (--device cuda)" in capsys.readouterr().err


def test_arguments_for_pytest_are_refused_on_a_gpu(capsys):
    assert command(["bench", "--device", "cuda", "--", "-k", "S/16"]) == 2
    assert "pytest benchmarks/ --benchmark-only --device cuda" in capsys.readouterr().err


# ---- pytest ----


def pytest_run(folder: pathlib.Path, *arguments) -> subprocess.CompletedProcess:
    """A run that writes into `folder`, which may hold plugins too."""
    command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "-q"]
    command += ["-p", "tests.gpu.pretend_gpu", "-p", "no:cacheprovider", "--device", "cuda", *TINY]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder)])
    command += ["--output", str(folder / "gpu.jsonl"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=own)


@pytest.mark.full
def test_pytest_runs_the_same_cases(tmp_path):
    said = pytest_run(tmp_path, "-k", "model")
    assert said.returncode == 0, said.stdout + said.stderr
    found = rows.read(tmp_path / "gpu.jsonl")
    assert {"torch", "native_graph", "native"} <= timed(found, "model").keys()
    assert not timed(found, "train"), "-k chose among the cases"
    assert (tmp_path / "gpu_models_fp32.svg").exists()
    assert "test_gpu[model-Ti/16-B1-fp32]" in said.stdout and "rows in" in said.stdout
    assert [row["kind"] for row in found][:2] == ["verified", "limits"]
    assert found[-1]["machine"]["device"] == pretend_gpu.NAME


@pytest.mark.full
def test_pytest_stops_at_a_failed_check(tmp_path):
    (tmp_path / "wrong_engine.py").write_text(
        "from vitkern import engine\n"
        "right = engine.CpuEngine.logits\n"
        "engine.CpuEngine.logits = lambda self, image: 1.001 * right(self, image)\n"
    )
    said = pytest_run(tmp_path, "-p", "wrong_engine", "-k", "model")
    assert said.returncode == 1 and not (tmp_path / "gpu.jsonl").exists()
    assert "FAILED: 1 of 1 checks, so nothing was timed: Ti/16 logits fp32" in said.stdout
