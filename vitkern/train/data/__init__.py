"""Labelled images from the formats that data sets come in, as one kind of record.

A file per format, each with `recognises(folder, kind)` and `read(folder, kind)`.
"""

from __future__ import annotations

import importlib
import pathlib

from .images import Images, Parts, first_of_each_class, split

KINDS = {
    "digits": "digits",
    "cifar10": "cifar",
    "cifar100": "cifar",
    "fashion-mnist": "idx",
    "folder": "folder",
}
__all__ = ["KINDS", "Images", "Parts", "first_of_each_class", "open_data", "split"]


def open_data(kind: str, path: str, eval_share: float = 0.2, seed: int = 0) -> Parts:
    """Training and evaluation images of a data set; a part of the first where there is no second.

    kind: one of KINDS, or "" to recognise it by the files in the folder.
    """
    if kind and kind not in KINDS:
        raise ValueError(f"there is no data of kind {kind!r:.80}: one of {', '.join(KINDS)}")
    folder = pathlib.Path(path)
    if kind != "digits":
        if not path:
            raise ValueError("no data is named: give a folder with --data, or --data-kind digits")
        if not folder.is_dir():
            raise FileNotFoundError(f"{path}: there is no such folder of data")
    kind = kind or _recognise(folder)
    reader = importlib.import_module(f"{__name__}.{KINDS[kind]}")
    parts = reader.read(folder, kind)
    if parts.evaluation is None:
        if not eval_share:
            raise ValueError(f"{path or kind}: nothing is left for evaluation: give an eval_share")
        return split(parts.train, eval_share, seed)
    return parts


def _recognise(folder: pathlib.Path) -> str:
    for kind, module in KINDS.items():
        if kind == "digits":
            continue
        reader = importlib.import_module(f"{__name__}.{module}")
        if reader.recognises(folder, kind):
            return kind
    raise ValueError(
        f"{folder}: neither CIFAR's nor Fashion-MNIST's files nor folders of images, one a class"
    )
