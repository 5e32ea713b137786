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
    assert "at most 0.02 from eager" in text and "0.01 from itself" in text


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
    found = curves.measure()
    assert all(len(curve) == 8 for curve in found.values())
    assert curves.apart(found)["vitkern"] < 1e-4
    curves.draw(found, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000


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
