"""Write a model for others to run: as weights of another library, as ONNX, or as torch.export's.

MODEL is a file, a folder or a name on the Hugging Face Hub, whatever `vitkern.load` reads, or the
name of a variant (B/16), which has random weights. What is written:

  safetensors  one file, which keeps configuration and class names; vitkern.load reads it
  timm         the same names and shapes, as timm's models load them
  huggingface  a folder with config.json, of the model of transformers that fits
  onnx         a graph of plain operators; compared with the model, if ONNX Runtime is there
  torch        torch.export's .pt2, loaded back and compared

and further layouts of weights: torchvision, hf_vit, hf_deit, hf_dinov2, hf_dinov3, hf_clip,
hf_siglip, hf_beit, open_clip, beit, dinov2, eva, jax.

  vitkern export deit_tiny.safetensors -o deit_tiny.onnx
  vitkern export deit_tiny.safetensors -o deit-tiny-384 --to huggingface --image-size 384
  vitkern export deit_tiny.safetensors -o features.pt2 --classes 0
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..model import ViT

GRAPHS = ("onnx", "torch")
LAYOUTS = (
    "timm", "huggingface", "torchvision", "hf_vit", "hf_deit", "hf_dinov2", "hf_dinov3", "hf_clip",
    "hf_siglip", "hf_beit", "open_clip", "beit", "dinov2", "eva", "jax",
)  # fmt: skip
KINDS = ("safetensors", *LAYOUTS, *GRAPHS)
BY_SUFFIX = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "torch", ".npz": "jax"}
DTYPES = ("float32", "float16", "bfloat16")
OPSET = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "-o", "--out", type=pathlib.Path, required=True, metavar="FILE",
        help="a file, or a folder for Hugging Face's",
    )  # fmt: skip
    parser.add_argument(
        "--to", choices=KINDS, metavar="WHAT",
        help="safetensors, timm, huggingface, onnx, torch, ... (what FILE's ending says)",
    )  # fmt: skip
    parser.add_argument(
        "--classes", type=int, metavar="N", help="0: without the head; N: a new one of zeros"
    )
    parser.add_argument(
        "--image-size", metavar="PIXELS", help="positions are moved to it: 384, or 384x256 (Y, X)"
    )
    parser.add_argument("--interpolation", choices=("bicubic", "bilinear"), default="bicubic")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of parameters (their own; graphs: float32)"
    )
    parser.add_argument("--base", metavar="WEIGHTS", help="what a LoRA adapter belongs to")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE",
        help="a field of ViTConfig that the checkpoint does not tell (heads=12)",
    )  # fmt: skip
    parser.add_argument("--opset", type=int, default=OPSET, help=f"of ONNX (default {OPSET})")
    parser.add_argument(
        "--batch", type=int, metavar="B", help="onnx, torch: a fixed batch (any batch)"
    )
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> int:
    kind = given.to or BY_SUFFIX.get(given.out.suffix)
    if kind is None:
        endings = ", ".join(BY_SUFFIX)
        raise ValueError(f"{given.out}: say what to write by --to, or by an ending: {endings}")
    check_path(given.out, kind, given.force)
    if given.batch is not None and (given.batch < 1 or kind not in GRAPHS):
        raise ValueError(f"--batch {given.batch}: at least 1, for {' and '.join(GRAPHS)} alone")
    import vitkern

    from .. import exporting

    model, notes = read(given, kind)
    answer: dict[str, Any] = {"out": str(given.out), "to": kind}
    if kind == "onnx":
        found = exporting.to_onnx(
            model, given.out, opset=given.opset, batch=given.batch, notes=notes
        )
        answer |= {"opset": given.opset, "difference": found.difference, "rms": found.rms}
    elif kind == "torch":
        found = exporting.to_torch(model, given.out, batch=given.batch)
        answer |= {"difference": found.difference, "rms": found.rms}
    else:
        layout = "timm" if kind == "safetensors" else kind
        kept = notes if kind == "safetensors" else None
        answer["layout"] = vitkern.save(model, given.out, layout, kept)
    files = sorted(given.out.rglob("*")) if given.out.is_dir() else [given.out]
    answer["bytes"] = sum(one.stat().st_size for one in files if one.is_file())
    if given.json:
        print(json.dumps(answer))
    else:
        _print(answer)
    return 0


def check_path(out: pathlib.Path, kind: str, force: bool) -> None:
    """Refuse what cannot be written, before the model is read."""
    wanted = {"onnx": ".onnx", "torch": ".pt2"}.get(kind)
    if wanted and out.suffix != wanted:
        raise ValueError(f"{out}: the file's name must end in {wanted}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out}: there is no folder {out.parent}")
    used = any(out.iterdir()) if out.is_dir() else out.exists()
    if used and not force:
        raise FileExistsError(f"{out} exists: name another, or --force to replace it")


def read(given: argparse.Namespace, kind: str) -> tuple[ViT, dict[str, Any]]:
    """The model, and what its file says besides: class names, the share of an image it saw."""
    import torch

    from .. import ViT, load, trained_file
    from ..config import ViTConfig

    changes = dict(field(text) for text in given.set)
    unknown = sorted(changes.keys() - {one.name for one in dataclasses.fields(ViTConfig)})
    if unknown:
        raise ValueError(f"--set {unknown[0]}: ViTConfig has no such field")
    if given.image_size is not None:
        changes["image_size"] = size(given.image_size)
    name = given.dtype or ("float32" if kind in GRAPHS else None)  # which every runtime takes
    dtype = getattr(torch, name) if name else None
    if not pathlib.Path(given.model).exists() and is_variant(given.model):
        if given.base is not None:
            raise ValueError("--base is for LoRA adapters")
        if given.classes is not None:
            changes["classes"] = given.classes
        print(f"vitkern export: {given.model} has random weights", file=sys.stderr)
        torch.manual_seed(0)
        return ViT(ViTConfig.named(given.model).replace(**changes), dtype=dtype).eval(), {}
    model = load(
        given.model, classes=given.classes, interpolation=given.interpolation, dtype=dtype,
        base=given.base, **changes,
    )  # fmt: skip
    notes: dict[str, Any] = {}
    if trained_file.is_one(given.model):
        _, names, crop = trained_file.read(given.model)
        if len(names) == model.config.classes and not given.classes:
            notes = {"classes": names, "eval_crop": crop}
    return model, notes


def is_variant(name: str) -> bool:
    from ..config import ViTConfig

    try:
        ViTConfig.named(name)
    except ValueError:
        return False
    return True


def field(text: str) -> tuple[str, Any]:
    """FIELD=VALUE; a value is JSON, or else a word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set {text}: expected FIELD=VALUE, such as heads=12")
    try:
        found = json.loads(value)
    except ValueError:
        found = value
    return name, tuple(found) if isinstance(found, list) else found


def size(text: str) -> int | tuple[int, int]:
    """384, or 384x256."""
    try:
        sides = [int(side) for side in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError(f"--image-size {text}: expected pixels, 384 or 384x256")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _print(answer: dict[str, Any]) -> None:
    what = f"weights, {answer['layout']}'s names" if "layout" in answer else ""
    if answer["to"] == "onnx":
        what = f"ONNX, opset {answer['opset']}"
    elif answer["to"] == "torch":
        what = "torch.export"
    print(f"{answer['out']}: {what}, {answer['bytes'] / 1e6:,.1f} MB")
    if "difference" not in answer:
        return
    runner = "ONNX Runtime" if answer["to"] == "onnx" else "loaded back, it"
    if answer["difference"] is None:
        print("not checked: ONNX Runtime is not installed (pip install 'vitkern[onnx]')")
    else:
        print(
            f"{runner} differs from the model by {answer['difference']:.1e} at most, at an rms of"
            f" {answer['rms']:.1e}"
        )
