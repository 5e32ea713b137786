"""Hugging Face's DINOv2, with and without registers."""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import (
    Checkpoint,
    Rule,
    Shape,
    heads_of,
    pairs,
    patch_fields,
    pixel_fields,
    plain_blocks,
    stacked_pairs,
    unlike,
)  # fmt: skip
from .huggingface import SPELLINGS, HuggingFace
from .registers import folded

STEM = "encoder.layer."
BLOCK = {
    "norm1": "norm1",
    "attn.proj": "attention.output.dense",
    "norm2": "norm2",
}
PLAIN_MLP = {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
GATED_MLP = {"mlp.fc1": "mlp.weights_in", "mlp.fc2": "mlp.weights_out"}  # as files have it


class HfDinov2(HuggingFace):
    holds = ("mlp",)
    name, title = "hf_dinov2", "Hugging Face's DINOv2"
    kinds = ("dinov2", "dinov2_with_registers")
    anchor, stem = "embeddings.patch_embeddings.projection.weight", STEM
    marks = (r"encoder\.layer\.0\.layer_scale1\.lambda1",)
    ignored = r"embeddings\.mask_token"
    spellings = SPELLINGS
    default_eps = 1e-6

    def head_refusal(self, c: Checkpoint) -> str:
        two = "classifier.weight" in c.outside
        return "a classifier of the class token beside the patches' mean" if two else ""

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, depth = found["width"], c.count(STEM)
        rows = c.size("embeddings.position_embeddings", 1, 0)
        registers = c.size("embeddings.register_tokens", 1, 0)
        return {
            **found,
            **self.common(c, D // 64 if D == 1536 else heads_of(D, depth)),  # giant: 24
            **self.mlp_fields(c, D),
            **pixel_fields(c, found["channels"]),
            "image_size": self.placed(c, rows, 1, found["patch_size"]),
            "depth": depth,
            "registers": registers,
            "position_covers_prefix": not registers,
            "qkv_bias": f"{STEM}0.attention.attention.query.bias" in c.tensors,
            "layer_scale": 1e-5,
            "classes": 0,
        }

    def mlp_fields(self, c: Checkpoint, D: int) -> dict[str, Any]:
        both = c.size(f"{STEM}0.mlp.weights_in.weight", 0, 0) // 2
        F = both or c.size(f"{STEM}0.mlp.gate_proj.weight", 0, 0)
        if F:
            return {"mlp": "swiglu", "mlp_width": F, "activation": "silu"}
        return {"mlp_width": c.size(f"{STEM}0.mlp.fc1.weight", 0, 4 * D)}

    def rules(self, config: ViTConfig) -> list[Rule]:
        mlp = PLAIN_MLP if config.mlp == "plain" else GATED_MLP
        names, stem = f"{STEM}{{i}}.mlp.", f"{STEM}{{i}}.attention.attention."
        return [
            *folded(config, "embeddings.cls_token", "embeddings.position_embeddings"),
            Rule("reg_token", ("embeddings.register_tokens",)),
            *pairs("patch_embed.proj", "embeddings.patch_embeddings.projection"),
            *stacked_pairs("blocks.{i}.attn.qkv", stem + "query", stem + "key", stem + "value"),
            *plain_blocks(STEM, BLOCK | mlp),
            *stacked_pairs("blocks.{i}.mlp.fc1", names + "gate_proj", names + "up_proj"),
            *pairs("blocks.{i}.mlp.fc2", names + "down_proj"),
            Rule("blocks.{i}.ls1.gamma", (f"{STEM}{{i}}.layer_scale1.lambda1",)),
            Rule("blocks.{i}.ls2.gamma", (f"{STEM}{{i}}.layer_scale2.lambda1",)),
            *pairs("norm", "layernorm"),
        ]

    def export_refusal(self, config: ViTConfig) -> str:
        if config.layer_scale is None:
            return "layer_scale=None, and it has a LayerScale"
        if not self.ratio(config):
            return f"mlp_width={config.mlp_width} is none that it has at width={config.width}"
        return unlike(
            config, mlp=("plain", "swiglu"),
            class_token=True, pool="token", position="learned", classes=0, qk_norm=False,
            position_covers_prefix=not config.registers, pre_norm=False, final_norm="before_pool",
            head="linear",
        )  # fmt: skip

    def ratio(self, config: ViTConfig) -> int:
        """mlp_ratio; 0 if none makes this width. A gated MLP has two thirds of it."""
        D, F = config.width, config.mlp_width
        if config.mlp == "plain":
            return 0 if F % D else F // D
        return next((r for r in range(1, 17) if (int(r * D * 2 / 3) + 7) // 8 * 8 == F), 0)

    def export_zeros(self, config: ViTConfig) -> dict[str, Shape]:
        return {"embeddings.mask_token": (1, config.width)}

    def export_config(self, config: ViTConfig) -> dict[str, Any]:
        kind = self.kinds[bool(config.registers)]
        model = "Dinov2WithRegistersModel" if config.registers else "Dinov2Model"
        about = self.written(config, kind, model)
        del about["intermediate_size"]
        about |= {"mlp_ratio": self.ratio(config), "qkv_bias": config.qkv_bias}
        if config.mlp != "plain":  # its activation is not asked for
            about |= {"use_swiglu_ffn": True, "hidden_act": "gelu"}
        return about | ({"num_register_tokens": config.registers} if config.registers else {})
