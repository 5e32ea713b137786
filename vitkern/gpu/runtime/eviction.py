"""The folder of compiled kernels, kept below a size: what was used longest ago goes first.

A file's time of change is when a process last loaded it (`used`). Nothing is locked: a process that
was about to read a file that goes finds it missing, and compiles that kernel again.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

FOLDER = "VITKERN_CACHE"
LIMIT = "VITKERN_CACHE_SIZE"  # in MiB
USUAL = 512  # MiB; a model's kernels take one to four
NAME = re.compile(r"\w+-[0-9a-f]{16}\.(json|cubin|hsaco)", re.ASCII)
UNFINISHED = re.compile(
    rf"\.{NAME.pattern}-\w+", re.ASCII
)  # manifest.write_whole's, while it writes
HOUR = 3600.0


def default_folder() -> pathlib.Path:
    """Where compiled kernels are kept; RuntimeError for a user without a home."""
    if os.environ.get(FOLDER):
        return pathlib.Path(os.environ[FOLDER])
    home = os.environ.get("XDG_CACHE_HOME")
    return pathlib.Path(home if home else "~/.cache").expanduser() / "vitkern" / "kernels"


def limit() -> int:
    """The bytes that the folder may hold."""
    said = os.environ.get(LIMIT) or str(USUAL)
    if not re.fullmatch(r"[1-9][0-9]{0,8}", said, re.ASCII):
        raise ValueError(
            f"vitkern: {LIMIT} is {said!r:.40}, but the most that compiled kernels may take on disk"
            f" is a whole number of MiB, such as {USUAL}"
        )
    return int(said) << 20


def used(*paths: pathlib.Path) -> None:
    """Note that files were loaded, if the last note is old."""
    for path in paths:
        with contextlib.suppress(OSError):  # another's folder, or gone
            if time.time() - path.stat().st_mtime > HOUR:
                os.utime(path)


def trim(folder: pathlib.Path, most: int) -> None:
    """Remove the kernels used longest ago, of every Triton and architecture, beyond `most` bytes.

    Files of other names are somebody else's, and what a link leads to: they stay.
    """
    found = list(_files(folder))
    size, now = sum(one.size for one in found), time.time()
    for one in sorted(found, key=lambda one: one.used):
        left_over = UNFINISHED.fullmatch(one.name) and now - one.used > HOUR
        if left_over or (size > most and NAME.fullmatch(one.name)):
            with contextlib.suppress(OSError):  # another process was faster, or may not
                os.unlink(one.path)
                size -= one.size


def contents(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """ "Triton's version/architecture" -> how many kernels there are, and their bytes on disk."""
    found: dict[str, tuple[int, int]] = {}
    for one in _files(folder):
        version, arch = pathlib.PurePath(one.path).parts[-3:-1]
        count, size = found.get(f"{version}/{arch}", (0, 0))
        found[f"{version}/{arch}"] = (count + one.name.endswith(".json"), size + one.size)
    return found


class _File(NamedTuple):
    path: str
    name: str
    size: int
    used: float  # when


def _files(folder: pathlib.Path) -> Iterator[_File]:
    """The cache's own: <folder>/<Triton's version>/<architecture>/<kernel>-<hash>.<kind>."""
    for arch in (arch for version in _folders(folder) for arch in _folders(version)):
        for one in _entries(arch):
            if NAME.fullmatch(one.name) or UNFINISHED.fullmatch(one.name):
                try:
                    status = one.stat(follow_symlinks=False)
                except OSError:  # gone meanwhile
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield _File(one.path, one.name, status.st_size, status.st_mtime)


def _folders(folder: str | pathlib.Path) -> list[str]:
    return [one.path for one in _entries(folder) if one.is_dir(follow_symlinks=False)]


def _entries(folder: str | pathlib.Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # gone meanwhile, or not to be read
        return []
