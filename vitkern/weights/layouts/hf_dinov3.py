"""Hugging Face's DINOv3 ViT: rotary positions, keys without a bias, MLPs with or without a gate."""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import (
    Checkpoint,
    Rule,
    Shape,
    pairs,
    patch_fields,
    pixel_fields,
    plain_blocks,
    stacked,
    unlike,
)  # fmt: skip
from .huggingface import HuggingFace

STEM = "layer."
BLOCK = {"norm1": "norm1", "attn.proj": "attention.o_proj", "norm2": "norm2"}
PLAIN_MLP = {"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
GATED_MLP = {"mlp.fc1_g": "mlp.gate_proj", "mlp.fc1_x": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}


class HfDinov3(HuggingFace):
    holds = ("rope", "mlp", "key_bias")
    name, title = "hf_dinov3", "Hugging Face's DINOv3"
    kinds = ("dinov3_vit",)
    anchor, stem = "embeddings.patch_embeddings.weight", STEM
    marks = (r"layer\.0\.attention\.q_proj\.weight", r"layer\.0\.layer_scale1\.lambda1")
    spellings = ((r"\bmodel\.layer\.", "layer."),)
    ignored = r"embeddings\.(mask|register)_tokens?|rope_embeddings\.inv_freq"
    default_eps = 1e-5

    def refusal(self, c: Checkpoint) -> str:
        first = f"{STEM}0.attention."
        if f"{first}k_proj.bias" in c.tensors:
            return "a bias of the keys"
        both = {f"{first}{name}.bias" in c.tensors for name in ("q_proj", "v_proj")}
        return "a bias of queries or of values alone" if len(both) > 1 else ""

    def head_refusal(self, c: Checkpoint) -> str:
        two = "classifier.weight" in c.outside
        return "a classifier of the class token beside the patches' mean" if two else ""

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, about = found["width"], self.about(c)
        gated = f"{STEM}0.mlp.gate_proj.weight" in c.tensors
        size = c.said.get("image_size", about.get("image_size", 224))
        found |= self.common(c, D // 128 if D == 4096 else max(1, D // 64))
        return {
            **found,
            **pixel_fields(c, found["channels"]),
            "image_size": tuple(size) if isinstance(size, list) else size,
            "dynamic_image_size": True,
            "depth": c.count(STEM),
            "mlp": "swiglu_split" if gated else "plain",
            "mlp_width": c.size(f"{STEM}0.mlp.up_proj.weight", 0, 4 * D),
            "activation": "silu" if gated else found["activation"],
            "registers": c.size("embeddings.register_tokens", 1, 0),
            "position": "none",
            "rope": "dinov3",
            "rope_temperature": float(about.get("rope_theta", 100.0)),
            "rope_half": True,
            "qkv_bias": f"{STEM}0.attention.q_proj.bias" in c.tensors,
            "key_bias": False,
            "layer_scale": 1.0,
            "classes": 0,
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        at = f"{STEM}{{i}}.attention."
        mlp = PLAIN_MLP if config.mlp == "plain" else GATED_MLP
        weights = (f"{at}{name}.weight" for name in ("q_proj", "k_proj", "v_proj"))
        return [
            *pairs("patch_embed.proj", "embeddings.patch_embeddings"),
            Rule("cls_token", ("embeddings.cls_token",)),
            Rule("reg_token", ("embeddings.register_tokens",)),
            stacked("blocks.{i}.attn.qkv.weight", *weights),
            Rule("blocks.{i}.attn.q_bias", (f"{at}q_proj.bias",)),
            Rule("blocks.{i}.attn.v_bias", (f"{at}v_proj.bias",)),
            *plain_blocks(STEM, BLOCK | mlp),
            Rule("blocks.{i}.ls1.gamma", (f"{STEM}{{i}}.layer_scale1.lambda1",)),
            Rule("blocks.{i}.ls2.gamma", (f"{STEM}{{i}}.layer_scale2.lambda1",)),
            *pairs("norm", "norm"),
        ]

    def export_refusal(self, config: ViTConfig) -> str:
        if config.layer_scale is None:
            return "layer_scale=None, and it has a LayerScale"
        return unlike(
            config, rope="dinov3", rope_half=True, rope_offset=0.0, class_token=True, pool="token",
            position="none", classes=0, qk_norm=False, mlp=("plain", "swiglu_split"),
            key_bias=(False, not config.qkv_bias), pre_norm=False, final_norm="before_pool",
            head="linear",
        )  # fmt: skip

    def export_zeros(self, config: ViTConfig) -> dict[str, Shape]:
        zeros: dict[str, Shape] = {"embeddings.mask_token": (1, 1, config.width)}
        if not config.registers:  # which it stores all the same
            zeros["embeddings.register_tokens"] = (1, 0, config.width)
        return zeros

    def export_config(self, config: ViTConfig) -> dict[str, Any]:
        about = self.written(config, self.kinds[0], "DINOv3ViTModel")
        return about | {
            "use_gated_mlp": config.mlp != "plain",
            "num_register_tokens": config.registers,
            "rope_theta": config.rope_temperature,
            "query_bias": config.qkv_bias,
            "key_bias": False,
            "value_bias": config.qkv_bias,
            "layerscale_value": config.layer_scale,
        }
