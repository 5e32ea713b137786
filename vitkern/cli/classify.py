"""Name what is on photographs, with a checkpoint in timm's layout.

Plain ViTs and DeiTs are recognised by the checkpoint's shapes; anything else is named with --model.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..image_files import NORMALISATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from ..model import ViT

PRECISIONS = ("fp32", "tf32", "bf16", "int8")
BATCH = 8  # images a call; more gains nothing on a CPU and costs memory
LARGEST_NAMES = 64 << 20  # bytes; ImageNet-21k's names are 1 MB


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", type=pathlib.Path, metavar="IMAGE")
    parser.add_argument(
        "--weights", type=pathlib.Path, required=True, metavar="FILE", help=".safetensors or .pt"
    )
    parser.add_argument(
        "--classes",
        type=pathlib.Path,
        metavar="JSON",
        help='names: a list, {"0": name} or {"0": [id, name]}',
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the variant, where shapes alone do not tell"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument(
        "--top", type=int, default=5, metavar="K", help="answers per image (default 5)"
    )
    parser.add_argument("--normalisation", choices=tuple(NORMALISATIONS), default="imagenet")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> int:
    if given.top < 1:
        raise ValueError(f"--top {given.top}: ask for at least one answer")
    from ..weights import timm

    state = timm.read(given.weights)
    model = build(state, given.model, given.weights)
    names = class_names(given.classes, model.config.classes)
    answers = list(classify(model, given, names))
    if given.json:
        print(json.dumps(answers, indent=1))
    for answer in answers:
        if given.json:
            continue
        if "error" in answer:
            print(f"vitkern classify: {answer['error']}", file=sys.stderr)
            continue
        print(answer["image"])
        for top in answer["top"]:
            print(f"  {top['probability']:7.2%}  {top['label']}")
    return 1 if any("error" in answer for answer in answers) else 0


def build(state: dict[str, Tensor], name: str | None, path: pathlib.Path) -> ViT:
    """The model these weights belong to, in eval mode."""
    from .. import ViT
    from ..weights import timm

    variant, changes = recognise(state, path) if name is None else (name, {})
    changes["classes"] = timm.classes(state, str(path))
    try:
        wanted = ViT(variant, device="meta", **changes).state_dict()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    misfit = compare(state, wanted)
    if misfit:
        raise ValueError(
            f"{path} does not fit {variant}: {misfit}: name the right one with --model"
        )
    if not changes["classes"]:
        raise ValueError(f"{path} has no classifier (head.weight): it cannot name anything")
    try:
        model = ViT(variant, **changes).eval()
        model.load_state_dict(state)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(f"{path}: {variant} does not fit into this machine's memory") from error
    return model


def compare(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """How the first tensor that differs from the model's does so; "" if none does."""
    for name in (*wanted, *state):
        if name not in state:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is not of this model"
        if not state[name].is_floating_point():
            return f"{name} is {state[name].dtype}, expected floating point"
        if state[name].shape != wanted[name].shape:
            shapes = (tuple(t[name].shape) for t in (state, wanted))
            return "{} has shape {}, expected {}".format(name, *shapes)
    return ""


def recognise(state: dict[str, Tensor], path: pathlib.Path) -> tuple[str, dict[str, Any]]:
    """Variant and image size of a plain ViT, from the shapes of its weights."""
    from ..config import PATCHES, VARIANTS

    shapes = [
        tuple(state[name].shape) if name in state else ()
        for name in ("patch_embed.proj.weight", "pos_embed")
    ]
    if [len(shape) for shape in shapes] != [4, 3]:
        raise ValueError(
            f"{path}: not timm's layout of a ViT (patch_embed.proj.weight and pos_embed have shapes"
            f" {shapes[0]} and {shapes[1]}): name it with --model"
        )
    (D, _, patch, _), (_, rows, _) = shapes
    depth = len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    side = math.isqrt(max(rows - 1, 0))
    for variant, (width, blocks, _, _) in VARIANTS.items():
        if (width, blocks) == (D, depth) and side * side == rows - 1 > 0 and patch in PATCHES:
            return f"{variant}/{patch}", {"image_size": side * patch}
    raise ValueError(
        f"{path}: no plain ViT has width {D}, depth {depth}, patches of {patch} and {rows}"
        " positions: name it with --model"
    )


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


def classify(model: ViT, given: argparse.Namespace, names: list[str]) -> Iterator[dict[str, Any]]:
    """One answer per image, in order; an image that cannot be read answers with its error."""
    import torch

    from .. import accelerate, image_files

    model = accelerate(model, precision=given.precision)
    size = model.config.pixels
    for start in range(0, len(given.images), BATCH):
        paths = given.images[start : start + BATCH]
        pixels: dict[pathlib.Path, torch.Tensor] = {}
        errors: dict[pathlib.Path, str] = {}
        for path in paths:
            try:
                pixels[path] = image_files.prepare(
                    image_files.read(path), size, given.normalisation
                )
            except (ValueError, OSError) as error:
                errors[path] = str(error)
        rows: Iterator[torch.Tensor] = iter(())
        if pixels:
            with torch.inference_mode():
                logits = model(torch.stack(list(pixels.values()))).float()
            if not logits.isfinite().all():
                raise ValueError(
                    f"{given.weights}: the model answers NaN or Inf: its weights are bad"
                )
            rows = iter(logits.softmax(-1))
        shares = {path: next(rows) for path in pixels}
        for path in paths:
            if path in errors:
                yield {"image": str(path), "error": errors[path]}
                continue
            best = shares[path].topk(min(given.top, len(names)))
            yield {
                "image": str(path),
                "top": [
                    {"index": i, "label": names[i], "probability": round(p, 6)}
                    for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
                ],
            }
