"""Decoding beside computing: threads that read images ahead, in the order in which they are needed.

Pillow decodes and scales without holding Python's lock, and so do the kernels: both sides run at
once, without the copies and the start-up of processes.
"""

from __future__ import annotations

import collections
import concurrent.futures
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..image_sources import Source

if TYPE_CHECKING:
    from PIL.Image import Image

AHEAD = 2  # batches for each worker, decoded or in the making: what one batch may take longer


class Decoded(NamedTuple):
    """A batch: pixels (n, Y, X, 3) of the images that could be read, and which of it they are."""

    pixels: np.ndarray
    kept: list[int]
    skipped: list[tuple[int, str]]  # which, and why
    seconds: float  # that a worker took


def decode(
    sources: Sequence[Source], pixels: Callable[[Image], np.ndarray], size: tuple[int, int]
) -> Decoded:
    """One batch; a file that cannot be read is left out, with the reason."""
    begin = time.perf_counter()
    found = np.empty((len(sources), *size, 3), np.uint8)
    kept: list[int] = []
    skipped: list[tuple[int, str]] = []
    for i, source in enumerate(sources):
        try:
            source.name.encode()
            found[len(kept)] = pixels(source.read())
            kept.append(i)
        except UnicodeEncodeError:
            skipped.append((i, "its name is not UTF-8: rename it"))
        except (ValueError, OSError) as error:
            skipped.append((i, reason(error, source)))
    return Decoded(found[: len(kept)], kept, skipped, time.perf_counter() - begin)


def reason(error: Exception, source: Source) -> str:
    """Why an image was left out, without its name."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said.removeprefix(f"{source.path}: ")


def ahead(
    batches: Iterable[Sequence[Source]],
    one: Callable[[Sequence[Source]], Decoded],
    workers: int,
) -> Generator[Decoded, None, None]:
    """The batches, decoded by `workers` threads, in order, with few of them in memory."""
    waiting: collections.deque[concurrent.futures.Future[Decoded]] = collections.deque()
    rest = iter(batches)
    pool = concurrent.futures.ThreadPoolExecutor(workers, "decode")
    # Filters of warnings belong to the process: the decoders' own changes overlap between threads,
    # and the last word is said here, when all threads have ended.
    with warnings.catch_warnings():
        try:
            warnings.simplefilter("ignore")
            while True:
                while len(waiting) < AHEAD * workers:
                    batch = next(rest, None)
                    if batch is None:
                        break
                    waiting.append(pool.submit(one, batch))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
