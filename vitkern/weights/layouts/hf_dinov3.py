"""Hugging Face's DINOv3: recognised, and refused until there are rotary positions."""

from __future__ import annotations

from ...config import ViTConfig
from .base import Checkpoint, Rule, pairs
from .huggingface import HuggingFace


class HfDinov3(HuggingFace):
    name, title = "hf_dinov3", "Hugging Face's DINOv3"
    kinds = ("dinov3_vit",)
    anchor, stem = "embeddings.patch_embeddings.weight", "layer."
    marks = (r"layer\.0\.attention\.q_proj\.weight", r"layer\.0\.layer_scale1\.lambda1")
    spellings = ((r"\bmodel\.layer\.", "layer."),)

    def refusal(self, c: Checkpoint) -> str:
        gated = any(".mlp.gate_proj." in name for name in c.tensors)
        return "rotary positions" + (" and the gated MLP" if gated else "")

    def rules(self, config: ViTConfig) -> list[Rule]:
        """What tells it from others; the whole table comes with rotary positions."""
        return [
            *pairs("patch_embed.proj", "embeddings.patch_embeddings"),
            Rule("cls_token", ("embeddings.cls_token",)),
            Rule("reg_token", ("embeddings.register_tokens",)),
            *pairs("blocks.{i}.mlp.fc1", "layer.{i}.mlp.up_proj"),
        ]
