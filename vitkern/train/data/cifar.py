"""CIFAR-10 and CIFAR-100 in both official formats: binary records, and Python pickles.

A pickle is a program. These are read by an unpickler that knows the few names numpy's arrays of
bytes are made of and refuses every other one, so that a file cannot run anything else.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .images import Images, Parts

SIDE = 32
BYTES = 3 * SIDE * SIDE  # of one image: all red, all green, all blue
LARGEST = 1 << 28  # bytes of a file; CIFAR-100's training part has 154 million

CIFAR10 = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """File names of both formats without their endings, and where the labels are."""

    folders: tuple[str, ...]  # as the official archives unpack
    train: tuple[str, ...]
    evaluation: tuple[str, ...]
    label_bytes: int  # of a binary record; the last one is the label
    key: bytes  # of the labels in a pickle
    names: str  # of classes: the binary format's file
    meta: tuple[str, bytes]  # the pickled format's file and key
    classes: int


LAYOUTS = {
    "cifar10": Layout(
        ("cifar-10-batches-py", "cifar-10-batches-bin"),
        tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",),
        1, b"labels", "batches.meta.txt", ("batches.meta", b"label_names"), 10,
    ),
    "cifar100": Layout(
        ("cifar-100-python", "cifar-100-binary"), ("train",), ("test",),
        2, b"fine_labels", "fine_label_names.txt", ("meta", b"fine_label_names"), 100,
    ),
}  # fmt: skip


def recognises(folder: pathlib.Path, kind: str) -> bool:
    return _place(folder, LAYOUTS[kind]) is not None


def read(folder: pathlib.Path, kind: str) -> Parts:
    layout = LAYOUTS[kind]
    place = _place(folder, layout)
    if place is None:
        first = layout.evaluation[0]
        raise FileNotFoundError(f"{folder}: there is no {first} or {first}.bin of {kind}")
    names = _class_names(place, layout)
    return Parts(
        *(_part(place, files, layout, names) for files in (layout.train, layout.evaluation))
    )


def _place(folder: pathlib.Path, layout: Layout) -> pathlib.Path | None:
    """The folder itself, or the one inside it that the official archive unpacks to."""
    for place in (folder, *(folder / name for name in layout.folders)):
        stems = (*layout.train, *layout.evaluation)
        if all((place / f"{s}.bin").is_file() or (place / s).is_file() for s in stems):
            return place
    return None


def _part(
    place: pathlib.Path, files: tuple[str, ...], layout: Layout, names: tuple[str, ...]
) -> Images:
    parts = [_file(place, name, layout) for name in files]
    pixels = np.concatenate([pixels for pixels, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    if len(labels) and not 0 <= labels.min() <= labels.max() < layout.classes:
        raise ValueError(f"{place}: a label is outside 0 to {layout.classes - 1}")
    planes = pixels.reshape(-1, 3, SIDE, SIDE)
    return Images(names, labels, np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))


def _file(place: pathlib.Path, name: str, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (N, 3072) and labels (N,) of one file; the binary one where there are both."""
    path = place / f"{name}.bin"
    if not path.is_file():
        return _pickled(place / name, layout)
    record = layout.label_bytes + BYTES
    data = np.frombuffer(_bytes(path), np.uint8)
    if not len(data) or len(data) % record:
        raise ValueError(f"{path}: {len(data)} bytes are no records of {record} bytes")
    rows = data.reshape(-1, record)
    labels = rows[:, layout.label_bytes - 1].astype(np.int64)
    return rows[:, layout.label_bytes :], labels


def _pickled(path: pathlib.Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    found = unpickle(path)
    pixels, labels = found.get(b"data"), found.get(layout.key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != BYTES:
        raise ValueError(f"{path}: b'data' is no (images, {BYTES}) array of bytes")
    numbers = [n for n in labels if type(n) is int] if isinstance(labels, list) else []
    if not isinstance(labels, list) or not len(numbers) == len(labels) == len(pixels):
        raise ValueError(f"{path}: {layout.key!r} is no list of {len(pixels)} integers")
    return pixels, np.array(numbers, np.int64)


def _class_names(place: pathlib.Path, layout: Layout) -> tuple[str, ...]:
    """From the data's own list; CIFAR-10's are known without."""
    lines: list[str] = []
    if (place / layout.names).is_file():
        text = _bytes(place / layout.names).decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
    elif (place / layout.meta[0]).is_file():
        found = unpickle(place / layout.meta[0]).get(layout.meta[1])
        if isinstance(found, list) and all(isinstance(name, bytes) for name in found):
            lines = [name.decode("utf-8", "replace") for name in found]
    if len(lines) == layout.classes:
        return tuple(lines)
    return CIFAR10 if layout.classes == 10 else tuple(f"class {i}" for i in range(layout.classes))


def _bytes(path: pathlib.Path) -> bytes:
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path}: {path.stat().st_size} bytes are too many for a part of CIFAR")
    return path.read_bytes()


# ---- Pickles -------------------------------------------------------------------------------------


class _Dtype:
    """Stands for a dtype in a pickle: only unsigned bytes are taken."""

    def __new__(cls, name: Any, *_: Any) -> Any:
        if name not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"its array holds {name!r:.40}, not bytes")
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like, which bytes do not have


class _Array:
    """Stands for an array of bytes in a pickle."""

    pixels: np.ndarray

    def __setstate__(self, state: Any) -> None:
        try:
            _, shape, dtype, fortran, content = state
        except (TypeError, ValueError) as error:
            raise pickle.UnpicklingError("its array has no such state") from error
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes | str):
            raise pickle.UnpicklingError("its array is not made of bytes")
        raw = content.encode("latin1") if isinstance(content, str) else content
        try:
            flat = np.frombuffer(raw, np.uint8)
            self.pixels = flat.reshape(shape, order="F") if fortran else flat.reshape(shape)
        except (TypeError, ValueError) as error:
            raise pickle.UnpicklingError("its array has another size than its bytes") from error


def _make_array(*_: Any) -> _Array:
    return _Array()


def _encode(text: Any, *_: Any) -> bytes:
    """How protocol 2 writes bytes: `_codecs.encode(text, "latin1")`."""
    if not isinstance(text, str):
        raise pickle.UnpicklingError("it encodes something that is no text")
    return text.encode("latin1")


# Every name that a file may use, and what stands for it.
_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _make_array,
    ("numpy._core.multiarray", "_reconstruct"): _make_array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which CIFAR does not need")
        return known


def unpickle(path: pathlib.Path) -> dict[bytes, Any]:
    """The dict in one of CIFAR's pickles, keys as bytes; nothing but arrays of bytes is made."""
    try:
        found = _Unpickler(io.BytesIO(_bytes(path)), encoding="bytes").load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, not a dict")
        return dict(_plain(found))
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: not one of CIFAR's pickles: {why}") from error


def _plain(found: dict[Any, Any]) -> Iterator[tuple[bytes, Any]]:
    for key, value in found.items():
        name = key.encode() if isinstance(key, str) else key
        if isinstance(value, list):
            value = [one.encode() if isinstance(one, str) else one for one in value]
        yield name, value.pixels if isinstance(value, _Array) else value
