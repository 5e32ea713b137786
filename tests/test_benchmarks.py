"""The benchmark suite runs, writes rows that the report shows, and guards the published ones."""

import pathlib
import subprocess
import sys

import pytest

from benchmarks import pictures, report, rows, tables
from vitkern.cli.timing import Spread

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict]:
    """Rows of a real run over one tiny operator row."""
    path = tmp_path_factory.mktemp("results") / "rows.jsonl"
    before = rows.LATEST.read_text() if rows.LATEST.exists() else None
    command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "--quick", "-q"]
    command += ["-k", "layernorm", "-p", "no:cacheprovider", "--results", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "speed relative to the fastest eager" in run.stdout
    assert (rows.LATEST.read_text() if rows.LATEST.exists() else None) == before
    return rows.read(path)


def test_rows_hold_what_a_claim_needs(measured):
    providers = {r["provider"]: r for r in measured if r["kind"] == "op"}
    assert providers.keys() == {"torch", "native"}
    row = providers["native"]
    assert row["us_p20"] <= row["us"] <= row["us_p80"]
    assert row["gflops"] > 0 and row["gbs"] > 0 and row["rounds"] >= 3
    assert row["ratio"] == pytest.approx(providers["torch"]["us"] / row["us"], rel=0.01)
    assert {"cpu", "isa", "threads", "torch"} <= row["machine"].keys()
    assert row["commit"] and row["date"]


def test_limits_are_measured_with_the_rows(measured):
    (limits,) = (r for r in measured if r["kind"] == "limits")
    assert limits["float32_gflops"] > 0 and limits["dram_gbs"] > 0
    assert "torch.mm" in limits["method"]


def test_report_draws_what_it_is_given(measured, tmp_path):
    drawn = pictures.draw(measured, tmp_path)
    assert {p.name for p in drawn} == {"speedup_ops.svg", "roofline.svg"}
    assert all(p.stat().st_size > 1000 for p in drawn)


def row(kind, provider, us, dtype="float32", name="B/16"):
    made = rows.row(kind, name, {"B": 8}, dtype, provider, Spread(us, us, us), 1.0, flops=10**9,
                    bytes_moved=10**6, rounds=3)  # fmt: skip
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
    command = [sys.executable, "-m", "pytest", "benchmarks", "--quick", "--full", "--collect-only"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "contradict" in run.stdout + run.stderr
