"""Where a checkpoint is: a state dict, a file, a folder, or a name on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config import ViTConfig
from . import adapters, files
from .layouts.base import Checkpoint

WHO = "vitkern.load"
# What a folder of a model holds, the first that is there; then whatever single file there is.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "open_clip_pytorch_model.bin",
)  # fmt: skip
SUFFIXES = (".safetensors", ".npz", ".bin", ".pt", ".pth")
BESIDE = ("config.json", "open_clip_config.json", "preprocessor_config.json", adapters.CONFIG)
# B/17 is meant as a variant, and names no repository: owners on the Hub have longer names.
_VARIANT = re.compile(r"[A-Za-z]{1,2}/\d{1,3}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def find(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    base: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """The checkpoint of a state dict, a file, a folder or a name.

    base: of a LoRA adapter, where its folder does not name the right one.
    """
    if isinstance(source, Mapping):
        return Checkpoint(files.unwrapped(source, WHO))
    if not isinstance(source, (str, os.PathLike)):
        kind = type(source).__name__
        raise TypeError(f"{WHO}: expected a path, a name or a state dict, got a {kind}")
    path = Path(source)
    if not path.exists() and not path.is_symlink():
        path = _named(os.fspath(source))
    if not path.is_dir():
        return _of_file(path)
    if adapters.is_adapter(path):
        below = base or _base(path)
        if Path(below).is_dir() and adapters.is_adapter(Path(below)):
            raise ValueError(
                f"{WHO}: {path} is an adapter of another one, {below}: merge that first"
            )
        return adapters.merged(find(below), path, WHO)
    if base is not None:
        raise ValueError(f"{WHO}: base is for LoRA adapters, and {path} is none")
    return _of_file(_inside(path))


def _base(folder: Path) -> str | Path:
    """An adapter's base: a path as it is or beside the adapter, else a name."""
    name = adapters.base_of(folder, WHO)
    beside = folder / name
    return beside if not Path(name).exists() and beside.exists() else name


def _of_file(path: Path) -> Checkpoint:
    found = Checkpoint(files.read(path, WHO), str(path))
    found.metadata = files.metadata(path)
    for name in ("open_clip_config.json", "config.json"):
        if (path.parent / name).is_file():
            found.config = files.read_json(path.parent / name, WHO)
            break
    if (path.parent / "preprocessor_config.json").is_file():
        found.pixels = files.read_json(path.parent / "preprocessor_config.json", WHO)
    return found


def _inside(folder: Path) -> Path:
    """The file of weights in a folder."""
    names = sorted(entry.name for entry in folder.iterdir())
    chosen = choose(names)
    if chosen is None:
        fits = [name for name in names if name.endswith(SUFFIXES)]
        what = f"several: {', '.join(fits[:5])}; name one of them" if fits else "none"
        raise ValueError(
            f"{WHO}: {folder} is a directory; looked for a file of weights in it"
            f" ({WEIGHTS[0]}, {WEIGHTS[4]}, ...) and found {what}"
        )
    return folder / chosen


def choose(names: Collection[str]) -> str | None:
    """Which of a folder's files holds the weights; None where that cannot be said."""
    for name in WEIGHTS:
        if name in names:
            return name
    fits = [name for name in names if name.endswith(SUFFIXES)]
    return fits[0] if len(fits) == 1 else None


def _named(name: str) -> Path:
    """A folder with the files of a name on the Hugging Face Hub; an error where it is none."""
    repository = re.sub(r"^(hf-hub|hf_hub):", "", name)
    if "/" not in repository and "." in repository and not repository.endswith(SUFFIXES):
        repository = f"timm/{repository}"  # timm's name with a tag: vit_..._224.augreg_in1k
    if _is_configuration(name):
        raise ValueError(
            f"{WHO}: {name!r:.80} names a configuration, which has no weights: ViT({name!r:.80})"
            f" builds it; weights are a file, a folder, or a name on the Hugging Face Hub"
            f" (timm/vit_base_patch16_224.augreg_in21k_ft_in1k)"
        )
    if _VARIANT.fullmatch(name) or not _HUB_NAME.fullmatch(repository) or _is_path(name):
        raise FileNotFoundError(f"{WHO}: there is no file or folder {name:.200}{_nearest(name)}")
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise FileNotFoundError(
            f"{WHO}: there is no file or folder {name}; for a name on the Hugging Face Hub"
            f" pip install huggingface_hub"
        ) from error
    try:
        return Path(_fetched(hub, repository))
    except ValueError:
        raise
    except Exception as error:  # of the network, of the Hub, of its cache: many classes
        why = (str(error).splitlines() or [""])[0]
        raise FileNotFoundError(
            f"{WHO}: there is no file or folder {name}, and the Hugging Face Hub could not be"
            f" asked for {repository}: {type(error).__name__}: {why:.200}"
        ) from error


def _is_path(name: str) -> bool:
    return name.endswith(SUFFIXES)


def _nearest(name: str) -> str:
    """What ViTConfig says of a name that might be meant as a model's, "" of a path."""
    if _is_path(name) or (os.sep in name and not _VARIANT.fullmatch(name)):
        return ""
    try:
        ViTConfig.named(name)
    except ValueError as error:
        return f", and no model of that name: {str(error).removeprefix('ViTConfig.named: ')}"
    return ""


def _is_configuration(name: str) -> bool:
    try:
        return bool(ViTConfig.named(name)) and "." not in name
    except ValueError:
        return False


def _fetched(hub: Any, repository: str) -> str:
    """A folder with the weights and the JSON beside them; from the cache where it is complete."""
    try:
        names = hub.list_repo_files(repository)
    except Exception:
        return hub.snapshot_download(repository, local_files_only=True)
    adapter = [name for name in adapters.WEIGHTS if name in names and adapters.CONFIG in names]
    chosen = adapter[0] if adapter else choose(names)
    if chosen is None:
        raise ValueError(f"{WHO}: {repository} has no file of weights that is read: {names[:10]}")
    shards = [n for n in names if n.endswith(SUFFIXES)] if chosen.endswith(files.INDEX) else []
    return hub.snapshot_download(repository, allow_patterns=[chosen, *BESIDE, *shards])
