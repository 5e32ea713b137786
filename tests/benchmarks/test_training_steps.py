"""python -m benchmarks.training: its contestants, its table, its losses."""

import io
import json
import sys

import pytest
import torch

from benchmarks.training import __main__ as training
from benchmarks.training import curves, tables, worker
from vitkern.bench import timm_import

timm_import.prepare()
pytest.importorskip("timm", exc_type=ImportError)


def step(contestant, us, peak, precision="fp32"):
    return {
        "kind": "training_step", "model": "tiny", "batch": 4, "precision": precision,
        "contestant": contestant, "us": us, "peak_bytes": peak,
    }  # fmt: skip


def test_the_speed_up_is_over_the_faster_of_the_others():
    rows = [step("vitkern", 100e3, 5e8), step("eager", 130e3, 7e8), step("compile", 120e3, 8e8)]
    apart = {"vitkern": 0.02, "eager, other rounding": 0.01}
    rows.append({"kind": "training_loss", "steps": 9, "apart": apart})
    text = tables.text({"avx2": rows})
    assert "| 130 ms | 120 ms | 100 ms | **1.20×** | 700 MB | 800 MB | 500 MB |" in text
    assert "at most 0.02 from eager" in text and "0.01 from itself (one pair" in text
    apart = {"vitkern": {"median": 0.02, "largest": 0.05, "pairs": 4},
             "eager": {"median": 0.01, "largest": 0.06, "pairs": 1}}  # fmt: skip
    rows[-1] = {"kind": "training_loss", "steps": 9, "runs": 2, "apart": apart}
    rows[-1] |= {"commit": "abc", "date": "2026-02-01"}
    text = tables.text({"avx2": rows})
    assert "2 runs of vitkern's are 0.02 from 2 of eager PyTorch's, 0.05 at most" in text
    assert "are 0.01 from each other, 0.06 at most (1 pairs)" in text and "commit abc" in text


def test_bf16_is_compared_with_a_peer_s_faster_precision():
    rows = [step("vitkern", 100e3, 5e8), step("eager", 130e3, 7e8), step("compile", 120e3, 8e8)]
    rows += [step("vitkern", 80e3, 4e8, "bf16"), step("eager", 500e3, 6e8, "bf16")]
    line = tables.lines(rows)[1]
    assert "| bf16 | 130 ms (fp32) | 120 ms (fp32) | 80 ms | **1.50×** |" in line
    rows.append(step("compile", 90e3, 3e8, "bf16"))
    assert "| 90 ms | 80 ms | **1.12×** | 700 MB (fp32) | 300 MB |" in tables.lines(rows)[1]


def test_contestants_begin_with_the_same_loss(monkeypatch, capsys):
    losses = []
    for contestant in ("vitkern", "eager"):
        monkeypatch.setattr(sys, "stdin", io.StringIO('{"do": "step"}\n{"do": "memory"}\n'))
        worker.main(
            {"contestant": contestant, "model": "vit_tiny_patch16_224", "batch": 1,
             "precision": "fp32", "threads": torch.get_num_threads()}
        )  # fmt: skip
        stepped, memory = map(json.loads, capsys.readouterr().out.splitlines())
        assert stepped["seconds"] > 0 and memory["peak"] > memory["before"] > 0
        losses.append(stepped["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_losses_of_vitkern_and_eager_pytorch_are_alike(monkeypatch, tmp_path):
    monkeypatch.setattr(curves, "STEPS", 8)
    monkeypatch.setattr(curves, "RUNS", 2)
    found = curves.measure()
    assert all(len(curve) == 8 for runs in found.values() for curve in runs)
    assert found["eager"][0] != found["eager"][1], "runs differ by a rounding"
    apart = curves.apart(found)
    assert apart["vitkern"].pairs == 4 and apart["eager"].pairs == 1
    assert 0 < apart["vitkern"].median <= apart["vitkern"].largest < 1e-4
    curves.draw(found, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_runs_begin_one_unit_in_the_last_place_apart():
    def weights(run):
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 20)
        curves.move(model, run)
        return model.weight.detach()

    first, second, third = map(weights, range(3))
    assert torch.equal(first, weights(0)) and torch.equal(second, weights(1))
    for moved in (second, third):
        up, down = (torch.nextafter(first, torch.tensor(end)) for end in (torch.inf, -torch.inf))
        assert ((moved == up) | (moved == down)).all()
        assert 0.3 < (moved == up).float().mean() < 0.7
    assert not torch.equal(second, third)


def test_how_far_runs_are_apart_is_of_all_pairs():
    found = curves.apart({"vitkern": [[1.0, 2.0]], "eager": [[1.0, 2.5], [1.0, 2.1], [1.4, 2.0]]})
    assert found["vitkern"] == pytest.approx((0.4, 0.5, 3))
    assert found["eager"] == pytest.approx((0.4, 0.5, 3))


def test_losses_alone_replace_losses_alone(monkeypatch, tmp_path, capsys):
    """Into the file of the class, beside its steps, which keep their commit."""
    path, page = tmp_path / "training-avx2.jsonl", tmp_path / "training.md"
    old = [{**step("vitkern", 1.0, 1), "commit": "old"}, {"kind": "training_loss", "steps": 1}]
    tables_only = {"measure": lambda: {}, "apart": lambda _: {}, "draw": lambda *_: None}
    for name, function in tables_only.items():
        monkeypatch.setattr(curves, name, function)
    monkeypatch.setattr(training.tables, "published", lambda _: path)
    monkeypatch.setattr(training.tables, "text", lambda _: "")
    monkeypatch.setattr(training.report, "training_documents", lambda: {page: "new"})
    monkeypatch.delenv("VITKERN_ISA", raising=False)
    assert training.main(["--curves"]) == 2, "nothing that they could stand beside"
    assert "measure all" in capsys.readouterr().err and not path.exists()
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    assert training.main(["--curves"]) == 0
    kept, added = map(json.loads, path.read_text().splitlines())
    assert kept == old[0] and added["kind"] == "training_loss"
    assert added["steps"] == curves.STEPS and added["commit"] != "old"
    assert page.read_text() == "new"
    before = path.read_text()
    monkeypatch.setenv("VITKERN_ISA", "portable")
    assert training.main(["--curves"]) == 0 and path.read_text() == before


def test_a_library_that_is_not_there_is_refused(tmp_path, capsys):
    missing = tmp_path / "no.so"
    assert training.main(["--preload", str(missing)]) == 2
    assert f"--preload {missing}: no such file" in capsys.readouterr().err


def test_peers_alone_get_the_library(monkeypatch, tmp_path):
    environments = {}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    monkeypatch.setattr(
        training,
        "Worker",
        lambda command, _, environment: environments.update({command[-1]: environment}),
    )
    for name in ("vitkern", "eager"):
        training.started(training.Contestant(name, "bf16"), training.CASES[0], tmp_path / "x.so")
    own, peer = environments.values()
    assert "LD_PRELOAD" not in own and own["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert peer["LD_PRELOAD"].endswith("x.so") and "ONEDNN_MAX_CPU_ISA" not in peer
