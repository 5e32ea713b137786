"""vitkern: a kernel-accelerated Vision Transformer engine.

    from vitkern import ViT
    model = ViT("B/16").eval()

Importing the package loads nothing but this file; a name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .acceleration import accelerate
    from .config import ViTConfig
    from .model import ViT

__version__ = "0.1.0"
__all__ = ["ViT", "ViTConfig", "__version__", "accelerate"]

_HOME = {"ViT": "model", "ViTConfig": "config", "accelerate": "acceleration"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vitkern' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"vitkern.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
