"""CIFAR-10 from the test data's atlases (100 x 100 tiles in a file), in the official format.

    python -m tests.train.cifar_atlas ATLASES OUT

writes OUT/cifar-10-batches-bin, which `vitkern train --data OUT` reads.
"""

import pathlib
import sys

import numpy as np


def tiles(atlases: pathlib.Path, name: str) -> np.ndarray:
    """The 10,000 images (N, 32, 32, 3) of an atlas: "test", or "train_1" to "train_5"."""
    from PIL import Image

    with Image.open(atlases / f"cifar10_{name}.webp") as image:
        atlas = np.asarray(image.convert("RGB"))
    return atlas.reshape(100, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)


def convert(atlases: pathlib.Path, out: pathlib.Path, each: int = 10_000) -> None:
    """The first `each` images of every atlas as binary batches."""
    from tests.train.small_sets import rows_of

    folder = out / "cifar-10-batches-bin"
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.load(atlases / "cifar10_labels.npz")
    train = labels["train"].reshape(5, 10_000)
    sources = [(f"train_{i + 1}", f"data_batch_{i + 1}", train[i]) for i in range(5)]
    for source, name, own in [*sources, ("test", "test_batch", labels["test"])]:
        records = [own[:each, None].astype(np.uint8), rows_of(tiles(atlases, source)[:each])]
        (folder / f"{name}.bin").write_bytes(np.concatenate(records, 1).tobytes())


if __name__ == "__main__":
    convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
