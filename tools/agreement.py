"""What a real model says of photographs at each of vitkern's precisions, beside float64.

    python -m tools.agreement deit_tiny.safetensors photographs

For each precision: how many of the first answers are those of float64, how many are right where
the name of a file begins with its class (280_fox.jpg), and the error of the logits, rms relative to
their own. PyTorch's fp32 and bf16 stand beside them. Weights are what `vitkern.load` reads; the
photographs are the files of a folder. --write puts the rows into the results file of this class of
machines, benchmarks/results/agreement-CLASS.jsonl, and the tables into docs/performance.md.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import agreement, report
from vitkern import _C, ViT, image_files, load
from vitkern.bench import rows
from vitkern.bench.cases import machine_class, precisions
from vitkern.cli.predict import BATCH
from vitkern.contract import Error


class Photographs(NamedTuple):
    """Pixels as the model takes them, and the class of each, -1 where its name does not tell."""

    pixels: Tensor  # (photographs, C, Y, X)
    labels: Tensor


def read(folder: pathlib.Path, model: ViT) -> Photographs:
    """Those in a folder, in the order of their names; a ValueError where there are none."""
    endings = {".jpg", ".jpeg", ".png", ".webp"}
    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in endings)
    if not files:
        raise ValueError(f"{folder} has no photographs ({', '.join(sorted(endings))})")
    c = model.config
    size = c.pixels
    pixels = [image_files.prepare(image_files.read(path), size) for path in files]
    named = [re.match(r"(\d+)_", path.name) for path in files]
    labels = torch.tensor([int(found[1]) if found else -1 for found in named])
    return Photographs(torch.stack(pixels), labels)


def logits(model: ViT, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(some) for some in pixels.split(BATCH)])


def measured(model: ViT, shown: Photographs, name: str) -> list[dict[str, Any]]:
    """A row for PyTorch's fp32 and bf16 and for each precision of vitkern, against float64."""
    wide = ViT(model.config, dtype=torch.float64).eval()
    wide.load_state_dict(model.state_dict())
    truth = logits(wide, shown.pixels.double())
    del wide
    answers = {}
    for precision, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        plain = copy.deepcopy(model).to(dtype)
        plain.path = "reference"
        answers["torch", precision] = logits(plain, shown.pixels.to(dtype))
    for precision in precisions():
        model.precision = precision
        answers["native", precision] = logits(model, shown.pixels)
    model.precision = None
    known = shown.labels >= 0
    about = {
        "kind": "agreement",
        "model": name,
        "photographs": len(known),
        "named": int(known.sum()),
    }
    stamp = rows.stamp()
    return [
        {
            **about, "provider": provider, "precision": precision,
            "same": int((found.argmax(1) == truth.argmax(1)).sum()),
            "right": int((found.argmax(1) == shown.labels)[known].sum()),
            "error": Error.of(found, truth).rms, **stamp,
        }
        for (provider, precision), found in answers.items()
    ]  # fmt: skip


def write(found: list[dict[str, Any]]) -> pathlib.Path:
    """The results file of this class of machines, and the page with it."""
    path = agreement.published(machine_class(_C.cpu_facts()["flags"]))
    rows.write(path, found)
    page = report.PERFORMANCE
    text = agreement.text(agreement.all_published())
    page.write_text(report.between(page.read_text(), "agreement", text, page))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.agreement", description=__doc__.split("\n")[0]
    )
    parser.add_argument("weights", type=pathlib.Path, help="what vitkern.load reads")
    parser.add_argument("images", type=pathlib.Path, help="a folder of photographs")
    parser.add_argument("--name", help="what the table calls the model; default: the file's name")
    parser.add_argument("--write", action="store_true", help="the results file and the page")
    given = parser.parse_args(arguments)
    try:
        model = load(given.weights, dtype=torch.float32)
        shown = read(given.images, model)
    except (OSError, ValueError, ImportError) as error:
        print(f"agreement: {error}", file=sys.stderr)
        return 2
    found = measured(model, shown, given.name or given.weights.stem)
    print("\n".join(agreement.lines(found)))
    if given.write:
        print(f"wrote {write(found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
