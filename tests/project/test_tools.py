"""The tools that documents name run."""

import shutil

import pytest

from benchmarks.rows import read
from tools import forward_overhead, memory


def test_the_walk_of_a_forward_is_timed(capsys):
    forward_overhead.main(["--model", "Ti/16", "--calls", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ViT.__call__") and all(line.endswith(" us") for line in lines)


@pytest.mark.skipif(not shutil.which("cc"), reason="the tool compiles its driver")
def test_launches_are_timed(capsys):
    pytest.importorskip("triton")
    from tools import launch_overhead

    launch_overhead.main(["--model", "Ti/16", "--batch", "1", "--calls", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith(" us") for line in lines)
    launched, step, share = (line.split()[-2] for line in lines[-3:])
    count = int(lines[-2].split()[2])
    assert count > 200 and lines[-2].startswith("training step, ")
    assert float(step) > count * float(launched) / 2, "the launches are part of it"
    assert float(share) == pytest.approx(float(step) / count, abs=0.1)


@pytest.mark.parametrize("provider, precision", [("eager", "bf16"), ("alone", "int8")])
def test_the_memory_of_each_way_to_hold_a_model_is_measured(provider, precision):
    found = memory.child(provider, "Ti/16", precision)
    assert found.keys() == set(memory.STAGES) and found["peak"] >= found["first"] > 2**20


def test_memory_is_measured_again_for_some_and_kept_of_the_others():
    def row(provider, precision, made, name="L/16"):
        return {"name": name, "provider": provider, "precision": precision, "made": made}

    old = [row("openvino", "int8", 1), row("eager", "fp32", 2), row("alone", "bf16", 3, "B/16")]
    new = [row("openvino", "int8", 4), row("alone", "fp32", 5)]
    assert [(r["provider"], r["made"]) for r in memory.merged(old, new)] == [
        ("eager", 2), ("alone", 5), ("openvino", 4)
    ]  # fmt: skip
    ours = memory.ways(["eager", "alone"])
    assert ours == [
        ("eager", "fp32"),
        ("eager", "bf16"),
        *(("alone", p) for p in ("fp32", "bf16", "int8")),
    ]


def test_the_memory_of_each_way_to_hold_a_model_is_published():
    page = memory.PAGE.read_text()
    assert memory.table(read(memory.RESULTS)) in page, "run python tools/memory.py --write"
