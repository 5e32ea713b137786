"""Waves and predictions: gates hold, and docs/gpu_prediction.md has what the code computes."""

import pytest

pytest.importorskip("triton")
from tools import gpu_prediction, gpu_waves
from vitkern.gpu import tiles

FEW = (1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32, 45, 64, 90, 128, 181, 256)


def test_gemms_fill_the_gpus_and_the_page_says_so():
    # Fewer batches have more small ones among them: the share of well filled ones is of all.
    assert not [line for line in gpu_waves.complaints(FEW) if "batches from 3 on" not in line]
    assert gpu_waves.table() in gpu_waves.PAGE.read_text(), "run python -m tools.gpu_waves"


@pytest.mark.full
@pytest.mark.parametrize("tool", [gpu_waves, gpu_prediction])
def test_the_page_has_all_of_it_and_the_gates_hold_for_every_batch(tool, capsys):
    status = tool.main(["--check"])
    assert status == 0, f"run python -m {tool.__name__}\n{capsys.readouterr().out}"


def test_the_gate_sees_a_bad_choice(monkeypatch):
    """The largest tile for everything, as it was for more than 512 rows."""
    monkeypatch.setattr(tiles, "choose", lambda kernel, arch, bits, *_: tiles.fitting(
        kernel, arch, bits)[0])  # fmt: skip
    wrong = list(gpu_waves.complaints(FEW))
    assert any("would be better with" in line for line in wrong)
    assert any("filled" in line for line in wrong)


def test_the_gate_beside_the_fullest_tiles_sees_a_batch_that_is_lost(monkeypatch):
    assert not list(gpu_waves.too_few_near("S/16", "H100"))
    chosen = gpu_waves.chosen

    def worse_once(gemm, arch, M, processors):
        """For one image, which fills as much as the fullest tiles would, the largest tile."""
        rows = tiles.fitting(gemm.kernel, arch, 16)
        return rows[0] if M == 197 else chosen(gemm, arch, M, processors)

    monkeypatch.setattr(gpu_waves, "chosen", worse_once)
    (wrong,) = gpu_waves.too_few_near("S/16", "H100")
    assert wrong.endswith("95% of what the fullest tiles fill at 27 batch sizes, 28 are wanted")


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


def test_the_page_has_the_present_prediction():
    page = gpu_waves.PAGE.read_text()
    assert "a prediction, not a measurement" in page
    head, *rows = gpu_prediction.table([8], ["A100"]).splitlines()
    assert head.startswith("| predicted, not measured |") and len(rows) == 2
    assert all(row in page for row in (head, *rows)), "run python -m tools.gpu_prediction"
    _, _, *rows = gpu_prediction.beside_fullest([("H100", 3)]).splitlines()
    assert len(rows) == 1 and rows[0] in page, "run python -m tools.gpu_prediction"
