"""embed: the vectors of many images in one file, computed so that a kill costs little."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import image_sources
from . import decoding, vector_files
from .encoder import Encoder, differences
from .parts import Folder, Part, Result, replace, split
from .vector_files import Vectors

BATCH = 32  # images a call
WHERE = ("local", "ray")
SKIPPED = ".skipped.json"  # after the name of the result: images that were left out, and why


@dataclasses.dataclass
class Report:
    """What `embed` did, or has done so far; times are of this run, in seconds."""

    out: str
    images: int  # that were asked for
    done: int = 0  # of them, with those of an earlier run
    resumed: int = 0  # done by an earlier run
    embedded: int = 0  # images whose vectors the file has
    skipped: list[dict[str, str]] = dataclasses.field(default_factory=list)
    shape: tuple[int, ...] = ()  # of one image's vectors
    workers: int = 1
    seconds: float = 0.0
    decoding: float = 0.0  # of all workers together
    computing: float = 0.0
    waiting: float = 0.0  # of the computing side, for decoded images
    writing: float = 0.0

    @property
    def images_per_second(self) -> float:
        return self._rate(self.seconds)

    @property
    def decoded_per_second(self) -> float:
        """What the workers decode while they are at it, all together."""
        return self._rate(self.decoding / self.workers)

    @property
    def computed_per_second(self) -> float:
        """What the model computes while it is at it."""
        return self._rate(self.computing)

    @property
    def waiting_share(self) -> float:
        """Of the time, in which the model waited for images to be decoded."""
        return self.waiting / self.seconds if self.seconds else 0.0

    def _rate(self, seconds: float) -> float:
        return (self.done - self.resumed) / seconds if seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        rates = ("images_per_second", "decoded_per_second", "computed_per_second", "waiting_share")
        found = dataclasses.asdict(self) | {name: getattr(self, name) for name in rates}
        return {key: round(v, 4) if isinstance(v, float) else v for key, v in found.items()}


def embed(
    images: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    encoder: Encoder | Callable[[], Encoder] = Encoder.open,
    *,
    batch: int = BATCH,
    workers: int | None = None,
    strict: bool = False,
    restart: bool = False,
    skipped: str | os.PathLike[str] | None = None,
    progress: Callable[[Report], None] | None = None,
    where: str = "local",
) -> Report:
    """Write the vectors of images to a .parquet, .npy or .safetensors file.

    images: files, folders (searched through) and patterns. encoder: one, or what opens one when
    the images are found; by default the package's own model's.
    workers: threads that decode; None is one for each CPU, 8 at most.
    strict: an image that cannot be read is an error; else it is left out and listed in the file
    `skipped` (by default the result's name with .skipped.json after it).
    restart: throw away what an interrupted run or an earlier one left. Without it an interrupted
    run goes on, a finished one is left as it is, and one with other arguments is an error.
    progress: called with the report so far, after each batch. where: "local", or "ray" for the
    cluster that Ray is connected to, whose nodes must see the same files.
    """
    path = pathlib.Path(out)
    if batch < 1 or (workers is not None and workers < 1):
        raise ValueError("batch and workers must be at least 1")
    if where not in WHERE:
        raise ValueError(f"where must be one of {', '.join(WHERE)}, not {where!r:.40}")
    vector_files.check_path(path)
    if where == "ray":
        from . import on_ray

        on_ray.imported()
    sources = listed([os.fspath(image) for image in images])
    if not isinstance(encoder, Encoder):
        encoder = encoder()
    pieces = split(sources, batch, 4 * int(np.prod(encoder.shape)))
    job = {"recipe": encoder.recipe, "batch": batch, "device": str(encoder.model.device)}
    whole = _identity(job, pieces)
    folder = Folder(path)
    report = Report(
        str(path), len(sources), shape=encoder.shape, workers=workers or default_workers()
    )
    list_path = path.with_name(path.name + SKIPPED) if skipped is None else pathlib.Path(skipped)
    if not list_path.parent.is_dir():
        raise FileNotFoundError(f"{list_path}: there is no folder {list_path.parent}")
    before = None if restart else folder.job()
    if before is not None:
        _check_same(before, job, folder)
    elif path.exists() and not restart:
        return _finished(path, whole, report, list_path)
    with _explained(path), folder.held():
        if before is None:
            folder.begin(job)
        missing = [part for part in pieces if not folder.has(part)]
        report.resumed = report.done = len(sources) - sum(len(part.sources) for part in missing)
        begin = time.perf_counter()

        def note(images: int) -> None:
            report.done += images
            report.seconds = time.perf_counter() - begin
            if progress is not None:
                progress(report)

        compute = on_ray.computed if where == "ray" else computed
        for part, result in compute(encoder, missing, batch, strict, report, note):
            with _clock(report, "writing"):
                folder.save(part, result)
        with _clock(report, "writing"):
            about = {"recipe": encoder.recipe, "root": os.getcwd(), "job": whole}
            report.skipped = _join(folder, pieces, path, encoder.shape, about, list_path, strict)
            report.embedded = report.images - len(report.skipped)
        report.seconds = time.perf_counter() - begin
        folder.remove()
    return report


def listed(words: Sequence[str]) -> list[image_sources.Source]:
    """The files that words name, each once; what is no file or folder is an error."""
    found = {source.name: source for source in image_sources.expand(words)}
    for source in found.values():
        if source.path is None:
            what = "standard input" if source.name == image_sources.STANDARD_INPUT else source.name
            raise ValueError(
                f"{what}: embed reads files, so that it can go on after a kill: save it"
            )
        if not source.path.exists() and not source.path.is_symlink():
            raise FileNotFoundError(f"{source.name}: no such file or folder")
    if not found:
        raise ValueError("no images were named: give files, folders or patterns")
    return list(found.values())


def default_workers() -> int:
    from ..cpu_limits import available

    return min(8, available())


def _identity(job: dict[str, Any], pieces: Sequence[Part]) -> str:
    """Of everything that a finished file depends on."""
    recipe = {key: value for key, value in job["recipe"].items() if key not in ("weights", "model")}
    text = json.dumps([recipe, job["batch"], job["device"], [part.digest for part in pieces]])
    return hashlib.sha256(text.encode()).hexdigest()


def _check_same(before: dict[str, Any], job: dict[str, Any], folder: Folder) -> None:
    said = [differences(before.get("recipe", {}), job["recipe"])]
    for name in ("batch", "device"):
        if before.get(name) != job[name]:
            said.append(f"{name} was {before.get(name)}, is {job[name]}")
    if any(said):
        raise ValueError(
            f"{folder.path} is an interrupted run with other arguments"
            f" ({'; '.join(filter(None, said))}): give the same ones to go on, or --restart"
        )


def _finished(path: pathlib.Path, whole: str, report: Report, list_path: pathlib.Path) -> Report:
    """The report of a file that is there already; an error where it is another one's."""
    try:
        there = Vectors.open(path)
        same = there.about.get("job") == whole
    except (ValueError, OSError):
        same = False
    if not same:
        raise FileExistsError(
            f"{path} exists, and is not of these images and arguments: name another file, or"
            f" --restart to replace it"
        )
    report.done = report.resumed = report.images
    report.embedded = len(there)
    with contextlib.suppress(OSError, ValueError):  # gone, if they do not want to know
        report.skipped = json.loads(list_path.read_text(encoding="utf-8"))
    return report


def computed(
    encoder: Encoder, missing: Sequence[Part], batch: int, strict: bool, report: Report,
    note: Callable[[int], None],
) -> Iterator[tuple[Part, Result]]:  # fmt: skip
    """The parts one after the other, decoded ahead across their borders."""
    size = encoder.model.config.pixels
    batches = [
        part.sources[i : i + batch] for part in missing for i in range(0, len(part.sources), batch)
    ]
    decoded = decoding.ahead(
        batches, lambda some: decoding.decode(some, encoder.pixels, size), report.workers
    )
    with contextlib.closing(decoded):
        for part in missing:
            rows: list[np.ndarray] = []
            kept: list[int] = []
            skipped: list[tuple[int, str]] = []
            for start in range(0, len(part.sources), batch):
                with _clock(report, "waiting"):
                    one = next(decoded)
                report.decoding += one.seconds
                if strict and one.skipped:
                    i, why = one.skipped[0]
                    raise ValueError(f"{part.sources[start + i].name}: {why}")
                with _clock(report, "computing"):
                    rows.append(encoder(one.pixels))
                kept += [start + i for i in one.kept]
                skipped += [(start + i, why) for i, why in one.skipped]
                note(len(part.sources[start : start + batch]))
            yield part, Result(np.concatenate(rows), np.array(kept, np.int64), skipped)


def _join(
    folder: Folder, pieces: Sequence[Part], out: pathlib.Path, shape: tuple[int, ...],
    about: dict[str, Any], list_path: pathlib.Path, strict: bool,
) -> list[dict[str, str]]:  # fmt: skip
    """All parts as one file, which is there whole or not at all; the images that it lacks."""
    names: list[str] = []
    left_out: list[dict[str, str]] = []
    for part in pieces:
        found = folder.load(part)
        names += [part.sources[i].name for i in found.kept]
        left_out += [{"image": part.sources[i].name, "reason": why} for i, why in found.skipped]
    if strict and left_out:  # by an earlier run that was not
        raise ValueError(f"{left_out[0]['image']}: {left_out[0]['reason']}")
    if left_out:
        replace(list_path, json.dumps(left_out, indent=1).encode())
    else:
        list_path.unlink(missing_ok=True)
    if not names:
        folder.remove()  # there is nothing to go on from
        first = left_out[0]
        raise ValueError(
            f"none of the {len(left_out)} images could be read ({first['image']}:"
            f" {first['reason']}); {list_path} lists them"
        )
    joined = folder.path / out.name
    rows = (folder.load(part).rows for part in pieces)
    vector_files.write(joined, names, rows, shape, about)
    for place in (vector_files.beside(joined), joined):  # names first: the array is the sign
        if place.is_file():
            _flush(place)
            os.replace(place, out.with_name(place.name))
    return left_out


def _flush(path: pathlib.Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
    """What is wrong with a disk, with what to do about it."""
    try:
        yield
    except BrokenPipeError:  # of who reads the progress
        raise
    except OSError as error:
        if error.errno is None or error.strerror is None:  # in words already
            raise
        raise OSError(
            f"{path} cannot be written ({error.strerror}): mend that and run the same command"
            f" again: what is finished stays"
        ) from error


@contextlib.contextmanager
def _clock(report: Report, what: str) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        setattr(report, what, getattr(report, what) + time.perf_counter() - begin)


__all__ = ["BATCH", "Report", "embed"]
