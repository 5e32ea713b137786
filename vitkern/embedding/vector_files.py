"""Files of vectors: .parquet, .npy and .safetensors, with the images' names and the recipe.

    .parquet      columns "image" (string) and "vector" (fixed-size lists of float32)
    .npy          the array (N, ...) alone; names and recipe in a .json file beside it
    .safetensors  "vectors" (N, ...); "names", their UTF-8 in one piece, and "name_ends" (N,)

What is written is a function of its arguments: equal vectors make equal files. `Vectors` reads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

ENTRY = "vitkern.embedding"  # of a file's metadata
SUFFIXES = (".parquet", ".npy", ".safetensors")
ROWS = 4096  # read at a time


def check_path(path: pathlib.Path) -> None:
    """Refuse what cannot be written, before any work is done."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: the name of the vectors must end in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise IsADirectoryError(f"{path}: a folder, expected the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path}: the folder {path.parent} cannot be written to")
    if path.suffix == ".parquet":
        _pyarrow()


def beside(path: pathlib.Path) -> pathlib.Path:
    """Where names and recipe of an .npy file are."""
    return path.with_name(path.name + ".json")


def write(
    path: pathlib.Path,
    names: Sequence[str],
    rows: Iterable[np.ndarray],
    shape: tuple[int, ...],
    about: dict[str, Any],
) -> None:
    """Write vectors, given piece by piece as float32 (n, *shape), n of all pieces len(names)."""
    _WRITERS[path.suffix](path, names, rows, shape, about)


def _write_parquet(
    path: pathlib.Path, names: Sequence[str], rows: Iterable[np.ndarray], shape: tuple[int, ...],
    about: dict[str, Any],
) -> None:  # fmt: skip
    pa = _pyarrow()
    import pyarrow.parquet as pq

    kind = pa.float32()
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    schema = pa.schema(
        [pa.field("image", pa.string(), False), pa.field("vector", kind, False)],
        {ENTRY: json.dumps(about)},
    )
    # Vectors are as good as noise: neither a dictionary nor compression makes them smaller.
    leaf = "vector" + ".list.element" * len(shape)
    how = {"compression": {"image": "zstd", leaf: "none"}, "use_dictionary": False}
    start = 0
    with pq.ParquetWriter(path, schema, **how) as file:
        for some in rows:
            column = pa.array(np.ascontiguousarray(some, np.float32).reshape(-1))
            for size in reversed(shape):
                column = pa.FixedSizeListArray.from_arrays(column, size)
            end = start + len(some)
            images = pa.array(names[start:end], pa.string())
            file.write_table(pa.Table.from_arrays([images, column], schema=schema))
            start = end


def _write_npy(
    path: pathlib.Path, names: Sequence[str], rows: Iterable[np.ndarray], shape: tuple[int, ...],
    about: dict[str, Any],
) -> None:  # fmt: skip
    with open(path, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(names), *shape)}
        np.lib.format.write_array_header_1_0(file, header)
        _write_rows(file, rows)
    with open(beside(path), "w", encoding="utf-8") as text:
        json.dump({ENTRY: about, "images": list(names)}, text)


def _write_safetensors(
    path: pathlib.Path, names: Sequence[str], rows: Iterable[np.ndarray], shape: tuple[int, ...],
    about: dict[str, Any],
) -> None:  # fmt: skip
    """By hand, as the library's writer wants all rows in memory: a JSON header, then the data."""
    encoded = [name.encode() for name in names]
    ends = np.cumsum([len(name) for name in encoded], dtype="<i8")
    sizes = {
        "name_ends": ("I64", [len(names)], 8 * len(names)),
        "vectors": ("F32", [len(names), *shape], 4 * len(names) * int(np.prod(shape))),
        "names": ("U8", [int(ends[-1]) if len(names) else 0], int(ends[-1]) if len(names) else 0),
    }
    header: dict[str, Any] = {"__metadata__": {ENTRY: json.dumps(about)}}
    place = 0
    for name, (dtype, dims, size) in sizes.items():
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(ends.tobytes())
        _write_rows(file, rows)
        file.write(b"".join(encoded))


def _write_rows(file: BinaryIO, rows: Iterable[np.ndarray]) -> None:
    for some in rows:
        file.write(np.ascontiguousarray(some, "<f4").data)


_WRITERS: dict[str, Callable[..., None]] = {
    ".parquet": _write_parquet,
    ".npy": _write_npy,
    ".safetensors": _write_safetensors,
}


