"""What survives a kill: a folder beside the result, with a file for each finished part of the work.

    vectors.parquet.parts/job.json        what is being computed
    vectors.parquet.parts/lock            held by the process that does
    vectors.parquet.parts/DIGEST.npz      a part: rows, which images they are, which were left out

A part's file appears whole or not at all. Its name is a digest of its images' names, sizes and
times of change: a part whose images have changed in the meantime is computed again, and no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy as np

from ..image_sources import Source

SUFFIX = ".parts"
MOST_IMAGES = 1024  # of a part: what a kill may cost
MOST_BYTES = 64 << 20


class Part(NamedTuple):
    """Images whose vectors are written at once."""

    sources: list[Source]
    digest: str


class Result(NamedTuple):
    """A finished part: rows (n, ...), which of its images they are, and which were left out."""

    rows: np.ndarray
    kept: np.ndarray
    skipped: list[tuple[int, str]]


def split(sources: Sequence[Source], batch: int, bytes_each: int) -> list[Part]:
    """Parts of whole batches, small enough to be lost and large enough to be few."""
    batches = max(1, min(MOST_IMAGES, MOST_BYTES // bytes_each) // batch)
    step = batch * batches
    cut = [list(sources[i : i + step]) for i in range(0, len(sources), step)]
    return [Part(some, _digest(some)) for some in cut]


def _digest(sources: Sequence[Source]) -> str:
    found = hashlib.sha256()
    for source in sources:
        state = _state(source)
        found.update(f"{len(source.name)} {source.name} {state}\n".encode("utf-8", "surrogatepass"))
    return found.hexdigest()[:32]


def _state(source: Source) -> str:
    try:
        about = os.stat(source.path if source.path is not None else source.name)
        return f"{about.st_size} {about.st_mtime_ns}"
    except OSError:
        return "unreadable"


class Folder:
    """The parts of one job; `held` keeps others away from it."""

    def __init__(self, out: pathlib.Path) -> None:
        self.path = out.with_name(out.name + SUFFIX)

    def job(self) -> dict[str, Any] | None:
        """What the folder's parts belong to; None where there is no finished part."""
        try:
            found = json.loads((self.path / "job.json").read_text(encoding="utf-8"))
            return found if any(self.path.glob("*.npz")) else None
        except FileNotFoundError:
            return None
        except (ValueError, NotADirectoryError) as error:
            raise ValueError(
                f"{self.path} is no folder of an interrupted vitkern embed: remove it"
            ) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """The folder, made where there is none, for this process alone."""
        self.path.mkdir(exist_ok=True)
        with open(self.path / "lock", "wb") as lock:
            _lock(lock, self.path)
            yield

    def begin(self, job: dict[str, Any]) -> None:
        """Forget what is there, and write down what is to be computed."""
        for path in self.path.glob("*.npz*"):
            path.unlink()
        replace(self.path / "job.json", json.dumps(job, indent=1).encode())

    def has(self, part: Part) -> bool:
        return self._place(part).is_file()

    def save(self, part: Part, result: Result) -> None:
        about = np.frombuffer(json.dumps(result.skipped).encode(), np.uint8)
        place = self._place(part)
        beside = place.with_name(place.name + ".new")
        with open(beside, "wb") as file:
            np.savez(file, rows=result.rows, kept=result.kept, skipped=about)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, place)

    def load(self, part: Part) -> Result:
        """A finished part; a ValueError where its file is damaged."""
        place = self._place(part)
        try:
            with np.load(place, allow_pickle=False) as found:
                skipped = [(int(i), str(why)) for i, why in json.loads(found["skipped"].tobytes())]
                return Result(found["rows"], found["kept"], skipped)
        except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{place} is damaged: remove it, and run again") from error

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def _place(self, part: Part) -> pathlib.Path:
        return self.path / f"{part.digest}.npz"


def replace(path: pathlib.Path, content: bytes) -> None:
    """A file that is there with all of its content, or as it was."""
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _lock(file: IO[bytes], folder: pathlib.Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: nobody is kept away
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"{folder}: another vitkern embed is at work there: wait for it"
        ) from error
