"""Every script of examples/ runs as a user would run it, only smaller, and prints what it says."""

import re
import runpy
import sys

import pytest

from tests.conftest import ROOT
from vitkern.bench import timm_import

EXAMPLES = ROOT / "examples"


def run(capsys, monkeypatch, name: str, *arguments: object) -> str:
    """What examples/<name>.py prints; in this process, which has torch loaded already."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, capsys.readouterr().out
    return capsys.readouterr().out


def accelerate_timm(run, tmp_path) -> None:
    timm_import.prepare()
    pytest.importorskip("timm", exc_type=ImportError)
    said = run("--seconds", 0.2)
    assert "path: engine" in said
    assert float(re.search(r"logits: (\S+)", said)[1]) < 1e-4
    assert len(re.findall(r"^(?:timm|vitkern) +[\d.]+ ms$", said, re.M)) == 2


def extract_features(run, tmp_path) -> None:
    said = run("--image-size", 32)
    assert "embeddings (4, 192), tokens (4, 5, 192)" in said
    assert "(4, 192, 2, 2)" in said
    assert re.findall(r"nearest to (.+): (.+) \(", said) == [
        ("a", "a, noisy"), ("a, noisy", "a"), ("b", "b, noisy"), ("b, noisy", "b"),
    ]  # fmt: skip


def extract_features_of_files(run, tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    import torch

    from vitkern import ViT

    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for path in paths:
        image.effect_noise((40, 50), 80).convert("RGB").save(path)
    weights = tmp_path / "weights.pt"
    torch.save(ViT("Ti/16", image_size=48, classes=7).state_dict(), weights)
    said = run("--image-size", 32, "--weights", weights, *paths)
    assert "nearest to 0.png: 1.png" in said


def fine_tune(run, tmp_path) -> None:
    said = run("--image-size", 32, "--steps", 25, "--batch", 16)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert losses[0] == pytest.approx(1.0986, abs=1e-3) and losses[-1] < losses[0] / 2
    assert "path: engine" in said
    assert int(re.search(r"right on new images: (\d+)%", said)[1]) > 80


def ahead_of_time(run, tmp_path) -> None:
    pytest.importorskip("triton")
    said = run("--out", tmp_path, "--first", 2, "--jobs", 1)
    assert "failed" not in said
    assert len(re.findall(r"sm_80/\w+-[0-9a-f]{16}\.cubin +\d+ bytes", said)) == 2


def mixed_sizes(run, tmp_path) -> None:
    said = run("--scale", 0.25, "--seconds", 0)
    assert "32 x 64 pixels, 9 tokens" in said and "80 x 64 pixels, 21 tokens" in said
    assert "each image has the logits of a call of its own: True" in said
    assert len(re.findall(r" +[\d.]+ us per token$", said, re.M)) == 4


CHECKS = (
    accelerate_timm, extract_features, extract_features_of_files, fine_tune, ahead_of_time,
    mixed_sizes,
)  # fmt: skip


def script_of(check) -> str:
    return check.__name__.removesuffix("_of_files")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_example_prints_what_it_promises(capsys, monkeypatch, tmp_path, check):
    name = script_of(check)
    check(lambda *arguments: run(capsys, monkeypatch, name, *arguments), tmp_path)


def test_every_example_is_run_and_named():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {script_of(check) for check in CHECKS}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"examples/{name}.py" in readme for name in names)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_says_how_to_run_it(path):
    """Its docstring's command lines name the script and options that it has."""
    text = path.read_text(encoding="utf-8")
    commands = re.findall(rf"^    python examples/{path.stem}\.py(.*)$", text, re.M)
    assert commands and "Prints" in text
    for option in re.findall(r"--[\w-]+", " ".join(commands)):
        assert f'"{option}"' in text, f"{path.name} has no {option}"
