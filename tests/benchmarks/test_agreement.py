"""tools/agreement.py: which predictions on photographs the precisions share."""

import pytest
import torch

from benchmarks import agreement as tables
from benchmarks import report, rows
from tests.model.tiny_models import BASE
from tools import agreement
from vitkern import ViT
from vitkern.bench import cases
from vitkern.bench import rows as bench_rows


def test_agreement_is_told_for_every_precision(tmp_path):
    image = pytest.importorskip("PIL.Image")
    model = ViT(BASE.replace(image_size=32, patch_size=4)).eval()
    for name in ("3_a.png", "b.png"):
        image.new("RGB", (40, 36), (200, 30, len(name))).save(tmp_path / name)
    shown = agreement.read(tmp_path, model)
    assert shown.labels.tolist() == [3, -1] and shown.pixels.shape == (2, 3, 32, 32)
    found = agreement.measured(model, shown._replace(pixels=torch.randn(2, 3, 32, 32)), "tiny")
    native = [("native", p) for p in cases.precisions()]
    assert [(row["provider"], row["precision"]) for row in found] == [
        ("torch", "fp32"), ("torch", "bf16"), *native
    ]  # fmt: skip
    assert all(row["photographs"] == 2 and row["named"] == 1 for row in found)
    assert found[0]["same"] == 2 and found[0]["error"] < 1e-5 < found[1]["error"] < 0.1
    lines = tables.lines(found)
    assert "| PyTorch | fp32 | 2 of 2 |" in lines[2] and " of 1 |" in lines[2]


def test_a_run_is_written_and_shown(tmp_path, monkeypatch):
    """The rows go to this class of machines, and the page has the table of every class."""
    found = [
        {"kind": "agreement", "model": "tiny", "photographs": 3, "named": 0, "provider": "native",
         "precision": "int8", "same": 2, "right": 0, "error": 0.0512, **bench_rows.stamp()}
    ]  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- agreement:begin -->\n<!-- agreement:end -->\nb\n")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "PERFORMANCE", page)
    path = agreement.write(found)
    assert path.parent == tmp_path and rows.read(path) == found
    assert "| vitkern | int8 | 2 of 3 | – | 0.051 |" in page.read_text()
    assert page.read_text().startswith("a\n") and page.read_text().endswith("b\n")


def test_agreement_refuses_what_is_not_there(tmp_path, capsys):
    assert agreement.main([str(tmp_path / "none.safetensors"), str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no photographs"):
        agreement.read(tmp_path, ViT(BASE))
