"""Damaged checkpoints of every layout and format, through `vitkern.load`."""

from __future__ import annotations

import copy
import functools
import json
import pathlib
import random
import shutil
import tempfile
import zipfile
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import vitkern
from tests.layouts import originals
from vitkern.weights import files

from . import weight_files
from .outcome import OK, REFUSED, Case, judge

# Layouts that vitkern itself can write, and the models that fit them; then the originals' files.
WRITTEN: dict[str, dict[str, Any]] = {
    "timm": {"layer_scale": 0.1, "registers": 2, "position_covers_prefix": False},
    "torchvision": {},
    "hf_vit": {},
    "hf_deit": {"registers": 1},
    "hf_dinov2": {"layer_scale": 0.1, "classes": 0},
    "hf_clip": {"pre_norm": True, "classes": 0},
    "hf_siglip": {"class_token": False, "pool": "mean"},
    "hf_beit": {"position": "relative", "layer_scale": 0.1, "pool": "mean",
                "final_norm": "after_pool"},
    "open_clip": {"pre_norm": True, "norm_eps": 1e-5, "classes": 0},
}  # fmt: skip
SIZES: dict[str, Any] = dict(image_size=16, patch_size=8, width=8, depth=1, heads=2, mlp_width=16)
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"classes": 0}, {"classes": 4}, {"image_size": 32}, {"image_size": (8, 24)},
    {"strict": False}, {"heads": 1}, {"dtype": torch.bfloat16}, {"interpolation": "bilinear",
                                                                 "image_size": 24},
)  # fmt: skip


