"""Checkpoints of DINO's training: a backbone with timm's names under a projection head."""

from __future__ import annotations

from typing import Any

from .base import Checkpoint
from .timm import Timm


class Dino(Timm):
    holds = ()
    name, title = "dino", "DINO's training checkpoint"
    marks = Timm.marks
    unmarked = r"decoder_|register_tokens|mask_token"
    ignored = r"head\."  # of the prototypes, which inference does not have
    elsewhere = r"(module\.)?head\."

    def prefix(self, names: Any) -> str | None:
        projected = any(".last_layer." in f".{name}" for name in names)
        return super().prefix(names) if projected else None

    def head_fields(self, c: Checkpoint) -> dict[str, Any]:
        return {**super().head_fields(c), "classes": 0}
