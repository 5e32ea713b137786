"""Name what is on photographs, with weights of your own or with the model that the package brings.

IMAGE is a file, a folder, a pattern in quotes, an http(s) address, or - for standard input. Without
--weights the package's small model answers, which knows ten things: airplane, automobile, bird,
cat, deer, dog, frog, horse, ship, truck. Weights are what `vitkern.load` reads, in
any layout that it knows; --model names the architecture where tensors do not tell it all.

Examples:
    vitkern predict cat.jpg
    vitkern predict "photos/*.jpg" --top 3 --json
    vitkern predict photos/ --weights deit_tiny.safetensors --classes imagenet.json --save sheet.png
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..image_files import NORMALISATIONS
from ..predictor import Predictor

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ..image_sources import Source

ALIASES = ("classify",)
PRECISIONS = ("fp32", "tf32", "bf16", "int8")
BATCH = 8  # images a call; more gains nothing on a CPU and costs memory
LARGEST_NAMES = 64 << 20  # bytes; ImageNet-21k's names are 1 MB


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and what it wants of images: what `open_predictor` reads."""
    parser.add_argument(
        "--weights", type=pathlib.Path, metavar="FILE", help="a file or folder (the own model)"
    )
    parser.add_argument(
        "--classes",
        "--labels",
        type=pathlib.Path,
        metavar="JSON",
        help='names: a list, {"0": name} or {"0": [id, name]}',
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the variant, where shapes alone do not tell"
    )
    parser.add_argument(
        "--normalisation", choices=tuple(NORMALISATIONS), help="mean and std (the model's own)"
    )


def precision_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="of matmuls (fp32, or a packed file's own)"
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    model_arguments(parser)
    precision_argument(parser)
    parser.add_argument(
        "--top", type=int, default=5, metavar="K", help="answers per image (default 5)"
    )
    parser.add_argument(
        "--batch", type=int, default=BATCH, metavar="B", help=f"images a call (default {BATCH})"
    )
    parser.add_argument(
        "--save", type=pathlib.Path, metavar="FILE", help="a contact sheet with the answers"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> int:
    if given.top < 1:
        raise ValueError(f"--top {given.top}: ask for at least one answer")
    if given.batch < 1:
        raise ValueError(f"--batch {given.batch}: a call takes at least one image")
    from .. import contact_sheet, image_sources

    if given.save is not None:
        contact_sheet.check_path(given.save)
    sources = image_sources.expand(given.images)
    if given.save is not None and len(sources) > contact_sheet.MOST_CELLS:
        raise ValueError(f"--save: {len(sources)} images, at most {contact_sheet.MOST_CELLS}")
    predictor = open_predictor(given)
    answers, cells = [], []
    for answer, image in predict(predictor, sources, given):
        answers.append(answer)
        if not given.json:
            _print(answer)
        if given.save is not None and image is not None:
            cells.append(_cell(answer, image))
    if given.json:
        print(json.dumps(answers, indent=1))
    if cells:
        contact_sheet.draw(cells, given.save)
        print(f"wrote {given.save}", file=sys.stderr)
    return 1 if any("error" in answer for answer in answers) else 0


def _print(answer: dict[str, Any]) -> None:
    if "error" in answer:
        print(f"vitkern predict: {answer['error']}", file=sys.stderr)
        return
    print(answer["image"])
    for top in answer["top"]:
        print(f"  {top['probability']:7.2%}  {top['label']}")


def _cell(answer: dict[str, Any], image: Image) -> Any:
    from ..contact_sheet import Caption, Cell

    lines = [Caption(pathlib.PurePath(answer["image"]).name, faint=True)]
    for top in answer["top"]:
        text = f"{top['probability']:4.0%}  {top['label'].split(',')[0]}"
        lines.append(Caption(text, top["probability"]))
    return Cell(image, lines)


def open_predictor(given: argparse.Namespace, headless: bool = False) -> Predictor:
    """The model that the flags ask for, packed at their precision; `headless`: even without a
    classifier, which names nothing."""
    from .. import accelerate, opening

    model, names, crop, path = opening.opened(given.weights, given.model)
    if not model.config.classes and not headless:
        raise ValueError(f"{path} has no classifier: it cannot name anything")
    if names is None or given.classes is not None:
        names = class_names(given.classes, model.config.classes)
    asked = NORMALISATIONS[given.normalisation] if given.normalisation else None
    c = model.config
    own = (c.mean, c.std) if c.mean is not None and c.std is not None else None
    if c.channels != 3:
        raise ValueError(f"{path}: a model of {c.channels} channels; photographs have 3")
    pixels = asked or own or NORMALISATIONS["imagenet"]
    precision = given.precision or model.precision or "fp32"
    if model.released is None:
        model = accelerate(model, precision)
    elif precision != model.precision:
        raise ValueError(
            f"{path} is packed for {model.precision} and holds no weights for {precision}: leave"
            f" --precision out, or give the checkpoint that it was made of"
        )
    return Predictor(model, names, pixels, crop, path)


def predict(
    predictor: Predictor, sources: list[Source], given: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], Image | None]]:
    """One answer per image, in order, with its thumbnail if it will be drawn.

    An image that cannot be read answers with its error.
    """
    import torch

    from .. import contact_sheet

    model, names = predictor.model, predictor.names
    for start in range(0, len(sources), given.batch):
        batch = sources[start : start + given.batch]
        found: list[tuple[Tensor, Image | None] | str] = []  # or the error
        for source in batch:
            try:
                image = source.read()
            except (ValueError, OSError) as error:
                found.append(str(error))
                continue
            found.append(
                (predictor.prepared(image), contact_sheet.thumbnail(image) if given.save else None)
            )
        rows: Iterator[Tensor] = iter(())
        good = [one[0] for one in found if not isinstance(one, str)]
        if good:
            with torch.inference_mode():
                logits = model(torch.stack(good)).float()
            if not logits.isfinite().all():
                raise ValueError(
                    f"{predictor.source}: the model answers NaN or Inf: its weights are bad"
                )
            rows = iter(logits.softmax(-1))
        for source, one in zip(batch, found, strict=True):
            if isinstance(one, str):
                yield {"image": source.name, "error": one}, None
                continue
            best = next(rows).topk(min(given.top, len(names)))
            top = [
                {"index": i, "label": names[i], "probability": round(p, 6)}
                for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
            yield {"image": source.name, "top": top}, one[1]


def class_names(path: pathlib.Path | None, count: int) -> list[str]:
    """A name for every class; "class 17" without a file."""
    if path is None:
        return [f"class {i}" for i in range(count)]
    if path.stat().st_size > LARGEST_NAMES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes are too many for a list of names")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if isinstance(found, list):
        found = dict(enumerate(found))
    if not isinstance(found, dict) or len(found) != count:
        raise ValueError(f"{path}: holds other classes than the model's {count}")
    names = {}
    for index, name in found.items():
        try:
            label = name[-1] if isinstance(name, list) else name
            label.encode()  # half of a surrogate pair cannot be printed
            names[int(index)] = label.replace("_", " ")
        except (ValueError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path}: {index!r:.80} does not name a class: give it a number and a text"
            ) from error
    if names.keys() != set(range(count)):
        raise ValueError(f"{path}: holds other classes than the model's {count}, 0 to {count - 1}")
    return [names[i] for i in range(count)]
