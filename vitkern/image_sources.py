"""What a command line names as images: files, folders, patterns, addresses and standard input."""

from __future__ import annotations

import glob
import http.client
import pathlib
import sys
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from . import image_files

if TYPE_CHECKING:
    from PIL.Image import Image

STANDARD_INPUT = "-"
SUFFIXES = frozenset(".avif .bmp .gif .jp2 .jpeg .jpg .mpo .png .ppm .tga .tif .tiff .webp".split())
LARGEST_DOWNLOAD = 64 << 20  # bytes
SECONDS = 20  # that a server may be silent


class Source(NamedTuple):
    """An image to be read when its turn comes."""

    name: str
    path: pathlib.Path | None = None  # None: standard input or an address

    def read(self) -> Image:
        """The image, upright and RGB; a ValueError or OSError says what is wrong."""
        if self.path is not None:
            return image_files.read(self.path)
        if self.name == STANDARD_INPUT:
            return image_files.decode(_at_most(sys.stdin.buffer, self.name), "standard input")
        return image_files.decode(_download(self.name), self.name)


def expand(words: Sequence[str]) -> list[Source]:
    """The images that words name, in order; folders are searched through, sorted by name.

    A pattern (*.jpg) that the shell left as it is, is filled in, unless a file has that very name.
    What names nothing is an error at once, before any work; a broken file is one in its turn.
    """
    found: list[Source] = []
    for word in words:
        path = pathlib.Path(word)
        if word == STANDARD_INPUT or _is_address(word):
            found.append(Source(word))
        elif path.is_dir():
            found += _of_folder(path)
        elif not path.exists() and glob.has_magic(word):
            matches = sorted(map(pathlib.Path, glob.glob(word, recursive=True)))
            found += [Source(str(one), one) for one in matches if one.is_file()]
            if not matches:
                raise ValueError(f"{word}: no file matches")
        else:
            found.append(Source(word, path))
    if sum(source.name == STANDARD_INPUT for source in found) > 1:
        raise ValueError("standard input (-) holds one image: name it once")
    return found


def printable(name: str) -> str:
    """A name on one line that no terminal obeys: control characters as Python writes them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def _of_folder(folder: pathlib.Path) -> list[Source]:
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise ValueError(f"{folder}: a folder without images ({', '.join(sorted(SUFFIXES))})")
    return [Source(str(path), path) for path in files]


def _is_address(word: str) -> bool:
    return urllib.parse.urlsplit(word).scheme in ("http", "https")


def _download(address: str) -> bytes:
    asked = urllib.request.Request(address, headers={"User-Agent": "vitkern"})
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            return _at_most(answer, address)
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise OSError(f"{address}: cannot be fetched ({why})") from error


def _at_most(file: BinaryIO, name: str) -> bytes:
    content = file.read(LARGEST_DOWNLOAD + 1)
    if len(content) > LARGEST_DOWNLOAD:
        raise ValueError(f"{name}: more than {LARGEST_DOWNLOAD >> 20} MiB; save it as a file first")
    return content
