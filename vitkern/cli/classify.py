"""Name what is on photographs, with a checkpoint in timm's layout.

Plain ViTs and DeiTs are recognised by the checkpoint's shapes; anything else is named with --model.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from .images import NORMALISATIONS

BATCH = 8  # images a call; more gains nothing on a CPU and costs memory


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
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32")
    parser.add_argument(
        "--top", type=int, default=5, metavar="K", help="answers per image (default 5)"
    )
    parser.add_argument("--normalisation", choices=tuple(NORMALISATIONS), default="imagenet")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> int:
    if given.top < 1:
        raise ValueError(f"--top {given.top}: ask for at least one answer")
    from ..weights import timm

    state = timm.unwrapped(timm.read(given.weights))
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


def build(state: dict, name: str | None, path: pathlib.Path):
    """The model these weights belong to, in eval mode."""
    from .. import ViT

    variant, changes = recognise(state, path) if name is None else (name, {})
    changes["classes"] = state["head.weight"].shape[0] if "head.weight" in state else 0
    model = ViT(variant, **changes).eval()
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(
            f"{path} does not fit {variant}: name the right one with --model"
            f" ({' '.join(str(error).split()[:40])} ...)"
        ) from error
    if not model.config.classes:
        raise ValueError(f"{path} has no classifier (head.weight): it cannot name anything")
    return model


def recognise(state: dict, path: pathlib.Path) -> tuple[str, dict]:
    """Variant and image size of a plain ViT, from the shapes of its weights."""
    from ..config import VARIANTS

    try:
        D, _, patch, _ = state["patch_embed.proj.weight"].shape
        rows = state["pos_embed"].shape[1]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: not timm's layout of a ViT ({error} is missing or odd): name it with --model"
        ) from error
    depth = len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    side = round((rows - 1) ** 0.5)
    for variant, (width, blocks, _, _) in VARIANTS.items():
        if (width, blocks) == (D, depth) and side * side == rows - 1:
            return f"{variant}/{patch}", {"image_size": side * patch}
    raise ValueError(
        f"{path}: no plain ViT has width {D}, depth {depth} and {rows} positions:"
        " name it with --model"
    )


def class_names(path: pathlib.Path | None, count: int) -> list[str]:
    """A name for every class; "class 17" without a file."""
    names = {i: f"class {i}" for i in range(count)}
    if path is None:
        return list(names.values())
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if isinstance(found, list):
        found = dict(enumerate(found))
    if not isinstance(found, dict) or len(found) != count:
        raise ValueError(f"{path}: holds other classes than the model's {count}")
    for index, name in found.items():
        try:
            label = name[-1] if isinstance(name, list) else name
            names[int(index)] = label.replace("_", " ")
        except (ValueError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path}: {index!r}: {name!r} is not a class index and a name"
            ) from error
    if len(names) > count:
        raise ValueError(f"{path}: holds other classes than the model's {count}")
    return [names[i] for i in range(count)]


def classify(model, given: argparse.Namespace, names: list[str]):
    """One answer per image, in order; an image that cannot be read answers with its error."""
    import torch

    from .. import accelerate
    from . import images

    model = accelerate(model, precision=given.precision)
    grid, patch = model.config.grid, model.config.patch_size
    size = (grid[0] * patch, grid[1] * patch)
    for start in range(0, len(given.images), BATCH):
        paths = given.images[start : start + BATCH]
        pixels: dict[pathlib.Path, torch.Tensor] = {}
        errors: dict[pathlib.Path, str] = {}
        for path in paths:
            try:
                pixels[path] = images.prepare(images.read(path), size, given.normalisation)
            except (ValueError, OSError) as error:
                errors[path] = str(error)
        rows = iter(())
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
