"""Reads NumPy's .npz archives, as JAX's Vision Transformers are published: arrays, never pickles.

An archive may be compressed, so that its size says little about its contents. What each member
declares is added up before anything is decompressed, and no more than that is read.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

# Random floats compress to 0.9 of their size, a head of zeros (21843 x 1280, 112 MB) to nothing.
ROOM, RATIO = 256 << 20, 20
MOST_MEMBERS = 100_000
KINDS = "fiub"  # float, integers, bool
_BFLOAT16 = np.dtype("V2")  # NumPy has none: JAX's writes two bytes of no type


def read(path: Path, who: str) -> dict[str, Tensor]:
    """The arrays of an archive by name; a ValueError where it is damaged or holds objects."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check(members, path.stat().st_size)
            return {
                member.filename.removesuffix(".npy"): _array(archive, member) for member in members
            }
    except (
        ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError,
        MemoryError, SyntaxError, RecursionError, OverflowError, KeyError, TypeError,
    ) as error:  # fmt: skip
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{who}: {path} is damaged or no .npz of arrays: {why:.300}") from error


def _check(members: list[zipfile.ZipInfo], size: int) -> None:
    if len(members) > MOST_MEMBERS:
        raise ValueError(f"it has {len(members)} members")
    names = [member.filename for member in members]
    if len(set(names)) != len(names):
        raise ValueError("two of its members have one name")
    claimed = sum(member.file_size for member in members)
    if claimed > RATIO * size + ROOM:
        raise ValueError(f"it has {size} bytes and would decompress to {claimed}")


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Tensor:
    if not member.filename.endswith(".npy"):
        raise ValueError(f"its member {member.filename!r:.80} is no array (.npy)")
    with archive.open(member) as file:
        shape, fortran, dtype = _header(file)
        if dtype.hasobject:
            raise ValueError(
                f"{member.filename!r:.80} holds Python objects, whose pickles run code"
            )
        if dtype.kind not in KINDS and dtype != _BFLOAT16:
            raise ValueError(f"{member.filename!r:.80} is of dtype {dtype}, expected numbers")
        wanted = math.prod(shape) * dtype.itemsize
        if any(n < 0 for n in shape) or wanted > member.file_size:
            raise ValueError(
                f"{member.filename!r:.80} claims shape {shape!r:.80}, beyond its bytes"
            )
        content = bytearray(wanted)
        _fill(file, memoryview(content))
        if file.read(1):  # to the end, so that the checksum is looked at
            raise ValueError(f"{member.filename!r:.80} has bytes after its array")
    flat = np.frombuffer(content, dtype) if wanted else np.empty(0, dtype)
    array = flat.reshape(shape, order="F" if fortran else "C")
    if dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.astype(np.int64)  # counters: torch has few unsigned types
    return torch.from_numpy(np.asarray(array, array.dtype.newbyteorder("="), order="C"))


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"an array has version {version} of the format, expected 1.0 or 2.0")
    try:
        return readers[version](file)
    except Exception as error:  # NumPy evaluates it as a literal: any error of Python's parser
        raise ValueError(f"an array's header is no header: {type(error).__name__}") from error


def _fill(file: IO[bytes], room: memoryview) -> None:
    while room:
        piece = file.read(min(len(room), 1 << 24))
        if not piece:
            raise ValueError("an array ends too early")
        room[: len(piece)] = piece
        room = room[len(piece) :]
