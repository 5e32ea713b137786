"""The benchmark suite runs, writes rows that the report shows, and guards the published ones."""

import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import conftest, machine, models, pictures, report, roofline, rows, sweeps, tables
from benchmarks import test_models as model_suite
from benchmarks import test_scaling as scaling_suite
from tests.conftest import ROOT
from vitkern import ViT, ViTConfig
from vitkern.measure.timing import Spread, Turns


def published() -> list[str | None]:
    files = (rows.LATEST, rows.SCALING)
    return [path.read_text() if path.exists() else None for path in files]


def bench(path: pathlib.Path, *arguments: str) -> list[dict]:
    """Rows of a real run over a small part of the suite."""
    before = published()
    command = [sys.executable, "-m", "pytest", "--benchmark-only", "--quick", "-q"]
    command += [*arguments, "-p", "no:cacheprovider", "--results", str(path)]
    # pytest-benchmark times nothing in a worker of pytest-xdist: the run is not to know of one
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=own)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "speed relative to the fastest eager" in run.stdout
    assert published() == before
    return rows.read(path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict]:
    path = tmp_path_factory.mktemp("results") / "rows.jsonl"
    return bench(path, "benchmarks/test_operators.py", "-k", "layernorm")


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> list[dict]:
    path = tmp_path_factory.mktemp("results") / "rows.jsonl"
    return bench(path, "benchmarks", "--scaling", "-k", "scaling or memory")


def test_rows_hold_what_a_claim_needs(measured):
    providers = {r["provider"]: r for r in measured if r["kind"] == "op"}
    assert providers.keys() == {"torch", "native"}
    row = providers["native"]
    assert row["us_p20"] <= row["us"] <= row["us_p80"]
    assert row["gflops"] > 0 and row["gbs"] > 0 and row["rounds"] >= 3
    assert row["multiply_gflops"] > row["gflops"]
    assert row["ratio"] == pytest.approx(providers["torch"]["us"] / row["us"], rel=0.01, abs=0.001)
    assert {"cpu", "isa", "threads", "torch"} <= row["machine"].keys()
    assert row["commit"] and row["date"]


def test_limits_are_measured_with_the_rows(measured):
    (limits,) = (r for r in measured if r["kind"] == "limits")
    assert limits["multiply_gflops"].keys() == limits["matmul_gflops"].keys()
    assert list(limits["multiply_gflops"]) == machine.precisions()
    assert all(rate > 0 for rate in limits["multiply_gflops"].values())
    assert limits["read_gbs"].keys() == limits["read_bytes"].keys() == {"L2", "L3", "memory"}
    assert all(rate > 0 for rate in limits["read_gbs"].values())


def test_report_draws_what_it_is_given(measured, tmp_path):
    drawn = pictures.draw(measured, tmp_path)
    assert {p.name for p in drawn} == {"speedup_ops.svg", "roofline.svg"}
    assert all(p.stat().st_size > 1000 for p in drawn)


def row(kind, provider, us, dtype="float32", name="B/16", axes=(("B", 8),), precision=""):
    made = rows.row(
        kind, name, dict(axes), dtype, provider, Spread(us, us, us), 1.0, flops=10**9,
        bytes_moved=10**6, rounds=3, precision=precision, multiply_gflops=1e3,
    )  # fmt: skip
    machine = {"cpu": "a CPU", "threads": 2, "isa": "avx512", "torch": "2"}
    return {**made, "machine": machine, "commit": "abc", "date": "2026-01-01"}


def test_speed_up_is_over_the_fastest_eager():
    fp32 = [row("model", p, us) for p, us in (("torch", 4e3), ("timm", 3e3), ("native", 2e3))]
    assert "**1.50×**" in tables.models(fp32)
    names = (("torch", 9e3), ("torch_fp32", 3e3), ("native", 2e3))
    bf16 = [row("model", p, us, "bfloat16") for p, us in names]
    assert "**1.50×**" in tables.models(bf16)
    assert "beats PyTorch's own bf16" in tables.models(bf16)


def test_missing_or_broken_results_are_a_clear_error(tmp_path, capsys):
    assert report.main([str(tmp_path / "none.jsonl")]) == 2
    assert "run `pytest benchmarks/" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"kind": 1}\n{')
    with pytest.raises(ValueError, match=r"broken\.jsonl:2"):
        rows.read(broken)


def test_missing_markers_are_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match="results:begin"):
        report.between("no markers", "results", "table", tmp_path / "README.md")


def test_contradicting_lengths_are_refused():
    config = SimpleNamespace(getoption={"--quick": True, "--full": True}.__getitem__)
    with pytest.raises(pytest.UsageError, match="contradict"):
        conftest.pytest_configure(config)


# ---- Scaling, memory, roofline ----


@pytest.mark.full
def test_sweeps_carry_their_calibration(swept):
    providers = {r["provider"]: r for r in swept if r["kind"] == "scaling"}
    assert providers.keys() == {"torch", "native"}
    ours, eager = providers["native"], providers["torch"]
    assert ours["axes"].keys() == {"B", "Y", "X", "threads"} and ours["precision"] == "fp32"
    assert ours["multiply_gflops"] == eager["multiply_gflops"] > 0
    assert ours["flops"] < eager["flops"], "the engine leaves rows of the last block out"


