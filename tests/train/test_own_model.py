"""The model that the package brings, on all of CIFAR-10's test images: its card tells the truth."""

import pathlib
import re

import numpy as np
import pytest
import torch

import vitkern
from tests.train import cifar_atlas
from vitkern import trained_file

pytest.importorskip("PIL.Image")
pytest.importorskip("safetensors")

CARD = trained_file.SHIPPED.with_name("README.md").read_text(encoding="utf-8")


def accuracy_of_the_card(precision: str) -> float:
    """In percent, from the row of accuracies."""
    return float(re.search(rf"\*\*([0-9.]+) %\*\* at {precision}", CARD)[1])


@pytest.fixture(scope="module")
def test_images(shared_data) -> tuple[torch.Tensor, torch.Tensor]:
    """CIFAR-10's 10,000 test images as bytes (N, 3, Y, X), and their classes."""
    atlases = shared_data / "cifar10"
    if not (atlases / "cifar10_test.webp").is_file():
        pytest.skip(f"no CIFAR-10 at {atlases}")
    pixels = torch.from_numpy(cifar_atlas.tiles(atlases, "test").copy()).permute(0, 3, 1, 2)
    labels = np.load(atlases / "cifar10_labels.npz")["test"]
    return pixels.contiguous(), torch.from_numpy(labels.astype(np.int64))


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_the_own_model_knows_four_of_five_test_images(test_images, precision):
    """At least 80 %, and what its card says within 0.2 %, as CPUs round differently."""
    images, labels = test_images
    assert images.shape == (10_000, 3, 32, 32) and labels.bincount().tolist() == [1000] * 10
    model = vitkern.accelerate(trained_file.shipped().model, precision)
    with torch.inference_mode():
        found = torch.cat([model(batch).argmax(-1) for batch in images.split(250)])
    accuracy = 100 * (found == labels).double().mean().item()
    print(f"{precision}: {accuracy:.2f} %")
    assert accuracy >= 80
    assert accuracy == pytest.approx(accuracy_of_the_card(precision), abs=0.2)


def test_the_card_names_the_command_and_the_curve():
    assert f"tests/train/{pathlib.Path(__file__).name}" in CARD
    curve = re.search(r"\]\((\S+cifar10\.png)\)", CARD)[1]
    assert (trained_file.SHIPPED.parent / curve).resolve().is_file()
    assert all(accuracy_of_the_card(precision) >= 80 for precision in ("fp32", "bf16", "int8"))
