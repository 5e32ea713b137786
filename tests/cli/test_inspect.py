"""`vitkern inspect`: the pictures and the page."""

import base64
import html.parser
import re

import pytest
import torch

from vitkern import ViT, trained_file
from vitkern.__main__ import main

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")
safetensors = pytest.importorskip("safetensors.torch")


def weights(path, **changes):
    torch.manual_seed(0)
    sizes = {"image_size": 32, "width": 32, "heads": 2, "mlp_width": 32, "depth": 2, "classes": 3}
    pixels = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    model = ViT("Ti/16", **{**sizes, "patch_size": 8, **pixels, **changes})
    about = trained_file.metadata(model.config, ["a", "<b>", "c"], 1.0)
    safetensors.save_file(model.state_dict(), path, about)
    return path


def test_draws_every_picture(tmp_path, photo, capsys):
    path, out = weights(tmp_path / "w.safetensors"), tmp_path / "out"
    assert main(["inspect", str(photo), str(photo), "--weights", str(path), "--out", str(out)]) == 0
    names = ["filters", "positions", "distances", "rollout", "heads_0", "heads_1"]
    said = capsys.readouterr().out.split()
    assert said == [str(out / f"{name}.png") for name in names] + [str(out / "index.html")]
    for name in names:
        with PIL.open(out / f"{name}.png") as image:
            lightest, darkest = image.convert("L").getextrema()[::-1]
            assert lightest - darkest > 50, f"{name} shows something"
    page = (out / "index.html").read_text("utf-8")
    html.parser.HTMLParser().feed(page)
    found = re.findall(r"data:image/png;base64,([^']+)'", page)
    assert [base64.b64decode(one) for one in found] == [
        (out / f"{name}.png").read_bytes() for name in names
    ]
    assert "http" not in page, "the page needs nothing else"


@pytest.mark.parametrize(
    "changes",
    [{"stem": "conv", "patch_size": 1}, {"position": "none", "class_token": False, "pool": "mean"}],
)
def test_other_models(tmp_path, photo, changes):
    path, out = weights(tmp_path / "w.safetensors", **changes), tmp_path / "out"
    words = ["inspect", str(photo), "--weights", str(path), "--out", str(out), "--format", "svg"]
    assert main(words) == 0
    assert (out / "positions.svg").exists() == ("position" not in changes)
    assert (out / "heads_0.svg").read_text("utf-8").startswith("<?xml")


def test_without_images_only_the_weights_are_drawn(tmp_path):
    path, out = weights(tmp_path / "w.safetensors"), tmp_path / "out"
    assert main(["inspect", "--weights", str(path), "--out", str(out)]) == 0
    assert {p.name for p in out.iterdir()} == {"filters.png", "positions.png", "index.html"}


@pytest.mark.parametrize(
    "words, said", [(["--layer", "2"], "has 2 blocks"), (["none.jpg"], "no such file")]
)
def test_refuses(tmp_path, capsys, words, said):
    path = weights(tmp_path / "w.safetensors")
    assert main(["inspect", *words, "--weights", str(path), "--out", str(tmp_path / "o")]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint_is_called_that(tmp_path, photo, capsys):
    words = ["inspect", str(photo), "--out", str(tmp_path / "out"), "--weights"]
    (tmp_path / "text.jpg").write_text("hello")
    for path, said in ((tmp_path / "text.jpg", "begins with b'hell'"), (photo, "begins with b'")):
        assert main([*words, str(path)]) == 2
        err = capsys.readouterr().err
        assert f"{path} is no checkpoint: it {said}" in err and "torch.save (.pt" in err
        assert err.count("\n") == 1 and not (tmp_path / "out").exists()
