"""MNIST's and Fashion-MNIST's idx files, compressed or not: a header of big-endian sizes, bytes."""

from __future__ import annotations

import gzip
import math
import pathlib
import zlib

import numpy as np

from .images import Images, Parts

CLOTHES = (
    "T-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
PREFIXES = {"train": "train", "evaluation": "t10k"}
LARGEST = 1 << 30  # bytes of one file, unpacked; Fashion-MNIST has 47 million
UNSIGNED_BYTES = 8  # the third byte of the header: the type of an element


def recognises(folder: pathlib.Path, kind: str) -> bool:
    return _find(folder, "train-images-idx3-ubyte") is not None


def read(folder: pathlib.Path, kind: str) -> Parts:
    return Parts(*(_part(folder, prefix) for prefix in PREFIXES.values()))


def _part(folder: pathlib.Path, prefix: str) -> Images:
    pixels = _array(folder, f"{prefix}-images-idx3-ubyte", 3)
    labels = _array(folder, f"{prefix}-labels-idx1-ubyte", 1).astype(np.int64)
    if len(pixels) != len(labels):
        raise ValueError(f"{folder}: {len(pixels)} {prefix} images but {len(labels)} labels")
    if len(labels) and labels.max() >= len(CLOTHES):
        raise ValueError(f"{folder}: a {prefix} label is {labels.max()}, above 9")
    return Images(CLOTHES, labels, pixels)


def _find(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    found = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
    return found[0] if found else None


def _array(folder: pathlib.Path, name: str, axes: int) -> np.ndarray:
    path = _find(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder}: there is no {name} or {name}.gz")
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            header = file.read(4 + 4 * axes)
            if len(header) < 4 + 4 * axes or header[:4] != bytes([0, 0, UNSIGNED_BYTES, axes]):
                raise ValueError(f"{path}: not an idx file of bytes with {axes} axes")
            sizes = np.frombuffer(header, ">u4", axes, 4).tolist()
            wanted = math.prod(sizes)
            if wanted > LARGEST:
                raise ValueError(f"{path}: its header asks for {wanted} bytes, above {LARGEST}")
            body = file.read(wanted + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip file ({error})") from error
    if len(body) != wanted:
        raise ValueError(f"{path}: its header asks for {wanted} bytes, there are {len(body)}")
    return np.frombuffer(body, np.uint8).reshape(sizes)
