"""scikit-learn's handwritten digits, 1,797 of 8 x 8 pixels: its wheel carries them.

They are read from the package's file: scikit-learn itself is not imported.
"""

from __future__ import annotations

import gzip
import importlib.util
import pathlib

import numpy as np

from .images import Images, Parts

SIDE = 8
BRIGHTEST = 16  # the file's white


def read(folder: pathlib.Path, kind: str) -> Parts:
    """All digits; the caller holds some out for evaluation."""
    spec = importlib.util.find_spec("sklearn")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise ImportError("the digits are scikit-learn's: pip install scikit-learn")
    path = pathlib.Path(places[0], "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: this scikit-learn has no digits")
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    pixels = (table[:, :-1] * (255 / BRIGHTEST)).round().astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    classes = tuple(str(digit) for digit in range(10))
    return Parts(Images(classes, labels, pixels.reshape(-1, SIDE, SIDE)), None)
