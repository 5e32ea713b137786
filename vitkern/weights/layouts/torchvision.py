"""torchvision's vit_*."""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import (
    Checkpoint,
    Layout,
    Rule,
    heads_of,
    pairs,
    patch_fields,
    place_fields,
    plain_blocks,
    unlike,
)  # fmt: skip

BLOCK = {
    "norm1": "ln_1",
    "attn.proj": "self_attention.out_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3",
}


class Torchvision(Layout):
    name, title = "torchvision", "torchvision's ViT"
    anchor, stem = "conv_proj.weight", "encoder.layers.encoder_layer_"
    marks = (r"encoder\.layers\.encoder_layer_0\.self_attention\.in_proj_weight",)
    head = r"heads\."
    spellings = ((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3."))

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, depth = found["width"], c.count(self.stem)
        rows = c.size("encoder.pos_embedding", 1, 0)
        _, found["image_size"] = place_fields(c, rows, (1,), found["patch_size"])
        mlp, head = c.shape(f"{self.stem}0.mlp.0.weight"), c.shape("heads.head.weight")
        hidden = c.shape("heads.pre_logits.weight")
        return found | {
            "depth": depth,
            "heads": heads_of(D, depth),
            "mlp_width": mlp[0] if mlp else 4 * D,
            "classes": head[0] if head else 0,
            "head": "tanh" if hidden else "linear",
            "representation_size": hidden[0] if hidden else None,
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        qkv = [
            Rule(f"blocks.{{i}}.attn.qkv.{part}",
                 (f"{self.stem}{{i}}.self_attention.in_proj_{part}",))
            for part in ("weight", "bias")
        ]  # fmt: skip
        return [
            Rule("cls_token", ("class_token",)),
            Rule("pos_embed", ("encoder.pos_embedding",)),
            *pairs("patch_embed.proj", "conv_proj"),
            *qkv,
            *plain_blocks(self.stem, BLOCK),
            *pairs("norm", "encoder.ln"),
            *pairs("pre_logits.fc", "heads.pre_logits"),
            *pairs("head", "heads.head"),
        ]

    def export_refusal(self, config: ViTConfig) -> str:
        return unlike(
            config, class_token=True, registers=0, pool="token", position="learned",
            position_covers_prefix=True, qkv_bias=True, layer_scale=None, qk_norm=False,
            pre_norm=False, final_norm="before_pool", norm_eps=1e-6, activation="gelu",
            head=("linear", "tanh"),
        )  # fmt: skip
