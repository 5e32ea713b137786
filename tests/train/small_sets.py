"""Small data sets in every format that training reads, written by the tests themselves."""

import gzip
import pathlib
import pickle

import numpy as np


def pictures(count: int, side: int, channels: int, classes: int, seed: int = 0):
    """Noise with a bright stripe whose place is the class: (N, Y, X[, 3]) bytes, and labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    pixels = rng.integers(0, 60, (count, side, side, channels), dtype=np.uint8)
    for image, label in zip(pixels, labels, strict=True):
        row = label * side // classes
        image[row : row + max(1, side // classes)] += 160
    return (pixels[..., 0] if channels == 1 else pixels), labels.astype(np.int64)


def write_idx(folder: pathlib.Path, train: int, test: int, packed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate((("train", train), ("t10k", test))):
        pixels, labels = pictures(count, 28, 1, 10, seed)
        for stem, array in (("images-idx3", pixels), ("labels-idx1", labels.astype(np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            ending = ".gz" if packed else ""
            opened = gzip.open if packed else open
            with opened(folder / f"{name}-{stem}-ubyte{ending}", "wb") as file:
                file.write(header + array.tobytes())


def rows_of(pixels: np.ndarray) -> np.ndarray:
    """CIFAR's order of an image's bytes: (N, 3072), plane by plane."""
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(len(pixels), -1)


def write_cifar(
    folder: pathlib.Path, form: str, pixels: np.ndarray, labels: np.ndarray, test: int
) -> None:
    """CIFAR-10 as the official archives have it: the last `test` images are the test part."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    cuts = [*np.array_split(np.arange(len(labels) - test), 5), np.arange(len(labels))[-test:]]
    for name, rows in zip(names, cuts, strict=True):
        data, own = rows_of(pixels[rows]), labels[rows]
        if form == "binary":
            records = np.concatenate([own.astype(np.uint8)[:, None], data], 1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            content = {b"batch_label": b"a", b"labels": own.tolist(), b"data": data}
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def write_folder(folder: pathlib.Path, each: int, classes: int = 3, side: int = 24) -> None:
    from PIL import Image

    pixels, labels = pictures(each * classes, side, 3, classes)
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        place = folder / f"class_{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i}.png")
