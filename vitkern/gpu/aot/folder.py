"""A folder of compiled kernels as the build keeps it: `manifest.json` and the binaries it names.

Every file is written beside its place and then moved there, the manifest last, so that at any
moment the folder's manifest names files that are whole. Only regular files with names that the
build gives are ever replaced or removed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

import triton

from .. import manifest
from ..manifest import LARGEST_BINARY, MANIFEST, write_whole

_FOR_THE_NEXT_BUILD = ("key", "function", "source", "bytes")  # who launches needs none of these


@functools.cache
def version() -> str:
    """vitkern's own."""
    return importlib.metadata.version("vitkern")


def read(folder: pathlib.Path) -> list[dict]:
    """The entries of an earlier build by this version; none if there is none that can be read."""
    try:
        found = manifest.read(folder)
    except (OSError, ValueError):
        return []
    if (found["vitkern"], found["triton"]) != (version(), triton.__version__):
        return []
    entries = {}
    for entry in filter(_is_whole, found["kernels"]):
        fields = (*manifest.FIELDS, *_FOR_THE_NEXT_BUILD)
        entries[entry["id"], entry["arch"]] = {name: entry[name] for name in fields}
    return list(entries.values())


def _is_whole(entry: Any) -> bool:
    """Whether the next build can take this entry over; what is none is built again."""
    try:
        manifest.check(entry)
    except ValueError:
        return False
    *texts, size = (entry.get(name) for name in _FOR_THE_NEXT_BUILD)
    right = all(isinstance(text, str) for text in texts) and type(size) is int
    return right and 0 <= size <= LARGEST_BINARY


def is_there(folder: pathlib.Path, entry: dict) -> bool:
    """Whether the file is the one that was built."""
    try:
        manifest.binary(manifest.place(folder, entry["file"]), entry["sha256"])
    except (OSError, ValueError):
        return False
    return True


def make(out: str | os.PathLike, archs: Iterable[str] = ()) -> pathlib.Path:
    """The folder, made if need be; a clear error now rather than after minutes of compiling."""
    folder = pathlib.Path(out).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"cannot write to {folder} ({why}): choose another folder") from error
    for arch in archs:
        path = folder / arch
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise OSError(f"{path} must be a folder, not a link or a file: choose another --out")
    if (folder / MANIFEST).is_dir():
        raise OSError(f"{folder / MANIFEST} must be a file, not a folder: choose another --out")
    return folder


def finish(folder: pathlib.Path, entries: list[dict]) -> None:
    """Write the manifest, then remove the binaries that only the earlier one named."""
    before = _named(folder)
    entries.sort(key=lambda entry: (entry["arch"], entry["id"]))
    made_by = {"vitkern": version(), "triton": triton.__version__, "sources": manifest.sources()}
    written = {**made_by, "kernels": entries}
    write_whole(folder / MANIFEST, json.dumps(written, indent=1).encode())
    for path in before - {folder / entry["file"] for entry in entries}:
        path.unlink(missing_ok=True)


def _named(folder: pathlib.Path) -> set[pathlib.Path]:
    """The regular files that the folder's manifest names and that a build can have written."""
    try:
        entries = manifest.read(folder)["kernels"]
    except (OSError, ValueError):
        return set()
    found = set()
    for entry in entries:
        try:
            path = manifest.place(folder, entry["file"])
        except (ValueError, TypeError, KeyError):  # no name of the build's, or no entry at all
            continue
        if path.is_file() and not path.is_symlink():
            found.add(path)
    return found
