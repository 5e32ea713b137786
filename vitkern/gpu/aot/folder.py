"""A folder of compiled kernels: `manifest.json` and the binaries that it names.

binary.py reads what this file writes. Every file is written beside its place and then moved there,
the manifest last, so that at any moment the folder's manifest names files that are whole. A folder
may come from anywhere: what its manifest says is checked before it is believed, and only regular
files with names that the build gives are ever read or removed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import stat
import tempfile
from collections.abc import Iterable

import triton

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 32 << 20  # bytes: 1 KB a kernel, and there are some thousands of them
LARGEST_BINARY = 64 << 20  # a kernel has 10 to 300 KB

_ARCH = r"(?:sm_\d+[a-z]?|gfx[0-9a-f]+)"
_TEXTS = {  # field of an entry -> what it looks like
    "id": r"[ -~]+",
    "kernel": r"[A-Za-z_]\w*",
    "arch": _ARCH,
    "file": _ARCH + r"/[A-Za-z_]\w*-[0-9a-f]{16}\.(?:cubin|hsaco)",
    "sha256": r"[0-9a-f]{64}",
}
_INTEGERS = {  # field -> smallest, largest; csrc/cuda/kernel.cpp knows what the device can do
    "num_warps": (1, 1024),
    "warp_size": (1, 1024),
    "num_stages": (0, 1024),
    "shared": (0, 2**31 - 1),
}
_LISTS = ("arguments", "constants", "global_scratch", "profile_scratch")
_FOR_THE_NEXT_BUILD = ("key", "function", "source", "bytes")  # who launches needs none of these


@functools.cache
def version() -> str:
    """vitkern's own."""
    return importlib.metadata.version("vitkern")


# ---- What a manifest says ------------------------------------------------------------------------


def read_manifest(folder: pathlib.Path) -> dict:
    """The manifest, its entries as they are; OSError or a ValueError that says what it is."""
    try:
        text = content(folder / MANIFEST, LARGEST_MANIFEST).decode("utf-8")
        manifest = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("is damaged or cut short (nested too deeply)") from None
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"is damaged or cut short ({error})") from error
    for key, kind in {"vitkern": str, "triton": str, "kernels": list}.items():
        if not isinstance(manifest, dict) or not isinstance(manifest.get(key), kind):
            raise ValueError(f"has no {key!r} of type {kind.__name__}")
    return manifest


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def check_entry(entry: object) -> None:
    """Raise ValueError unless this describes a kernel as the build does."""
    if not isinstance(entry, dict):
        raise ValueError(f"{shown(entry)} is no object with fields")
    for name in (*_TEXTS, *_INTEGERS, *_LISTS):
        if name not in entry:
            raise ValueError(f"it has no {name!r}")
    for name, pattern in _TEXTS.items():
        if not isinstance(entry[name], str) or not _matches(pattern, entry[name]):
            raise ValueError(f"{name} is {shown(entry[name])}, which no build writes")
    if not entry["file"].startswith(entry["arch"] + "/"):
        raise ValueError(f"file {entry['file']!r} is not in the folder {entry['arch']}")
    for name, (least, most) in _INTEGERS.items():
        if type(entry[name]) is not int or not least <= entry[name] <= most:
            raise ValueError(f"{name} is {shown(entry[name])}, not an integer of {least} to {most}")
    rows, constants = entry["arguments"], entry["constants"]
    if not isinstance(rows, list) or not all(_is_list(row, str, str, bool) for row in rows):
        raise ValueError(f"arguments are {shown(rows)}, not a list of [name, type, divisible]")
    if not isinstance(constants, dict) or not all(map(_is_constant, constants.values())):
        raise ValueError(f"constants are {shown(constants)}, not names with texts and numbers")
    if not isinstance(entry.get("source", ""), str):
        raise ValueError(f"source is {shown(entry['source'])}, not a text")
    for name in ("global_scratch", "profile_scratch"):
        if not _is_list(entry[name], int, int):
            raise ValueError(f"{name} is {shown(entry[name])}, not [bytes, alignment]")


def shown(value: object) -> str:
    """A value of a manifest for an error message; lists may be nested without end."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.80}"


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.ASCII) is not None


def _is_list(value: object, *kinds: type) -> bool:
    return isinstance(value, list) and tuple(map(type, value)) == kinds


def _is_constant(value: object) -> bool:
    return type(value) in (str, int, bool, type(None)) or (
        type(value) is float and math.isfinite(value)
    )


def read(folder: pathlib.Path) -> list[dict]:
    """The entries of an earlier build by this version; none if there is none that can be read."""
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError):
        return []
    if (manifest["vitkern"], manifest["triton"]) != (version(), triton.__version__):
        return []
    found = {}
    for entry in filter(_is_whole, manifest["kernels"]):
        fields = (*_TEXTS, *_INTEGERS, *_LISTS, *_FOR_THE_NEXT_BUILD)
        found[entry["id"], entry["arch"]] = {name: entry[name] for name in fields}
    return list(found.values())


def _is_whole(entry: object) -> bool:
    """Whether the next build can take this entry over; what is none is built again."""
    try:
        check_entry(entry)
    except ValueError:
        return False
    *texts, size = (entry.get(name) for name in _FOR_THE_NEXT_BUILD)
    return _is_list(texts, str, str, str) and type(size) is int and 0 <= size <= LARGEST_BINARY


# ---- Files ---------------------------------------------------------------------------------------


def content(path: pathlib.Path, largest: int) -> bytes:
    """A regular file's bytes; OSError for links, folders, pipes and what is far too large."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is no regular file")
    if status.st_size > largest:
        raise OSError(f"{path} has {status.st_size} bytes, more than {largest}")
    return path.read_bytes()


def place(folder: pathlib.Path, file: str) -> pathlib.Path:
    """Where a binary is; ValueError for a name, or a way there, that is not the build's own."""
    if not isinstance(file, str) or not _matches(_TEXTS["file"], file):
        raise ValueError(f"file is {file!r:.80}, which no build writes")
    path = folder / file
    if path.parent.is_symlink():
        raise ValueError(f"{path.parent} is a symbolic link: put the folder itself there")
    return path


def is_there(folder: pathlib.Path, entry: dict) -> bool:
    """Whether the file is the one that was built."""
    try:
        found = content(place(folder, entry["file"]), LARGEST_BINARY)
    except (OSError, ValueError):
        return False
    return hashlib.sha256(found).hexdigest() == entry["sha256"]


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp's files are for their owner alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


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
    manifest = {"vitkern": version(), "triton": triton.__version__, "kernels": entries}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    for path in before - {folder / entry["file"] for entry in entries}:
        path.unlink(missing_ok=True)


def _named(folder: pathlib.Path) -> set[pathlib.Path]:
    """The regular files that the folder's manifest names and that a build can have written."""
    try:
        entries = read_manifest(folder)["kernels"]
    except (OSError, ValueError):
        return set()
    found = set()
    for entry in entries:
        try:
            path = place(folder, entry["file"])
        except (ValueError, TypeError, KeyError):  # no name of the build's, or no entry at all
            continue
        if path.is_file() and not path.is_symlink():
            found.add(path)
    return found
