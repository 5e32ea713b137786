"""timm beside the CPU build of PyTorch, as vitkern/bench/timm_import.py prepares it."""

from vitkern.bench.timm_import import prepare

__all__ = ["prepare"]
