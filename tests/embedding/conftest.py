"""A tiny model and a folder of noise."""

import json
import pathlib

import pytest
import torch

import vitkern
from vitkern import ViT
from vitkern.__main__ import main

PIL = pytest.importorskip("PIL.Image", reason="embed reads images with Pillow")
pytest.importorskip("safetensors")


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> pathlib.Path:
    """A model of two blocks on 16 x 16 pixels, with a class token and a register."""
    torch.manual_seed(0)
    model = ViT("Ti/16", image_size=16, patch_size=8, width=64, heads=1, mlp_width=64, depth=2,
                classes=3, registers=1, mean=(0.5,) * 3, std=(0.25,) * 3)  # fmt: skip
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    vitkern.save(model, path)
    return path


def noise(folder: pathlib.Path, count: int) -> pathlib.Path:
    """Images of noise, the i-th of seed i."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        pixels = torch.randint(0, 256, (20, 24, 3), generator=torch.Generator().manual_seed(i))
        PIL.fromarray(pixels.to(torch.uint8).numpy()).save(folder / f"{i:03}.png")
    return folder


@pytest.fixture
def photos(tmp_path) -> pathlib.Path:
    return noise(tmp_path / "photos", 11)


@pytest.fixture
def run(capsys):
    """(status, stdout, stderr) of a command."""

    def call(*words):
        status = main([str(word) for word in words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture
def done(run):
    """The last line of JSON of a `vitkern embed` that must succeed."""

    def call(*words, status=0):
        found, out, err = run("embed", *words, "--json")
        assert found == status, err
        return json.loads(out.splitlines()[-1])

    return call
