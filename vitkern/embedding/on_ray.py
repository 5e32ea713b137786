"""The same job on a Ray cluster, through Ray Data: parts go out, their vectors come back.

An actor holds the model; it decodes and computes a part as `job.computed` does on one machine, in
the same batches. This process writes the parts' files, so that a kill costs no more than elsewhere.
All nodes must see images and weights under the same paths, and have vitkern.
"""

from __future__ import annotations

import importlib
import json
import logging
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
    """An actor: the model of a recipe, called with one part at a time.

    What the user can mend comes back as words: Ray would start an actor that fails again and again.
    """

    def __init__(self, recipe: dict[str, Any], device: str, batch: int, workers: int) -> None:
        self.batch, self.workers = batch, workers
        self.encoder: Encoder | None = None
        self.error = ""
        try:
            self.encoder = Encoder.of_recipe(recipe, device=device)
        except (ValueError, OSError, ImportError) as error:
            self.error = str(error)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        from .job import Report, computed

        names, root = json.loads(row["names"]), pathlib.Path(row["root"])
        part = Part([Source(name, root / name) for name in names], "")
        report = Report("", len(names), workers=self.workers)
        found = Result(np.zeros(0, np.float32), np.zeros(0, np.int64), [])
        if self.encoder is not None:
            try:
                ((_, found),) = computed(
                    self.encoder, [part], self.batch, False, report, lambda images: None
                )
            except (ValueError, OSError) as error:
                self.error = str(error)
        return {
            "part": row["part"], "error": self.error, "skipped": json.dumps(found.skipped),
            "rows": found.rows.tobytes(), "kept": found.kept.tobytes(),
            **{name: getattr(report, name) for name in TIMES},
        }  # fmt: skip


def _rows(ray: Any, data: Any) -> Iterator[dict[str, Any]]:
    """What the cluster sends back; what went wrong there is one line."""
    try:
        yield from data.iter_rows()
    except ray.exceptions.RayError as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"on the Ray cluster: {said[-1] if said else error!r}") from error


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
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it announces every step
    cpus = min(float(report.workers), ray.cluster_resources().get("CPU", 1.0))
    actors = min(len(missing), max(1, int(ray.cluster_resources().get("CPU", 1.0) // cpus)))
    gpus = 1 if encoder.model.device.type == "cuda" else None
    rows = [
        {"part": i, "root": os.getcwd(), "names": json.dumps([s.name for s in part.sources])}
        for i, part in enumerate(missing)
    ]
    data = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        PartEncoder,
        fn_constructor_args=(encoder.recipe, encoder.model.device.type, batch, report.workers),
        num_cpus=cpus,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors),
        num_gpus=gpus,
    )
    report.workers *= actors
    for row in _rows(ray, data):
        if row["error"]:
            raise ValueError(f"on the Ray cluster: {row['error']}")
        part = missing[int(row["part"])]
        skipped = [(int(i), str(why)) for i, why in json.loads(row["skipped"])]
        report.decoding += row["decoding"]
        report.computing += row["computing"] / actors  # side by side, as one clock sees them
        report.waiting += row["waiting"] / actors
        if strict and skipped:
            raise ValueError(f"{part.sources[skipped[0][0]].name}: {skipped[0][1]}")
        note(len(part.sources))
        rows_found = np.frombuffer(row["rows"], np.float32).reshape(-1, *encoder.shape)
        yield part, Result(rows_found, np.frombuffer(row["kept"], np.int64), skipped)
