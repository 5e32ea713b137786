"""Find the images that are most like a given one, among those that vitkern embed has seen.

IMAGE is a file, a folder, a pattern in quotes, an http(s) address, or - for standard input. The
file of vectors knows the model that made it, which embeds the query in the same way; other weights
are refused.

  vitkern search vectors.parquet cat.jpg
  vitkern search vectors.parquet cat.jpg --top 5 --save sheet.png
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..contact_sheet import Cell
    from ..embedding import Vectors

MOST_QUERIES = 1000


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vectors", type=pathlib.Path, metavar="VECTORS")
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    parser.add_argument(
        "--top", type=int, default=10, metavar="K", help="answers per image (default 10)"
    )
    parser.add_argument(
        "--weights", metavar="FILE", help="where the weights are now (where they were)"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, ... (cpu)")
    parser.add_argument(
        "--save", type=pathlib.Path, metavar="FILE", help="a contact sheet: query, then answers"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> int:
    if given.top < 1:
        raise ValueError(f"--top {given.top}: ask for at least one answer")
    from .. import contact_sheet, image_sources
    from ..embedding import Encoder, Vectors, nearest

    sources = image_sources.expand(given.images)
    if len(sources) > MOST_QUERIES:
        raise ValueError(f"{len(sources)} images to look for, at most {MOST_QUERIES}")
    if given.save is not None:
        contact_sheet.check_path(given.save)
        cells = len(sources) * (given.top + 1)
        if cells > contact_sheet.MOST_CELLS:
            raise ValueError(f"--save: {cells} pictures, at most {contact_sheet.MOST_CELLS}")
    vectors = Vectors.open(given.vectors)
    encoder = Encoder.of_recipe(vectors.about["recipe"], given.weights, given.device)
    answers: list[dict[str, Any]] = []
    sheet: list[Cell] = []
    for source in sources:
        try:
            image = source.read()
        except (ValueError, OSError) as error:
            answers.append({"image": source.name, "error": str(error)})
            continue
        (found,) = nearest(vectors, encoder(encoder.pixels(image)[None]), given.top)
        near = [{"image": one.image, "similarity": round(one.similarity, 6)} for one in found]
        answers.append({"image": source.name, "nearest": near})
        if given.save is not None:
            sheet += row(vectors, source.name, image, near)
    if given.json:
        print(json.dumps(answers, indent=1))
    else:
        for answer in answers:
            _print(answer)
    if sheet:
        across = min(given.top, len(vectors)) + 1
        contact_sheet.draw(sheet, given.save, across)
        print(f"wrote {given.save}", file=sys.stderr)
    return 1 if any("error" in answer for answer in answers) else 0


def row(vectors: Vectors, name: str, image: Image, near: list[dict[str, Any]]) -> list[Cell]:
    """A query and its answers; one whose file is gone is a grey square."""
    from PIL import Image as pillow

    from .. import image_files
    from ..contact_sheet import THUMBNAIL, Caption, Cell, thumbnail

    cells = [Cell(thumbnail(image), [Caption(pathlib.PurePath(name).name), Caption("looked for")])]
    for one in near:
        lines = [Caption(pathlib.PurePath(one["image"]).name, faint=True)]
        try:
            picture = thumbnail(image_files.read(vectors.place(one["image"])))
        except (ValueError, OSError):
            picture = pillow.new("RGB", (THUMBNAIL, THUMBNAIL), "#e5e7eb")
            lines = [Caption(f"{lines[0].text} is gone", faint=True)]
        share = max(0.0, one["similarity"])
        cells.append(Cell(picture, [*lines, Caption(f"{one['similarity']:.3f}", share)]))
    return cells


def _print(answer: dict[str, Any]) -> None:
    from ..image_sources import printable

    if "error" in answer:
        print(f"vitkern search: {printable(answer['error'])}", file=sys.stderr)
        return
    print(printable(answer["image"]))
    for one in answer["nearest"]:
        print(f"  {one['similarity']:7.4f}  {printable(one['image'])}")
