"""Writes a GPU's rows with the device's facts, and draws them."""

from __future__ import annotations

import pathlib

from benchmarks import rows
from benchmarks.gpu import tables
from benchmarks.gpu.cases import Selection
from benchmarks.gpu.device import Device


def destination(
    selection: Selection, whole: bool, output: pathlib.Path | None = None
) -> pathlib.Path:
    """Unless --output says so: what is complete is published, the rest is not."""
    return output or (rows.CUDA if selection.complete and whole else rows.PARTIAL)


def publish(
    found: list[dict],
    facts: dict[str, object],
    gpu: Device,
    path: pathlib.Path,
    folder: pathlib.Path | None = None,
) -> list[str]:
    """Rows into `path`, stamped with `facts` (taken before the run) and the clocks after it.

    Pictures go to `folder`, else beside a file of the user's own, else to build/bench. Returns what
    there is to say about it.
    """
    after = gpu.facts().get("clocks")
    rows.write(path, found, {**facts, "clocks_after": after} if after else facts)
    said = [f"{sum('us' in row for row in found)} rows in {path}"]
    ours = path.parent == rows.RESULTS
    folder = folder or (rows.ROOT / "build" / "bench" if ours else path.parent)
    try:
        said += [f"picture: {picture}" for picture in tables.draw(rows.read(path), folder)]
    except ImportError as error:
        said.append(f"no picture: {error}")
    if path == rows.CUDA:
        said.append("put them into README.md and docs: python -m benchmarks.report")
    return said
