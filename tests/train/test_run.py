"""Whole runs of the smallest model: learning, resuming, stopping, what is written."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.conftest import ROOT
from tests.train.small_sets import write_idx
from vitkern import ViT, trained_file
from vitkern.__main__ import main
from vitkern.train import loop, report, run, state
from vitkern.train.settings import Settings, parse

pytest.importorskip("PIL")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

TINY = {
    "model": {
        "name": "Ti/8", "image_size": 8, "patch_size": 4, "channels": 1, "width": 16, "depth": 2,
        "heads": 2, "mlp_width": 32, "dropout": 0.1, "drop_path": 0.1,
    },
    "data": {"kind": "fashion-mnist", "workers": 0, "flip": 0.5, "crop": "pad", "mixup": 0.2},
    "optimizer": {"lr": 1e-2, "clip": 1.0, "weight_decay": 0.05},
    "schedule": {"epochs": 3, "warmup": 2},
    "loop": {"batch": 20, "ema": 0.9, "label_smoothing": 0.1},
}  # fmt: skip


@pytest.fixture(scope="module")
def clothes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fashion")
    write_idx(folder, 100, 40)
    return folder


def settings(clothes, **changes) -> Settings:
    tables = {name: {**table, **changes.get(name, {})} for name, table in TINY.items()}
    tables["data"]["path"] = str(clothes)
    return parse(tables, "test", "tiny")


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing takes longer than the smallest model trains."""
    monkeypatch.setattr(report, "draw_curves", lambda *_: None)
    monkeypatch.setattr(report, "draw_confusions", lambda *_: None)


