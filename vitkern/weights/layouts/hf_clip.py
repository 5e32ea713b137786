"""The vision tower of Hugging Face's CLIP: alone, in the whole model, or under a classifier."""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import (
    Checkpoint,
    Rule,
    heads_of,
    invented,
    pairs,
    patch_fields,
    pixel_fields,
    plain_blocks,
    reshaped,
    stacked_pairs,
    unlike,
)  # fmt: skip
from .huggingface import HuggingFace

STEM = "encoder.layers."
BLOCK = {
    "norm1": "layer_norm1",
    "attn.proj": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def tower_rules() -> list[Rule]:
    """Of the blocks and positions, which SigLIP has in common."""
    stem = f"{STEM}{{i}}.self_attn."
    return [
        reshaped("pos_embed", "embeddings.position_embedding.weight", lambda t: t[0]),
        *stacked_pairs("blocks.{i}.attn.qkv", stem + "q_proj", stem + "k_proj", stem + "v_proj"),
        *plain_blocks(STEM, BLOCK),
    ]


class HfClip(HuggingFace):
    name, title = "hf_clip", "Hugging Face's CLIP vision tower"
    kinds = ("clip_vision_model", "clip")
    anchor, stem = "embeddings.patch_embedding.weight", STEM
    marks = (r"embeddings\.class_embedding", r"encoder\.layers\.0\.self_attn\.q_proj\.weight")
    ignored = r"embeddings\.position_ids"
    elsewhere = r"text_model\.|text_projection|logit_scale"
    head = r"visual_projection\.|classifier\."
    default_activation, default_eps = "quick_gelu", 1e-5

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, depth = found["width"], c.count(STEM)
        rows = c.size("embeddings.position_embedding.weight", 0, 0)
        mlp = c.shape(f"{STEM}0.mlp.fc1.weight")
        head = c.outside.get("visual_projection.weight", c.outside.get("classifier.weight"))
        # A classifier reads the mean of the patches, without the norm that the projection reads.
        mean = "classifier.weight" in c.outside
        return {
            **found,
            **self.common(c, heads_of(D, depth)),
            **pixel_fields(c, found["channels"]),
            "image_size": self.placed(c, rows, 1, found["patch_size"]),
            "depth": depth,
            "mlp_width": mlp[0] if mlp else 4 * D,
            "pre_norm": True,
            "pool": "mean" if mean else "token",
            "final_norm": "none" if mean else "before_pool",
            "classes": 0 if head is None or not head.ndim else head.shape[0],
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        rules = [
            reshaped("cls_token", "embeddings.class_embedding", lambda t: t[0, 0]),
            Rule("patch_embed.proj.weight", (self.anchor,)),
            *tower_rules(),
            *pairs("norm_pre", "pre_layrnorm"),
            *pairs("norm", "post_layernorm"),
        ]
        if config.pool == "mean":
            return rules + pairs("head", "classifier", outside=True)
        why = "its projection has no bias, and this head has one"
        projection = Rule("head.weight", ("visual_projection.weight",), outside=True)
        return [*rules, projection, invented("head.bias", why)]

    def is_ignored(self, name: str, outside: bool) -> bool:
        unread = name.startswith("post_layernorm.")  # under a classifier
        return unread or super().is_ignored(name, outside)

    def export_refusal(self, config: ViTConfig) -> str:
        return unlike(
            config, class_token=True, registers=0, pool="token", position="learned", qkv_bias=True,
            position_covers_prefix=True, layer_scale=None, qk_norm=False, pre_norm=True,
            final_norm="before_pool", head="linear",
        )  # fmt: skip

    def export_prefix(self, config: ViTConfig) -> str:
        return "vision_model."

    def export_config(self, config: ViTConfig) -> dict[str, Any]:
        model = "CLIPVisionModelWithProjection" if config.classes else "CLIPVisionModel"
        about = self.written(config, self.kinds[0], model)
        about.pop("id2label", None)
        about.pop("label2id", None)
        return about | {"projection_dim": config.classes or 512}
