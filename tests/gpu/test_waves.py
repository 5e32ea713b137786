"""Waves and predictions: gates hold, and the tables in docs/gpu.md are those of the code."""

import pytest

pytest.importorskip("triton")
from tools import gpu_prediction, gpu_traffic, gpu_waves
from vitkern.gpu import tiles


def test_gemms_fill_the_gpus_and_the_page_says_so(capsys):
    status = gpu_waves.main(["--check"])
    assert status == 0, f"run python -m tools.gpu_waves\n{capsys.readouterr().out}"


def test_the_gate_sees_a_bad_choice(monkeypatch):
    """The largest tile for everything, as it was for more than 512 rows."""
    monkeypatch.setattr(tiles, "choose", lambda kernel, arch, bits, *_: tiles.fitting(
        kernel, arch, bits)[0])  # fmt: skip
    wrong = list(gpu_waves.complaints())
    assert any("has a tile that is faster" in line for line in wrong)
    assert any("filled" in line for line in wrong)


def test_what_was_filled_before():
    """The shares that made the tiles necessary."""
    for board, batch, percent in (
        ("H100", 3, 18),
        ("H100", 8, 42),
        ("A100", 3, 38),
        ("B200", 8, 37),
    ):
        arch, processors = gpu_waves.BOARDS[board]
        share = gpu_waves.share(gpu_waves.by_rows, arch, processors, 768, 197 * batch)
        assert round(100 * share.filled) == percent


def test_the_page_has_the_present_prediction(capsys):
    status = gpu_prediction.main(["--check"])
    said = capsys.readouterr().out
    assert status == 0, f"run python -m tools.gpu_prediction\n{said}"
    page = gpu_traffic.PAGE.read_text()
    assert "A prediction, not a measurement" in page
    assert said.startswith("| predicted, not measured |")
