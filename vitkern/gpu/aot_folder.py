"""A folder of compiled kernels: `manifest.json` and the binaries that it names.

binary.py reads what this file writes. Every file is written beside its place and then moved there,
the manifest last, so that at any moment the folder's manifest names files that are whole.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile

import triton

MANIFEST = "manifest.json"


@functools.cache
def version() -> str:
    """vitkern's own."""
    return importlib.metadata.version("vitkern")


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp's files are for their owner alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def make(out: str | os.PathLike) -> pathlib.Path:
    """The folder, made if need be; a clear error now rather than after minutes of compiling."""
    folder = pathlib.Path(out).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"cannot write to {folder} ({why}): choose another folder") from error
    return folder


def read(folder: pathlib.Path) -> list[dict]:
    """The entries of an earlier build by this version; none if there is none that can be read."""
    manifest = _manifest(folder)
    if (manifest.get("vitkern"), manifest.get("triton")) != (version(), triton.__version__):
        return []
    fields = {"key", "file", "sha256", "id", "arch", "function", "source", "bytes"}
    return [entry for entry in manifest["kernels"] if fields <= entry.keys()]


def _manifest(folder: pathlib.Path) -> dict:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest if all(_is_inside(entry["file"]) for entry in manifest["kernels"]) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_inside(file: str) -> bool:
    """Whether a manifest's file is one of its folder: others are neither read nor removed."""
    path = pathlib.PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def is_there(folder: pathlib.Path, entry: dict) -> bool:
    """Whether the file is the one that was built."""
    try:
        content = (folder / entry["file"]).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content).hexdigest() == entry["sha256"]


def finish(folder: pathlib.Path, entries: list[dict]) -> None:
    """Write the manifest, then remove the binaries that only the earlier one named."""
    before = {entry["file"] for entry in _manifest(folder).get("kernels", ())}
    entries.sort(key=lambda entry: (entry["arch"], entry["id"]))
    manifest = {"vitkern": version(), "triton": triton.__version__, "kernels": entries}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    for name in before - {entry["file"] for entry in entries}:
        (folder / name).unlink(missing_ok=True)
