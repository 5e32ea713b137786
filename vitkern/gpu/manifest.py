"""What the manifest of a folder of compiled kernels says: read, and checked before it is believed.

A folder holds `manifest.json` and the binaries that it names. It may come from anywhere: only
regular files with names that the build gives are ever read. Whoever launches (runtime/binary.py)
and whoever builds (aot/folder.py) read it through this module; a user's cache of kernels
(runtime/cache.py) has the same entries.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import pathlib
import re
import stat
import tempfile

MANIFEST = "manifest.json"
PACKAGE = "vitkern_kernels"  # the package that may be installed with a folder (aot/package.py)
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
    "hidden_parameters": (0, 16),  # pointers that Triton appends to the arguments: null
}
_LISTS = ("arguments", "constants", "global_scratch", "profile_scratch")
FIELDS = (*_TEXTS, *_INTEGERS, *_LISTS)  # of every entry; a build writes some more


def read(folder: pathlib.Path) -> dict:
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


@functools.cache
def sources() -> str:
    """A hash of the files with the kernels and their launchers."""
    found = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        found.update(f"{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def check(entry: object) -> None:
    """Raise ValueError unless this describes a kernel as the build does."""
    if not isinstance(entry, dict):
        raise ValueError(f"{shown(entry)} is no object with fields")
    for name in FIELDS:
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


def binary(path: pathlib.Path, sha256: str) -> bytes:
    """The bytes of a binary; OSError if it cannot be read, ValueError if it is another."""
    image = content(path, LARGEST_BINARY)
    if hashlib.sha256(image).hexdigest() != sha256:
        raise ValueError(f"its SHA-256 differs, {len(image)} bytes")
    return image


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
