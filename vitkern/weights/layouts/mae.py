"""MAE's pre-training checkpoint: an encoder with timm's names beside its decoder.

The encoder alone and a fine-tuned model have timm's layout entirely.
"""

from __future__ import annotations

from .timm import Timm


class Mae(Timm):
    holds = ()
    name, title = "mae", "MAE's pre-training checkpoint"
    marks = (*Timm.marks, r"decoder_embed\.weight")
    unmarked = r"(?!)"
    ignored = r"decoder_|mask_token"