def weights(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_run_learns_and_writes_everything(clothes, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    given = settings(
        clothes, model={"dropout": 0.0, "drop_path": 0.0}, schedule={"epochs": 12},
        data={"mixup": 0.0, "crop": "none"}, loop={"ema": 0.0, "tensorboard": True},
    )  # fmt: skip
    result = run.train(given, tmp_path)
    assert result.accuracy > 0.35  # of ten classes
    names = {path.name for path in result.folder.iterdir()}
    assert names == {
        "settings.toml", "summary.txt", "steps.csv", "epochs.csv", "report.txt", "curves.png",
        "confusion.png", "last.safetensors", "model.safetensors", "tensorboard",
    }  # fmt: skip
    assert result.folder.name[:4].isdigit() and result.folder.name.endswith("-tiny")
    text = (result.folder / "report.txt").read_text()
    assert "ankle boot" in text and f"accuracy {result.accuracy:.4f}" in text
    model, classes, _ = trained_file.read(result.folder / "model.safetensors")
    assert classes[9] == "ankle boot" and model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    said = capsys.readouterr()
    assert "parameters" in said.out and "images/s" in said.err


def test_the_model_that_is_written_is_the_one_that_was_evaluated(clothes, tmp_path, no_pictures):
    """The moving average, not the weights that it follows."""
    from safetensors import safe_open

    result = run.train(settings(clothes, schedule={"epochs": 1}), tmp_path)
    model = trained_file.read(result.folder / "model.safetensors").model
    with safe_open(result.folder / state.FILE, "pt") as file:
        for name, value in model.state_dict().items():
            assert torch.equal(value, file.get_tensor(f"ema.{name}")), name
        assert not torch.equal(model.head.weight, file.get_tensor("model.head.weight"))


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="adamw-ema"),
        pytest.param({"optimizer": {"optimizer": "sgd"}}, id="sgd", marks=pytest.mark.full),
        pytest.param(
            {"loop": {"precision": "bf16", "accumulate": 2}},
            id="bf16-accumulated",
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_interrupted_run_ends_with_the_same_bits(
    clothes, tmp_path, monkeypatch, no_pictures, changes
):
    changes.setdefault("loop", {})["save_every"] = 1
    given = settings(clothes, **changes)
    whole = run.train(given, tmp_path)
    step = loop.Trainer._step

    def until_the_eighth(self, parts):
        if self.state.progress.step == 8:  # in the middle of the second of three epochs
            raise Killed
        return step(self, parts)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_step", until_the_eighth)
        with pytest.raises(Killed):
            run.train(given, tmp_path / "killed")
    (folder,) = (tmp_path / "killed").iterdir()
    again = run.train(run.settings_of(folder), tmp_path, resume=folder)
    assert weights(whole.folder) == weights(again.folder)
    assert again.loss == whole.loss
    for name in ("steps.csv", "epochs.csv"):  # all but the times
        rows = [(f / name).read_text().splitlines() for f in (whole.folder, again.folder)]
        cut = [[line.rsplit(",", 1)[0] for line in one] for one in rows]
        assert cut[0] == cut[1]


@pytest.mark.parametrize(
    "kills, workers, epochs, each",
    [
        pytest.param(1, 0, 8, 10, id="once", marks=pytest.mark.slow),
        # Workers are started anew for every epoch, seconds each.
        pytest.param(2, 1, 60, 40, id="twice-with-workers", marks=pytest.mark.full),
    ],
)
def test_a_killed_process_resumes_bit_for_bit(clothes, tmp_path, kills, workers, epochs, each):
    """SIGKILL in the middle of an epoch, `each` steps after the start, against an unbroken run."""
    path = tmp_path / "tiny.toml"
    changes = {"schedule": {"epochs": epochs}, "loop": {"save_every": 1}}
    given = settings(clothes, data={"workers": workers}, **changes)
    path.write_text(given.text(), encoding="utf-8")

    def command(*words: object) -> list[str]:
        return [sys.executable, "-m", "vitkern", "train", *map(str, words)]

    options: dict = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    options["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads of so small a model wait
    subprocess.run(command("--config", path, "--out", tmp_path / "whole"), check=True, **options)
    (whole,) = (tmp_path / "whole").iterdir()
    words: tuple = ("--config", path, "--out", tmp_path / "killed")
    last = 0
    for _ in range(kills):
        process = subprocess.Popen(command(*words), **options)
        step = last
        while step < last + each:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
            files = list((tmp_path / "killed").glob("*/steps.csv"))
            lines = files[0].read_text().splitlines() if files else []
            step = int(lines[-1].split(",")[0]) if len(lines) > 1 else 0
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        (folder,) = (tmp_path / "killed").iterdir()
        words, last = ("--resume", folder), step
    subprocess.run(command("--resume", folder), check=True, **options)
    assert weights(whole) == weights(folder)


def test_a_run_that_diverges_stops_and_keeps_the_last_good_state(
    clothes, tmp_path, monkeypatch, no_pictures
):
    given = settings(clothes)
    losses = loop.Trainer._losses

    def bad_at_seven(self, batch):
        loss, right = losses(self, batch)
        return loss * (float("nan") if self.state.progress.step == 7 else 1), right

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_losses", bad_at_seven)
        with pytest.raises(loop.Diverged, match=r"step 7: the loss is nan .* lower --lr"):
            run.train(given, tmp_path)
    (folder,) = tmp_path.iterdir()
    about, good = checkpoint(folder)
    assert about["step"] == 7 and good
    lower = run.settings_of(folder).changed({"optimizer": {"lr": 1e-3}}, "test")
    assert run.train(lower, tmp_path, resume=folder).folder == folder


def checkpoint(folder) -> tuple[dict, bool]:
    from safetensors import safe_open

    with safe_open(folder / state.FILE, "pt") as file:
        finite = all(file.get_tensor(name).isfinite().all() for name in file.keys())
        return json.loads(file.metadata()["vitkern.progress"]), finite


def test_accumulating_parts_is_the_whole_batch(clothes, tmp_path, no_pictures):
    plain = {"model": {"dropout": 0.0, "drop_path": 0.0}, "schedule": {"epochs": 1}}
    plain["optimizer"] = {"optimizer": "sgd"}  # adam makes steps of rounding errors
    found = []
    for accumulate in (1, 4):
        given = settings(clothes, **plain, loop={"accumulate": accumulate, "ema": 0.0})
        folder = run.train(given, tmp_path).folder
        found.append(trained_file.read(folder / "model.safetensors").model)
    for a, b in zip(*(model.parameters() for model in found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_fine_tuning_resizes_positions_and_starts_from_a_zero_head(clothes, tmp_path):
    from safetensors.torch import save_file

    from vitkern.train import build

    small = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "channels": 1, "patch_size": 4}
    path = tmp_path / "weights.safetensors"
    save_file(ViT("Ti/8", image_size=8, classes=7, **small).state_dict(), path)
    given = parse(
        {"model": {"name": "Ti/8", "image_size": 16, "weights": str(path), **small}}, "test"
    )
    model = build.model(given.model, "half", 10)
    assert model.pos_embed.shape[1] == 17 and not model.head.weight.any()
    with pytest.raises(ValueError, match="has 7 classes, the data 10"):
        keep = given.changed({"model": {"new_head": False}}, "test")
        build.model(keep.model, "half", 10)
    with pytest.raises(ValueError, match=r"wrong shape.*\(1, 5, 16\).*read as Ti/8"):
        other = given.changed({"model": {"options": {"width": 32}}}, "test")
        build.model(other.model, "half", 10)


def test_weight_decay_spares_what_is_no_matrix():
    from vitkern.train import build

    model = ViT("Ti/8", image_size=8, width=16, depth=1, heads=2, mlp_width=32)
    chosen = parse({"optimizer": {"weight_decay": 0.1}}, "x").optimizer
    groups = build.optimizer(chosen, model, model.no_weight_decay()).param_groups
    shapes = {tuple(p.shape) for p in groups[0]["params"]}
    assert groups[0]["weight_decay"] == 0.1 and groups[1]["weight_decay"] == 0
    assert (1, 2, 16) not in shapes and (16, 16) in shapes and all(len(s) > 1 for s in shapes)
    everything = parse({"optimizer": {"weight_decay": 0.1, "decay_all": True}}, "x").optimizer
    assert len(build.optimizer(everything, model, model.no_weight_decay()).param_groups) == 1


def test_the_report_is_right():
    tally = report.Tally(3)
    logits = torch.eye(3)[[0, 0, 1, 2, 2, 2]]
    tally.add(logits, torch.tensor([0, 1, 1, 2, 2, 0]), 6.0)
    assert tally.accuracy == pytest.approx(4 / 6) and tally.mean_loss == 1.0
    assert tally.matrix.tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 2]]
    rows = [line.split() for line in report.text(tally, ("a", "b", "c")).splitlines()]
    assert rows[1] == ["a", "0.5000", "0.5000", "0.5000", "2"]
    assert rows[2] == ["b", "1.0000", "0.5000", "0.6667", "2"]
    assert rows[3] == ["c", "0.6667", "1.0000", "0.8000", "2"]


def test_a_checkpoint_of_another_model_is_refused(clothes, tmp_path, no_pictures):
    result = run.train(settings(clothes, schedule={"epochs": 1}), tmp_path)
    for changes, words in (
        ({"model": {"options": {"width": 32}}}, "has shape"),
        ({"optimizer": {"optimizer": "sgd"}}, "no checkpoint of this model and optimizer"),
    ):
        other = run.settings_of(result.folder).changed(changes, "test")
        with pytest.raises(ValueError, match=words):
            run.train(other, tmp_path, resume=result.folder)
    (result.folder / state.FILE).write_bytes(b"broken")
    with pytest.raises(ValueError, match="damaged"):
        run.train(run.settings_of(result.folder), tmp_path, resume=result.folder)


def test_repeats_report_mean_and_deviation(clothes, tmp_path, capsys, no_pictures):
    path = tmp_path / "tiny.toml"
    path.write_text(settings(clothes, schedule={"epochs": 1}).text(), encoding="utf-8")
    assert (
        main(["train", "--config", str(path), "--out", str(tmp_path / "r"), "--repeats", "2"]) == 0
    )
    said = capsys.readouterr().out
    assert "accuracy of 2 runs: " in said and " ± " in said
    assert len(list((tmp_path / "r").iterdir())) == 2
