"""What the command line's tests read."""

import pathlib

import pytest


@pytest.fixture
def photo(tmp_path) -> pathlib.Path:
    """A photograph of noise, 60 pixels wide and 40 high."""
    image = pytest.importorskip("PIL.Image", reason="classify reads images with Pillow")
    path = tmp_path / "photo.png"
    image.effect_noise((60, 40), 80).convert("RGB").save(path)
    return path