@functools.cache
def whole(layout: str) -> pathlib.Path:
    """A folder with a checkpoint that is as it should be; the process keeps it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="vitkern-fuzz-"))
    if layout in originals.WRITERS:
        originals.WRITERS[layout](originals.MODELS[layout](), folder)
        return folder
    torch.manual_seed(0)
    options = {"classes": 3, **SIZES, **WRITTEN[layout]}
    model = vitkern.ViT(vitkern.ViTConfig(**options))
    theirs = layout.startswith("hf_")
    vitkern.save(model, folder if theirs else folder / "model.safetensors", layout)
    return folder


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    layout = rng.choice((*WRITTEN, *originals.WRITERS))
    options, seed = rng.choice(OPTIONS), rng.randrange(2**31)
    damage = rng.choice(DAMAGES)

    def run() -> str:
        shutil.copytree(whole(layout), folder)
        own = random.Random(seed)
        try:
            path = damage(own, folder)
            found = vitkern.load(path or folder, **options)
            model = found[0] if isinstance(found, tuple) else found
            with torch.no_grad():
                size = (1, model.config.channels, *size_of(model))
                model(torch.zeros(size, dtype=model.dtype))
        except Exception as error:
            if judge(error) != REFUSED:
                raise
            return REFUSED
        return OK

    return Case(f"load {layout} {damage.__name__} {options} ({seed})", run)


def size_of(model: vitkern.ViT) -> tuple[int, int]:
    size = model.config.image_size
    return (size, size) if isinstance(size, int) else size


def weights(folder: pathlib.Path) -> pathlib.Path:
    return next(path for path in sorted(folder.iterdir()) if path.suffix != ".json")


# ---- what may be wrong ----


def nothing(rng: random.Random, folder: pathlib.Path) -> None:
    """Loads, or is refused for the options alone."""


def bytes_damaged(rng: random.Random, folder: pathlib.Path) -> None:
    path = weights(folder)
    kinds = [*weight_files.DAMAGES[path.suffix != ".safetensors"]]
    rng.choice(kinds)(rng, path)


def tensors_changed(rng: random.Random, folder: pathlib.Path) -> pathlib.Path | None:
    """Other names, shapes, dtypes and values, written in any of the formats."""
    path = weights(folder)
    state: object = copy.deepcopy(files.read(path))
    for _ in range(rng.choice((1, 1, 2, 4))):
        state = rng.choice(weight_files.CHANGES)(rng, state)
    new = path.with_suffix(rng.choice((".safetensors", ".bin", ".npz")))
    if new.suffix == ".npz":
        plain = state if isinstance(state, dict) else {}
        arrays = {str(n): _array(t) for n, t in plain.items() if isinstance(t, Tensor)}
        np.savez(new, **{n: a for n, a in arrays.items() if a is not None and "\0" not in n})
    elif not weight_files.save(state, new):
        return None
    return new


def _array(tensor: Tensor) -> np.ndarray | None:
    try:
        return tensor.numpy() if tensor.numel() < 2**24 else None
    except (TypeError, RuntimeError, ValueError):
        return None  # NumPy has no such dtype


def json_changed(rng: random.Random, folder: pathlib.Path) -> None:
    """A config.json that says something else."""
    deep = rng.choice((100, 10**5))
    odd = (0, -1, 1, 3, 2**63, 10**30, 1.5, None, "8", [], [16, 16], [8, 24, 3], {}, True, "gelu",
           float("nan"), "relu", "x" * 9999)  # fmt: skip
    found = sorted(folder.glob("*.json")) or [folder / "config.json"]
    path = rng.choice(found)
    if rng.random() < 0.2:
        texts = ("", "[]", "3", "{", "[" * deep, "\xff", '{"a":' * deep, "null", '{"model_cfg": 3}')
        path.write_text(rng.choice(texts), encoding="latin-1")
        return
    about = json.loads(path.read_text()) if path.exists() else {}
    keys = [*about, "vision_config", "model_type", "architecture", "model_cfg", "pretrained_cfg"]
    for _ in range(rng.choice((1, 2, 5))):
        about[rng.choice(keys)] = rng.choice(odd)
    path.write_text(json.dumps(about))


def sharded(rng: random.Random, folder: pathlib.Path) -> pathlib.Path:
    """Two shards and an index, which may lie."""
    path = weights(folder)
    state = {n: t.contiguous() for n, t in files.read(path).items()}
    path.unlink()
    names, places = sorted(state), {}
    for i in range(2):
        some = names[i::2]
        plain = {n: state[n].clone() for n in some}
        safetensors.torch.save_file(plain, folder / f"part-{i}.safetensors")
        places |= dict.fromkeys(some, f"part-{i}.safetensors")
    lies = ("../x.safetensors", "/dev/zero", "part-1.safetensors", "..", "", None, 3, "a/b.bin",
            "model.safetensors.index.json", "part-9.safetensors", "\ud800", "x" * 5000)  # fmt: skip
    for _ in range(rng.choice((0, 1, 1, 3))):
        places[rng.choice([*names, "no.such.tensor"])] = rng.choice(lies)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index if rng.random() < 0.5 else folder


def adapted(rng: random.Random, folder: pathlib.Path) -> pathlib.Path:
    """A LoRA adapter on top, its matrices and its settings perhaps odd."""
    base = weights(folder)
    names = [n for n in files.read(base) if n.endswith(".weight")] or ["x.weight"]
    adapter = folder / "adapter"
    adapter.mkdir()
    about: dict[str, Any] = {
        "peft_type": rng.choice(("LORA", "LORA", "LORA", "IA3", None, 3)),
        "base_model_name_or_path": rng.choice((str(base), str(base), str(folder), "", None, "x")),
        "lora_alpha": rng.choice((8, 8, 0, -1, 1e300, "8", None, float("nan"))),
        "alpha_pattern": rng.choice(({}, {"qkv": 3}, {"": 1}, [], None, {"weight": "x"})),
    }
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    stem = "base_model.model." + rng.choice(names).removesuffix(".weight")
    ways = ((2, 8), (2, 9), (0, 8), (8,), (), (2, 8, 1, 1), (2, 192))
    tensors = {f"{stem}.lora_A.weight": torch.randn(rng.choice(ways))}
    if rng.random() < 0.9:
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rng.choice(((24, 2), (8, 2), (2,), (0, 0))))
    safetensors.torch.save_file(tensors, adapter / "adapter_model.safetensors")
    return adapter


def zipped(rng: random.Random, folder: pathlib.Path) -> pathlib.Path:
    """An .npz whose members are odd: headers, names, sizes, order, compression."""
    path = folder / "odd.npz"
    with zipfile.ZipFile(path, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as file:
        for _ in range(rng.choice((1, 3))):
            name = rng.choice(("embedding/kernel.npy", "cls.npy", "../x.npy", "a", "/a.npy"))
            shape = rng.choice(("(8, 8, 3, 8)", "()", "(-1,)", "(2**40,)", "(1 << 40,)", "(0,)",
                                "[2]", "None", "(9999999999999,)", "(1,)*99", "3"))  # fmt: skip
            kind = rng.choice(
                ("<f4", ">f4", "|O", "<f8", "|V2", "<U4", "<c8", "|b1", "x", "<M8[D]")
            )
            text = f"{{'descr': '{kind}', 'fortran_order': {rng.choice(('True', 'False', '3'))},"
            text = (text + f" 'shape': {shape}, }}").ljust(117) + "\n"
            length = rng.choice((len(text), len(text), 0, 65535))
            head = b"\x93NUMPY" + bytes(rng.choice(((1, 0), (1, 0), (2, 0), (3, 0), (9, 9))))
            body = bytes(rng.choice((0, 4, 6144, 1 << 20)))
            file.writestr(name, head + length.to_bytes(2, "little") + text.encode() + body)
    return path


DAMAGES = (
    nothing, bytes_damaged, bytes_damaged, tensors_changed, tensors_changed, tensors_changed,
    json_changed, sharded, adapted, zipped,
)  # fmt: skip
