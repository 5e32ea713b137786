"""Probes of frozen features: right on data whose answer is known, and the command."""

import csv

import pytest
import torch

from tests.train.small_sets import write_idx
from vitkern import ViT
from vitkern.__main__ import main
from vitkern.train.features import PROBES, Features, few, least_squares

pytest.importorskip("PIL")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")


def clusters(count: int, spread: float, seed: int = 0) -> Features:
    """Points around one centre a class, in 12 dimensions."""
    torch.manual_seed(7)
    centres = torch.randn(4, 12)
    torch.manual_seed(seed)
    labels = torch.arange(count) % 4
    return Features(centres[labels] + spread * torch.randn(count, 12), labels)


@pytest.mark.parametrize("name", PROBES)
def test_probes_tell_clusters_apart(name):
    train, test = clusters(400, 0.3), clusters(200, 0.3, seed=1)
    assert PROBES[name](train, test, 4) > 0.97
    shuffled = Features(train.rows, train.labels[torch.randperm(400)])
    assert PROBES[name](shuffled, test, 4) < 0.6


def test_least_squares_is_the_same_on_both_sides():
    """Few images take Woodbury's side: the same weights as the normal equations'."""
    from vitkern.train import features

    train, test = clusters(8, 0.5), clusters(200, 0.5, seed=1)
    wide = Features(train.rows.repeat(1, 3), train.labels)
    wide_test = Features(test.rows.repeat(1, 3), test.labels)
    assert wide.rows.shape[0] < wide.rows.shape[1]
    X, mean, scale = features._whitened(wide.rows, features.BIAS)
    Y = torch.nn.functional.one_hot(wide.labels, 4).double() * 2 - 1
    gram = X.mT @ X + features.REGULARISATION * torch.eye(X.shape[1], dtype=X.dtype)
    W = torch.linalg.solve(gram, X.mT @ Y)
    scores = features._with_bias((wide_test.rows.double() - mean) / scale, features.BIAS) @ W
    right = (scores.argmax(-1) == test.labels).double().mean().item()
    assert least_squares(wide, wide_test, 4) == right


def test_few_takes_so_many_of_each_class():
    train = clusters(40, 0.3)
    drawn = few(train, 3, seed=0)
    assert torch.bincount(drawn.labels).tolist() == [3] * 4
    assert torch.equal(few(train, 3, seed=0).rows, drawn.rows)
    assert not torch.equal(few(train, 3, seed=1).rows, drawn.rows)
    with pytest.raises(ValueError, match="fewer than 11 a class"):
        few(train, 11, seed=0)


@pytest.fixture
def untrained(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "ti.safetensors"
    save_file(ViT("Ti/8", image_size=32, depth=1).state_dict(), path)
    return path


@pytest.mark.full
def test_the_command_draws_accuracy_against_images(tmp_path, untrained, capsys, monkeypatch):
    from vitkern.config import VARIANTS

    monkeypatch.setitem(VARIANTS, "Ti", (192, 1, 3, 768))
    write_idx(tmp_path / "data", 80, 20)
    words = ["--weights", untrained, "--model", "Ti/8", "--image-size", 32, "--workers", 0]
    words += ["--data", tmp_path / "data", "--shots", "1,4,0", "--repeats", 2, "--out", tmp_path]
    assert main(["probe", *map(str, words)]) == 0
    said = capsys.readouterr().out
    assert "4 a class" in said and "all images" in said and " ± " in said
    (folder,) = tmp_path.glob("*-probe")
    rows = list(csv.DictReader(open(folder / "probe.csv")))
    assert len(rows) == 9 and (folder / "probe.png").stat().st_size > 5000
    best = max(float(row["mean"]) for row in rows if row["each"] == "0")
    assert best > 0.4  # a bright stripe shows even in random features


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--shots", "many"], "whole numbers"),
        (["--probes", "svm"], "there is no 'svm'"),
        (["--repeats", "0"], "at least 1"),
        (["--data", "absent"], "no such folder"),
    ],
    ids=str,
)
def test_wrong_flags_are_refused(untrained, capsys, flags, words):
    assert main(["probe", "--weights", str(untrained), "--model", "Ti/8", *flags]) == 2
    assert words in capsys.readouterr().err
