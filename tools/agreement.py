"""What a real model says of photographs at each of vitkern's precisions, beside float64.

    python -m tools.agreement deit_tiny.safetensors photographs

For each precision: how many of the first answers are those of float64, how many are right where
the name of a file begins with its class (280_fox.jpg), and the error of the logits, rms relative to
their own. PyTorch's fp32 stands beside them. Weights are what `vitkern.load` reads; the photographs
are the files of a folder.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitkern import ViT, image_files, load
from vitkern.bench.cases import precisions
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


def table(model: ViT, shown: Photographs) -> list[str]:
    """Markdown: a line for PyTorch's fp32 and for each precision of vitkern."""
    wide = ViT(model.config, dtype=torch.float64).eval()
    wide.load_state_dict(model.state_dict())
    truth = logits(wide, shown.pixels.double())
    answers = {}
    model.path = "reference"
    answers["PyTorch fp32"] = logits(model, shown.pixels)
    model.path = "auto"
    for precision in precisions():
        model.precision = precision
        answers[f"vitkern {precision}"] = logits(model, shown.pixels)
    model.precision = None
    known, count = shown.labels >= 0, len(shown.labels)
    lines = ["| who | answers as float64 | right | error |", "|---|--:|--:|--:|"]
    for who, found in {"float64": truth, **answers}.items():
        same = int((found.argmax(1) == truth.argmax(1)).sum())
        right = int((found.argmax(1) == shown.labels)[known].sum())
        error = Error.of(found, truth).rms
        lines.append(f"| {who} | {same} of {count} | {right} of {int(known.sum())} | {error:.1e} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.agreement", description=__doc__.split("\n")[0]
    )
    parser.add_argument("weights", type=pathlib.Path, help="what vitkern.load reads")
    parser.add_argument("images", type=pathlib.Path, help="a folder of photographs")
    given = parser.parse_args(arguments)
    try:
        model = load(given.weights, dtype=torch.float32)
        shown = read(given.images, model)
    except (OSError, ValueError, ImportError) as error:
        print(f"agreement: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(model, shown)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