# ---- reading ----


@dataclasses.dataclass(frozen=True)
class Vectors:
    """A file of vectors that is open for reading: the rows stay in the file until asked for."""

    path: pathlib.Path
    names: list[str]
    shape: tuple[int, ...]  # of one image's
    about: dict[str, Any]  # "recipe", "root": the folder that names are relative to, "job"
    read: Callable[[], Iterator[np.ndarray]]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Vectors:
        """A file that `embed` wrote; a ValueError or OSError says why it is none."""
        place = pathlib.Path(path)
        if place.suffix not in SUFFIXES:
            raise ValueError(f"{place}: not a file of vectors ({', '.join(SUFFIXES)})")
        if place.is_dir() or not place.is_file():
            what = "a folder" if place.is_dir() else "no such file"
            raise FileNotFoundError(f"{place}: {what}, expected what vitkern embed wrote")
        found = _READERS[place.suffix](place)
        if not isinstance(found.about, dict) or "recipe" not in found.about:
            raise ValueError(f"{place}: not written by vitkern embed: it does not say which model")
        return found

    def __iter__(self) -> Iterator[np.ndarray]:
        """The rows, float32 (n, *shape), piece by piece."""
        return self.read()

    def __len__(self) -> int:
        return len(self.names)

    def array(self) -> np.ndarray:
        """All rows in memory: float32 (N, *shape)."""
        pieces = list(self.read())
        return np.concatenate(pieces) if pieces else np.zeros((0, *self.shape), np.float32)

    def place(self, name: str) -> pathlib.Path:
        """Where an image was when it was embedded."""
        return pathlib.Path(self.about.get("root", ""), name)


def _read_parquet(path: pathlib.Path) -> Vectors:
    pa = _pyarrow()
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        kind, shape = schema.field("vector").type, []
        while pa.types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
            kind = kind.value_type
        names = file.read(["image"])["image"].to_pylist()
        about = _about(path, (schema.metadata or {}).get(ENTRY.encode(), b"{}"))
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(f"{path}: not a file of vectors, or damaged ({_line(error)})") from error

    def rows() -> Iterator[np.ndarray]:
        for i in range(file.num_row_groups):
            column = file.read_row_group(i, ["vector"])["vector"].combine_chunks()
            for _ in shape:
                column = column.flatten()
            yield column.to_numpy().reshape(-1, *shape)

    return Vectors(path, names, tuple(shape), about, rows)


def _read_npy(path: pathlib.Path) -> Vectors:
    if not beside(path).is_file():
        raise FileNotFoundError(f"{path}: its names and recipe, {beside(path).name}, are missing")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not an array, or damaged ({_line(error)})") from error
    found = _about(path, beside(path).read_bytes())
    names = found.get("images", [])
    if len(names) != len(array):
        raise ValueError(f"{path}: {len(array)} vectors, but {len(names)} names beside it")
    about = found.get(ENTRY, {})
    return Vectors(path, names, array.shape[1:], about, lambda: _pieces(array, len(array)))


def _read_safetensors(path: pathlib.Path) -> Vectors:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        needs = f"{path} needs safetensors: pip install 'vitkern[images]'"
        raise ImportError(needs) from error
    try:
        file = safe_open(path, framework="numpy")
        about = _about(path, (file.metadata() or {}).get(ENTRY, "{}"))
        text, ends = file.get_tensor("names").tobytes(), file.get_tensor("name_ends").tolist()
        rows = file.get_slice("vectors")
        shape = tuple(rows.get_shape())
        names = [text[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a file of vectors, or damaged ({_line(error)})") from error
    if len(names) != shape[0]:
        raise ValueError(f"{path}: {shape[0]} vectors, but {len(names)} names")
    return Vectors(path, names, shape[1:], about, lambda: _pieces(rows, shape[0]))


def _pieces(array: Any, count: int) -> Iterator[np.ndarray]:
    for start in range(0, count, ROWS):
        yield np.asarray(array[start : min(start + ROWS, count)])


_READERS: dict[str, Callable[[pathlib.Path], Vectors]] = {
    ".parquet": _read_parquet,
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
}


def _about(path: pathlib.Path, text: str | bytes) -> dict[str, Any]:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: what it says of itself is not JSON ({error})") from error


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            ".parquet needs pyarrow: pip install 'vitkern[embed]', or name the file .npy"
        ) from error
    return pyarrow
