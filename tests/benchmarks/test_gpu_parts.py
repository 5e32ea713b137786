"""What the GPU benchmarks are made of: clock, graphs, peaks, the machine's facts, the report."""

import json
import subprocess
import types

import pytest
import torch

from benchmarks import pictures, report, rows
from benchmarks.gpu import contract, device, limits, tables
from tests.gpu import pretend_gpu
from vitkern.measure import machine
from vitkern.measure.timing import EventClock, Turns

# ---- Clock, device, limits ----


def test_the_event_clock_empties_the_cache_before_each_call():
    log = []
    scratch = types.SimpleNamespace(zero_=lambda: log.append("flush"))
    clock = EventClock(pretend_gpu.Cuda(), scratch)
    assert clock.passes >= 1 and not clock.warms
    log.clear()
    assert clock.time(lambda: log.append("call")) > 0
    assert log == ["flush"] * clock.passes + ["call"]


def test_turns_by_a_device_clock_give_everybody_the_same_number():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    turns = Turns(functions, EventClock(pretend_gpu.Cuda()))
    turns.settle(0.001)
    turns.run(0.001)
    assert calls.count("a") == calls.count("b") > 3
    assert len(turns.samples["a"]) == len(turns.samples["b"]) >= 3


def test_a_graph_is_captured_after_warm_up():
    gpu, calls = pretend_gpu.Pretended(), []
    replay = gpu.graph(lambda: calls.append(1) or torch.ones(2))
    assert len(calls) == device.GRAPH_WARM_UPS + 1
    assert torch.equal(replay(), torch.ones(2)) and len(calls) == device.GRAPH_WARM_UPS + 1


def properties(name="NVIDIA A100-SXM4-40GB", **changes) -> types.SimpleNamespace:
    found = {**vars(pretend_gpu.Cuda().properties), "name": name, **changes}
    return types.SimpleNamespace(**found)


def test_peaks_are_those_of_the_data_sheets():
    a100 = limits.peaks(properties(), {"capability": "sm_80"})
    assert a100["peak_gflops"]["bf16"] == pytest.approx(312e3, rel=0.01)
    assert a100["peak_gflops"]["tf32"] == pytest.approx(156e3, rel=0.01)
    assert a100["peak_gbs"] == pytest.approx(1555, rel=0.01)
    card = {"multi_processor_count": 128, "clock_rate": 2_520_000}
    geforce = properties("NVIDIA GeForce RTX 4090", **card)
    rates = limits.peaks(geforce, {"capability": "sm_89"})["peak_gflops"]
    assert rates["fp16"] == pytest.approx(165e3, rel=0.01)
    assert rates["fp32"] == pytest.approx(82.6e3, rel=0.01)


def test_an_unknown_peak_is_left_out():
    assert "peak_gflops" not in limits.peaks(properties(), {"capability": "sm_999"})
    silent = properties(clock_rate=0, memory_clock_rate=0)
    assert limits.peaks(silent, {"capability": "sm_80"}) == {}
    told = {"capability": "sm_80", "clocks": {"highest_sm_mhz": 1410.0}}
    assert limits.peaks(silent, told)["peak_gflops"]["bf16"] == pytest.approx(312e3, rel=0.01)
    old = types.SimpleNamespace(name="A100", multi_processor_count=108)  # torch 2.6 tells less
    assert limits.peaks(old, {"capability": "sm_80"}) == {}
    assert limits.shares(1.0, 1.0, "bf16", {}) == {}


def test_fp32_is_set_the_same_for_everybody():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for precision, tf32 in (("tf32", True), ("fp32", False), ("bf16", False)):
        with device.computing_in(precision):
            assert (torch.get_float32_matmul_precision() == "high") is tf32
            assert torch.backends.cudnn.allow_tf32 is tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


# ---- The machine ----


def smi(monkeypatch, out: str, status: int = 0) -> None:
    done = subprocess.CompletedProcess([], status, stdout=out, stderr="")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: done)


def test_driver_and_clocks_come_from_nvidia_smi(monkeypatch):
    smi(monkeypatch, "550.54.15, 1410, 1980, 2619, [N/A]\n")
    assert machine.ask_nvidia_smi("123") == {
        "driver": "550.54.15", "sm_mhz": 1410.0, "highest_sm_mhz": 1980.0, "memory_mhz": 2619.0
    }  # fmt: skip
    smi(monkeypatch, "No devices were found", 6)
    assert machine.ask_nvidia_smi("") == {}


def test_a_device_without_nvidia_smi_is_described(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    facts = machine.describe()
    monkeypatch.setattr(machine, "describe", lambda: facts)
    monkeypatch.setattr(machine.subprocess, "run", missing)
    found = machine.describe_gpu(pretend_gpu.Cuda().properties)
    assert found["capability"] == "sm_80" and "driver" not in found and "clocks" not in found
    assert machine.one_line(found).startswith(f"{pretend_gpu.NAME} (sm_80), ")


@pytest.mark.parametrize("name", ["gpu", "mps", "cpu", "cuda:x"])
def test_other_devices_are_refused(name):
    with pytest.raises(ValueError, match=f"--device {name}: give cpu, cuda or cuda:N"):
        machine.find_gpu(name)


def test_gpus_that_cannot_serve_are_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ValueError, match=r"Tesla T4 has compute capability 7\.5, .* need 8\.0"):
        machine.find_gpu("cuda")
    with pytest.raises(ValueError, match="1 GPUs are visible"):
        machine.find_gpu("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert machine.find_gpu("cuda") == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU is visible"):
        machine.find_gpu("cuda")


