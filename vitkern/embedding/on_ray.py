"""The same job on a Ray cluster, through Ray Data: parts go out, their vectors come back.

An actor holds the model; it decodes and computes a part as `job.computed` does on one machine, in
the same batches. This process writes the parts' files, so that a kill costs no more than elsewhere.
All nodes must see images and weights under the same paths, and have vitkern.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..image_sources import Source
from .encoder import Encoder
from .parts import Part, Result

if TYPE_CHECKING:
    from .job import Report

TIMES = ("decoding", "computing", "waiting")


class PartEncoder:
    """An actor: the model of a recipe, called with one part at a time."""

    def __init__(self, recipe: dict[str, Any], device: str, batch: int, workers: int) -> None:
        self.encoder = Encoder.of_recipe(recipe, device=device)
        self.batch, self.workers = batch, workers

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        from .job import Report, computed

        names, root = json.loads(row["names"]), pathlib.Path(row["root"])
        sources = [Source(name, root / name) for name in names]
        report = Report("", len(sources), workers=self.workers)
        part = Part(sources, "")
        ((_, found),) = computed(
            self.encoder, [part], self.batch, False, report, lambda images: None
        )
        times = {name: getattr(report, name) for name in TIMES}
        said = json.dumps(found.skipped)
        return {
            "part": row["part"],
            "rows": found.rows,
            "kept": found.kept,
            "skipped": said,
            **times,
        }


def imported() -> Any:
    """Ray with its Data; an ImportError says how to get them."""
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise ImportError("--where ray needs Ray: pip install 'vitkern[ray]'") from error
    return ray


def computed(
    encoder: Encoder, missing: Sequence[Part], batch: int, strict: bool, report: Report,
    note: Callable[[int], None],
) -> Iterator[tuple[Part, Result]]:  # fmt: skip
    """The parts as the cluster finishes them; `report.workers` threads, and CPUs, an actor."""
    if not missing:
        return
    ray = imported()
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    cpus = min(float(report.workers), ray.cluster_resources().get("CPU", 1.0))
    actors = max(1, int(ray.cluster_resources().get("CPU", 1.0) // cpus))
    gpus = 1 if encoder.model.device.type == "cuda" else None
    rows = [
        {"part": i, "root": os.getcwd(), "names": json.dumps([s.name for s in part.sources])}
        for i, part in enumerate(missing)
    ]
    data = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        PartEncoder,
        fn_constructor_args=(encoder.recipe, encoder.model.device.type, batch, report.workers),
        num_cpus=cpus,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(actors, len(rows))),
        num_gpus=gpus,
    )
    report.workers *= min(actors, len(rows))  # of all actors
    for row in data.iter_rows():
        part = missing[int(row["part"])]
        skipped = [(int(i), str(why)) for i, why in json.loads(row["skipped"])]
        for name in TIMES:
            setattr(report, name, getattr(report, name) + float(row[name]))
        if strict and skipped:
            raise ValueError(f"{part.sources[skipped[0][0]].name}: {skipped[0][1]}")
        note(len(part.sources))
        shape = (-1, *encoder.shape)
        yield (
            part,
            Result(
                np.asarray(row["rows"], np.float32).reshape(shape),
                np.asarray(row["kept"], np.int64).reshape(-1),
                skipped,
            ),
        )
