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
    from .foreign.timm_registry import register_with_timm
    from .foreign.transformers_attention import register_with_transformers
    from .loading import load
    from .model import ViT
    from .packed_file import load_packed, save_packed
    from .quantisation import quantise
    from .saving import save

__version__ = "0.1.0"
__all__ = [
    "ViT", "ViTConfig", "__version__", "accelerate", "load", "load_packed", "quantise",
    "register_with_timm", "register_with_transformers", "save", "save_packed",
]  # fmt: skip

_HOME = {
    "ViT": "model",
    "ViTConfig": "config",
    "accelerate": "acceleration",
    "load": "loading",
    "load_packed": "packed_file",
    "quantise": "quantisation",
    "register_with_timm": "foreign.timm_registry",
    "register_with_transformers": "foreign.transformers_attention",
    "save": "saving",
    "save_packed": "packed_file",
}


def __getattr__(name: str) -> Any:
    if name == "_C":
        return _extension()
    if name not in _HOME:
        raise AttributeError(f"module 'vitkern' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"vitkern.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def _extension() -> Any:
    """The compiled part, or what to do where it is not: in a clone that hides the installed one."""
    try:
        return importlib.import_module("vitkern._C")
    except ModuleNotFoundError as error:
        if error.name != "vitkern._C":
            raise
        raise ImportError(
            f"{__path__[0]} is not built: leave this folder, if vitkern is installed, or build it"
            " here with `pip install -e .`",
            name="vitkern._C",
        ) from None


def __dir__() -> list[str]:
    return sorted(__all__)
