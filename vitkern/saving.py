"""save: a model's weights in one of the layouts, as others read them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .config import ViTConfig
from .model import ViT
from .weights import convert
from .weights.layouts import BY_NAME, LAYOUTS
from .weights.layouts.base import Layout, Refused, own_metadata

WHO = "vitkern.save"
HUGGING_FACE = "huggingface"  # whichever of its models fits


def save(
    model: ViT,
    path: str | os.PathLike[str],
    layout: str = "timm",
    notes: Mapping[str, Any] | None = None,
) -> str:
    """Write a model's weights; the result is the name of the layout that was written.

    layout: "timm" (a .safetensors file that `load` reads with its whole configuration), a Hugging
    Face model ("hf_vit", "hf_deit", "hf_dinov2", "hf_dinov3", "hf_clip", "hf_siglip", "hf_beit";
    "huggingface" is the one that fits), which is a folder with config.json, or "torchvision",
    "open_clip", "beit", "dinov2" (.safetensors files) or "jax" (.npz). timm's names are those of
    its class Eva ("eva") where a model has blocks that only this one has.
    notes: what a single .safetensors file says besides its configuration, such as class names.
    """
    if not isinstance(model, ViT):
        raise TypeError(f"{WHO}: expected a vitkern.ViT, got {type(model).__name__}")
    if layout not in BY_NAME and layout != HUGGING_FACE:
        names = ", ".join([HUGGING_FACE, *BY_NAME])
        raise ValueError(f"{WHO}: layout must be one of {names}, not {layout!r:.40}")
    chosen = _fitting(model.config) if layout == HUGGING_FACE else BY_NAME[layout]
    if chosen.name == "timm" and not BY_NAME["eva"].unwritable(model.config):
        chosen = BY_NAME["eva"]  # timm's other class of Vision Transformers
    why = chosen.unwritable(model.config)
    if why:
        raise Refused(f"{WHO}: {chosen.title} cannot hold this model: {why}")
    about = chosen.export_config(model.config)
    suffix = ".npz" if chosen.name == "jax" else ".safetensors"
    if not about and Path(path).suffix != suffix:
        raise ValueError(f"{WHO}: {path}: the file's name must end in {suffix}")
    state = {name: t.detach().cpu() for name, t in model.state_dict().items()}
    try:
        tensors = convert.write(chosen, state, model.config)
    except Refused as error:
        raise Refused(f"{WHO}: {chosen.title} cannot hold this model: {error}") from error
    if about:
        _folder(Path(path), tensors, about, model.config)
    elif suffix == ".npz":
        _npz(Path(path), tensors)
    else:
        said = own_metadata(model.config, layout=chosen.name, **(notes or {}))
        _safetensors(Path(path), tensors, said)
    return chosen.name


def _fitting(config: ViTConfig) -> Layout:
    theirs = [layout for layout in LAYOUTS if layout.name.startswith("hf_")]
    whys = {layout: layout.unwritable(config) for layout in theirs}
    for layout, why in whys.items():
        if not why:
            return layout
    reasons = "; ".join(f"{layout.title}: {why}" for layout, why in whys.items())
    raise Refused(f"{WHO}: no model of Hugging Face can hold this one: {reasons}")


def _folder(path: Path, tensors: dict[str, Tensor], about: dict[str, Any], c: ViTConfig) -> None:
    if path.is_file():
        raise NotADirectoryError(f"{WHO}: {path} is a file; expected a folder, to be made")
    path.mkdir(parents=True, exist_ok=True)
    about["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    _text(path / "config.json", about)
    if c.mean is not None and c.std is not None:
        size = c.image_size if isinstance(c.image_size, tuple) else (c.image_size,) * 2
        pixels = {
            "do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255,
            "size": {"height": size[0], "width": size[1]}, "image_mean": list(c.mean),
            "image_std": list(c.std), "image_processor_type": "ViTImageProcessor",
        }  # fmt: skip
        _text(path / "preprocessor_config.json", pixels)
    _safetensors(path / "model.safetensors", tensors, {"format": "pt"})


def _text(path: Path, about: dict[str, Any]) -> None:
    path.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(f"{WHO} needs safetensors: pip install safetensors") from error
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()  # memory that is written already: tied parameters are written each
    for name, t in tensors.items():
        plain[name] = t.clone() if _is_view(t) or t.data_ptr() in seen else t
        seen.add(t.data_ptr())
    replace_file(path, lambda beside: save_file(plain, beside, metadata))


def _npz(path: Path, tensors: dict[str, Tensor]) -> None:
    import numpy as np

    arrays: dict[str, Any] = {name: t.float().numpy() for name, t in tensors.items()}

    def write(beside: Path) -> None:
        with open(beside, "wb") as file:
            np.savez(file, **arrays)

    replace_file(path, write)


def _is_view(tensor: Tensor) -> bool:
    """Whether the storage holds more than the tensor: safetensors refuses shared memory."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize


def replace_file(path: Path, write: Any) -> None:
    """The file is there wholly or not at all; a model that is mapped from it keeps its memory."""
    if path.is_dir():
        raise IsADirectoryError(f"{WHO}: {path} is a directory; expected the name of a file")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as folder:
        beside = Path(folder) / path.name
        beside.touch()  # with the permissions of a new file, which safetensors would not give
        mode = beside.stat().st_mode
        write(beside)
        os.chmod(beside, mode)
        os.replace(beside, path)


__all__ = ["save"]