# ---- The report ----


def made_up() -> list[dict]:
    """Rows of two kinds, as a run writes them."""
    facts = {**machine.describe(), "device": "A GPU", "capability": "sm_90"}
    facts |= {"runtime": "CUDA 13.0", "triton": "3.7.1", "driver": "580"}
    stamp = {"machine": facts, "commit": "abc", "date": "2026-01-01"}
    found = []
    for kind, name, axes in (("model", "B/16", {"B": 8}), ("op", "layernorm", {"M": 9, "D": 8})):
        for provider, us in (("torch", 4e3), ("native_graph", 1e3), ("native", 2e3)):
            spread = rows.Spread(us, us, us)
            found.append(
                rows.row(
                    kind, name, axes, "bfloat16", provider, spread, 4e3, flops=10**9,
                    bytes_moved=10**6, rounds=3,
                )
            )  # fmt: skip
    return [{**row, **stamp} for row in found]


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Copies of the documents that have a place for a GPU's results."""
    for name in ("README", "PERFORMANCE"):
        page = getattr(report, name)
        copied = tmp_path / page.name
        text = page.read_text()
        if "<!-- gpu:begin -->" not in text:
            text += "\n<!-- gpu:begin -->\n<!-- gpu:end -->\n"
        copied.write_text(text)
        monkeypatch.setattr(report, name, copied)
    monkeypatch.setattr(report, "GPU_PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(report, "CUDA", tmp_path / "cuda.jsonl")
    return tmp_path


def test_documents_say_that_a_gpu_is_unmeasured_until_it_is(pages):
    cpu = [row for path in report.published() for row in rows.read(path)]
    shown = {report.README, report.PERFORMANCE, report.GPU_PAGE} & report.documents(cpu).keys()
    assert report.PERFORMANCE in shown
    for path in shown:
        assert tables.UNMEASURED in report.documents(cpu)[path]
    (pages / "cuda.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made_up()))
    for text in map(report.documents(cpu).get, shown):
        assert tables.UNMEASURED not in text
        assert "**2.00×** (4.00×)" in text and "A GPU (sm_90), driver 580" in text
    text = report.documents(cpu)[report.PERFORMANCE]
    begun = text.index("<!-- results:begin -->")
    assert "A GPU" not in text[begun : text.index("<!-- results:end -->")]


def test_a_gpus_file_alone_leaves_the_cpus_tables(pages):
    before = report.README.read_text()
    wanted = report.gpu_documents({}, made_up())
    assert wanted.keys() == {report.README, report.PERFORMANCE}
    assert wanted[report.README].split("<!-- gpu:begin -->")[0] == before.split("<!-- gpu:")[0]


def test_a_gpus_rows_have_their_own_pictures(tmp_path):
    drawn = pictures.draw(made_up(), tmp_path)
    assert {path.name for path in drawn} == {"gpu_models_bf16.svg", "gpu_ops_bf16.svg"}
    path = tmp_path / "cuda.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made_up()))
    assert report.main([str(path), "--pictures", str(tmp_path / "again")]) == 0
    assert len(list((tmp_path / "again").glob("*.svg"))) == 2


def test_a_joint_error_is_that_of_one_vector():
    g = torch.Generator().manual_seed(0)
    truth = {n: s * torch.randn(7, 5, generator=g).double() for n, s in (("a", 1.0), ("b", 1e-3))}
    got = {n: t + 1e-4 * torch.randn(7, 5, generator=g) for n, t in truth.items()}
    largest = truth["a"].square().mean().sqrt()
    units = {"a": largest, "b": 1e-2 * largest}
    vectors = [torch.cat([(d[n] / units[n]).flatten() for n in "ab"]) for d in (got, truth)]
    assert contract.joint_error(got, truth) == pytest.approx(contract.Error.of(*vectors))
    got["b"][0] = float("nan")
    broken = contract.joint_error(got, truth)
    assert not broken.within(contract.Error(1.0, 1.0), torch.bfloat16)


def test_verdicts_read_well():
    bad = contract.Verdict("mlp", "bf16", None, None, False, "RuntimeError: x")
    assert "FAILED: RuntimeError: x" in bad.line() and bad.row()["passed"] is False
    unchecked = contract.Verdict("mlp", "bf16", None, None, None, "out of memory")
    assert "skipped: out of memory" in unchecked.line()
    assert contract.complaint([unchecked]) == ""
    assert "9 of 10 checks" in contract.complaint([bad] * 9 + [unchecked])
