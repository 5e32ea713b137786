"""A folder of images by class: folder/cat/1.jpg, or folder/train/cat/1.jpg beside folder/val."""

from __future__ import annotations

import pathlib

import numpy as np

from .images import Images, Parts

ENDINGS = {
    ".jpg", ".jpeg", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm",
    ".jp2", ".tga",
}  # fmt: skip
EVALUATION = ("val", "valid", "validation", "test", "eval")


def recognises(folder: pathlib.Path, kind: str) -> bool:
    root = folder / "train" if (folder / "train").is_dir() else folder
    return any(_files(inside) for inside in _subfolders(root))


def read(folder: pathlib.Path, kind: str) -> Parts:
    if not (folder / "train").is_dir():
        return Parts(_images(folder, None), None)
    train = _images(folder / "train", None)
    held = [folder / name for name in EVALUATION if (folder / name).is_dir()]
    return Parts(train, _images(held[0], train.classes) if held else None)


def _images(root: pathlib.Path, wanted: tuple[str, ...] | None) -> Images:
    """All images below the classes' folders, in the order of their names."""
    found = {inside.name: _files(inside) for inside in _subfolders(root)}
    found = {name: files for name, files in found.items() if files}
    if not found:
        raise ValueError(f"{root}: no folders of images, one a class, are in it")
    classes = tuple(sorted(found)) if wanted is None else wanted
    strange = sorted(set(found) - set(classes))
    if strange:
        raise ValueError(f"{root}: the class {strange[0]!r} is not among the training classes")
    files = [(path, k) for k, name in enumerate(classes) for path in found.get(name, ())]
    labels = np.array([k for _, k in files], np.int64)
    return Images(classes, labels, None, [path for path, _ in files])


def _subfolders(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file()
    )
