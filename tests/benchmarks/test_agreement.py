"""tools/agreement.py: which predictions on photographs the precisions share."""

import pytest
import torch

from tests.model.tiny_models import BASE
from tools import agreement
from vitkern import ViT
from vitkern.bench import cases


def test_agreement_is_told_for_every_precision(tmp_path):
    image = pytest.importorskip("PIL.Image")
    model = ViT(BASE.replace(image_size=32, patch_size=4)).eval()
    for name in ("3_a.png", "b.png"):
        image.new("RGB", (40, 36), (200, 30, len(name))).save(tmp_path / name)
    shown = agreement.read(tmp_path, model)
    assert shown.labels.tolist() == [3, -1] and shown.pixels.shape == (2, 3, 32, 32)
    lines = agreement.table(model, shown._replace(pixels=torch.randn(2, 3, 32, 32)))
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| float64", "| PyTorch fp32", *(f"| vitkern {p}" for p in cases.precisions())
    ]  # fmt: skip
    assert "| 2 of 2 |" in lines[2] and " of 1 |" in lines[2]


def test_agreement_refuses_what_is_not_there(tmp_path, capsys):
    assert agreement.main([str(tmp_path / "none.safetensors"), str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no photographs"):
        agreement.read(tmp_path, ViT(BASE))
