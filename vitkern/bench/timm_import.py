"""timm beside the CPU build of PyTorch, for which there is no build of torchvision.

torchvision's Python code registers fake kernels for compiled operators that are missing then;
declaring their schemas first is enough, as timm's models use none of them.
"""

from __future__ import annotations

import importlib.util
import pathlib

import torch


def prepare() -> None:
    """Call it before `import timm`; does nothing where torchvision is complete or absent."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _KEPT:
        return
    if not _loads(pathlib.Path(spec.origin).parent):
        _declare()


def _loads(folder: pathlib.Path) -> bool:
    """Whether torchvision's compiled operators are of this build of PyTorch."""
    try:
        for library in folder.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")


def _declare() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: list[torch.library.Library] = []  # a library's schemas live as long as it does
