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
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


class HfDinov2(HuggingFace):
    name, title = "hf_dinov2", "Hugging Face's DINOv2"
    kinds = ("dinov2", "dinov2_with_registers")
    anchor, stem = "embeddings.patch_embeddings.projection.weight", STEM
    marks = (r"encoder\.layer\.0\.layer_scale1\.lambda1",)
    ignored = r"embeddings\.mask_token"
    spellings = SPELLINGS
    default_eps = 1e-6

    def refusal(self, c: Checkpoint) -> str:
        gated = (f"{STEM}0.mlp.weights_in.weight", f"{STEM}0.mlp.gate_proj.weight")
        return "the SwiGLU MLP" if any(name in c.tensors for name in gated) else ""

    def head_refusal(self, c: Checkpoint) -> str:
        two = "classifier.weight" in c.outside
        return "a classifier of the class token beside the patches' mean" if two else ""

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, depth = found["width"], c.count(STEM)
        rows = c.size("embeddings.position_embeddings", 1, 0)
        registers = c.size("embeddings.register_tokens", 1, 0)
        mlp = c.shape(f"{STEM}0.mlp.fc1.weight")
        return {
            **found,
            **self.common(c, heads_of(D, depth)),
            **pixel_fields(c, found["channels"]),
            "image_size": self.placed(c, rows, 1, found["patch_size"]),
            "depth": depth,
            "mlp_width": mlp[0] if mlp else 4 * D,
            "registers": registers,
            "position_covers_prefix": not registers,
            "qkv_bias": f"{STEM}0.attention.attention.query.bias" in c.tensors,
            "layer_scale": 1e-5,
            "classes": 0,
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        stem = f"{STEM}{{i}}.attention.attention."
        return [
            *folded(config, "embeddings.cls_token", "embeddings.position_embeddings"),
            Rule("reg_token", ("embeddings.register_tokens",)),
            *pairs("patch_embed.proj", "embeddings.patch_embeddings.projection"),
            *stacked_pairs("blocks.{i}.attn.qkv", stem + "query", stem + "key", stem + "value"),
            *plain_blocks(STEM, BLOCK),
            Rule("blocks.{i}.ls1.gamma", (f"{STEM}{{i}}.layer_scale1.lambda1",)),
            Rule("blocks.{i}.ls2.gamma", (f"{STEM}{{i}}.layer_scale2.lambda1",)),
            *pairs("norm", "layernorm"),
        ]

    def export_refusal(self, config: ViTConfig) -> str:
        if config.layer_scale is None:
            return "layer_scale=None, and it has a LayerScale"
        if config.mlp_width % config.width:
            return f"mlp_width={config.mlp_width} is no multiple of width={config.width}"
        return unlike(
            config, class_token=True, pool="token", position="learned", classes=0, qk_norm=False,
            position_covers_prefix=not config.registers, pre_norm=False, final_norm="before_pool",
            head="linear",
        )  # fmt: skip

    def export_zeros(self, config: ViTConfig) -> dict[str, Shape]:
        return {"embeddings.mask_token": (1, config.width)}

    def export_config(self, config: ViTConfig) -> dict[str, Any]:
        kind = self.kinds[bool(config.registers)]
        model = "Dinov2WithRegistersModel" if config.registers else "Dinov2Model"
        about = self.written(config, kind, model)
        del about["intermediate_size"]
        about |= {"mlp_ratio": config.mlp_width // config.width, "qkv_bias": config.qkv_bias}
        return about | ({"num_register_tokens": config.registers} if config.registers else {})
