"""Whole models over batch size, threads and image size, in turns with eager PyTorch (--scaling)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from benchmarks import models
from benchmarks.machine import precisions
from vitkern import ViT
from vitkern.precision import PRECISIONS

KIND = "scaling"
SIZE = 224
RESOLUTIONS = (SIZE, 384, 512, 768, 1024)
BATCHES = {"S/16": (1, 2, 4, 8, 16, 32), "B/16": (1, 2, 4, 8, 16)}
LATENCY = ("Ti/16", "S/16", "B/16", "L/16")  # at batch 1
THREADS = {"S/16": (1, 8)}  # the batches at which threads are counted up


class Point(NamedTuple):
    """What is timed, at one precision."""

    name: str
    batch: int
    size: int
    threads: int


def thread_counts(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [2**i for i in range(most.bit_length()) if 2**i < most] + [most]


def points(most: int) -> list[Point]:
    """Every point of the sweeps once, a model's together; most of them belong to several sweeps."""
    found = [Point(name, 1, SIZE, most) for name in LATENCY]
    found += [Point(name, b, SIZE, most) for name, batches in BATCHES.items() for b in batches]
    found += [
        Point(name, b, SIZE, threads)
        for name, batches in THREADS.items()
        for b in batches
        for threads in thread_counts(most)
    ]
    found += [Point("S/16", 1, size, most) for size in RESOLUTIONS]
    return sorted(set(found), key=lambda p: (LATENCY.index(p.name), p.size, p.threads, p.batch))


def cases(quick: bool) -> list:
    """(point, precision); quick keeps Ti/16 at batch 1 in the first precision."""
    found = [(point, p) for point in points(torch.get_num_threads()) for p in precisions()]
    return [
        pytest.param(
            (point, p), id=f"{point.name}-{point.batch}-{point.size}px-{point.threads}t-{p}"
        )
        for point, p in (found[:1] if quick else found)
    ]


@functools.lru_cache(maxsize=1)
def original(name: str, size: int) -> ViT:
    torch.manual_seed(0)
    return ViT(name, image_size=size).eval()


def test_scaling(case, compare) -> None:
    point, precision = case
    name, batch, size, threads = point
    model = original(name, size)
    competing = models.contestants(model, precision)
    image = torch.randn(batch, 3, size, size)
    models.require_engine(competing["native"], image)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(
            models.calls(competing, image, precision),
            name,
            {"B": batch, "Y": size, "X": size, "threads": threads},
            str(PRECISIONS[precision].dtype)[6:],
            precision=precision,
            flops=models.flops(model, batch, size),
            native_flops=models.engine_flops(model, batch, size),
            bytes_moved=models.bytes_moved(model, image, precision),
            retire_slow=True,
        )
    finally:
        torch.set_num_threads(before)