@pytest.mark.full
def test_memory_is_that_of_the_forward(swept):
    sizes = {r["provider"]: r for r in swept if r["kind"] == "memory"}
    assert sizes["torch"]["packed_bytes"] == 0
    ours = sizes["native"]
    assert ours["growth_bytes"] >= ours["packed_bytes"] > 0.5 * ours["weights_bytes"]
    assert sizes["torch"]["growth_bytes"] > 0
    assert "MiB" in sweeps.memory_text(swept)


@pytest.mark.full
def test_report_draws_the_sweeps(swept, tmp_path):
    assert {p.name for p in pictures.draw(swept, tmp_path)} == {f"{n}.svg" for n in sweeps.PICTURES}
    assert "| Ti/16 | 224 | 1 |" in sweeps.text(swept)


def made_up_sweeps(precisions=("fp32", "tf32", "bf16")) -> list[dict]:
    found = []
    for point in scaling_suite.points(4):
        axes = {"B": point.batch, "Y": point.size, "X": point.size, "threads": point.threads}
        for precision in precisions:
            dtype = "bfloat16" if precision == "bf16" else "float32"
            for provider, us in (("torch", 4e3), ("native", 2e3)):
                us *= point.batch * point.size / point.threads
                found.append(
                    row("scaling", provider, us, dtype, point.name, axes.items(), precision)
                )
    return found


def test_precisions_of_one_dtype_are_kept_apart(tmp_path):
    found = made_up_sweeps()
    lines = sweeps.curves(found, "B", {"Y": 224, "threads": 4}, "S/16")
    vitkerns = {("native", p) for p in ("fp32", "tf32", "bf16")}
    assert lines.keys() == vitkerns | {("torch", "fp32"), ("torch", "bf16")}
    assert all(len(line) == 6 for line in lines.values())
    assert sweeps.text(found).count("| tf32 |") == len(scaling_suite.points(4))
    assert all(path.stat().st_size > 1000 for path in sweeps.draw(found, tmp_path))


def test_sweeps_count_threads_up_and_time_no_point_twice():
    assert [scaling_suite.thread_counts(n) for n in (1, 2, 6, 8)] == [
        [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]
    ]  # fmt: skip
    points = scaling_suite.points(2)
    assert len(points) == len(set(points))
    assert {p.size for p in points if p.name == "S/16"} == set(scaling_suite.RESOLUTIONS)


def test_roofline_names_the_nearer_limit():
    limits = {
        "kind": "limits", "multiply_gflops": {"fp32": 1e3, "bf16": 1e3},
        "matmul_gflops": {"fp32": 900.0, "bf16": 900.0},
        "read_gbs": {"L2": 100.0, "L3": 50.0, "memory": 20.0},
        "read_bytes": {"L2": 1 << 20, "L3": 32 << 20, "memory": 512 << 20},
    }  # fmt: skip
    found = [row("op", p, us, name="mlp") for p, us in (("torch", 4e3), ("native", 2e3))]
    text = roofline.text([*found, limits])
    assert "| 500 | **50%** | 0.5 | 0% of L2 |" in text  # 1 GFLOP in 2 ms of 1 TFLOPS
    assert roofline.level({"bytes": 40 << 20}, limits) == "memory"


def test_results_without_limits_or_sweeps_say_so():
    found = [row("op", p, us) for p, us in (("torch", 4e3), ("native", 2e3))]
    for text in (roofline.text(found), sweeps.text(found), sweeps.memory_text(found)):
        assert "Not measured yet" in text


def test_engine_work_is_counted_without_the_rows_it_skips():
    sizes = {"image_size": 32, "patch_size": 16, "width": 8, "heads": 2, "mlp_width": 16}
    config = ViTConfig(depth=2, classes=3, **sizes)
    model, S, D, F = ViT(config), 5, 8, 16
    skipped = (S - 1) * (2 * D * D + 2 * S * D + 2 * D * F)  # q and projection, attention, MLP
    assert models.flops(model, 3, 32) - models.engine_flops(model, 3, 32) == 2 * 3 * skipped
    mean = ViT(config.replace(pool="mean"))
    assert models.flops(mean, 3, 32) == models.engine_flops(mean, 3, 32)


def test_a_part_of_a_suite_is_not_published():
    part = [row(kind, "native", 1.0) for kind in ("op", "scaling")]
    assert list(conftest.destinations(part)) == [rows.PARTIAL]


@pytest.mark.parametrize("asked", (False, True))
def test_sweeps_run_only_when_asked(asked):
    items = [SimpleNamespace(module=suite) for suite in (model_suite, scaling_suite)]
    left_out = []
    config = SimpleNamespace(
        getoption={"--scaling": asked}.__getitem__,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    conftest.pytest_collection_modifyitems(config, items)
    kinds = [item.module.KIND for item in items]
    assert kinds == (["model", "scaling"] if asked else ["model"])
    assert [item.module.KIND for item in left_out] == ([] if asked else ["scaling"])


def test_a_retired_provider_takes_no_more_turns():
    calls = []
    turns = Turns({name: lambda name=name: calls.append(name) for name in "ab"})
    turns.retire("a")
    before = calls.count("a")
    spreads = turns.run(0.001)
    assert calls.count("a") == before and len(turns.samples["a"]) == 1
    assert spreads.keys() == {"a", "b"} and len(turns.samples["b"]) >= 3
