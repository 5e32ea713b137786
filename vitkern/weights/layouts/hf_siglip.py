"""The vision tower of Hugging Face's SigLIP and SigLIP 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...config import ViTConfig
from .base import (
    Checkpoint,
    Rule,
    Shape,
    heads_of,
    pairs,
    patch_fields,
    pixel_fields,
    unlike,
)  # fmt: skip
from .hf_clip import STEM, tower_rules
from .huggingface import HuggingFace


def _convolution(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    """SigLIP 2 with native sizes multiplies flat patches, colours last: (D, p·p·C)."""
    weight = parts[0]
    if weight.ndim != 2:
        return weight
    D, C, p, _ = shape
    return weight.view(D, p, p, C).permute(0, 3, 1, 2).contiguous()


def _has_pool(c: Checkpoint) -> bool:
    return "head.probe" in c.tensors


def _pool_rules() -> list[Rule]:
    """The MAP head, whose query, key and value are one matrix there, two here."""

    def query(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        return parts[0][: len(parts[0]) // 3]

    def others(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        return parts[0][len(parts[0]) // 3 :]

    rules = [Rule("attn_pool.latent", ("head.probe",))]
    for part in ("weight", "bias"):
        theirs = (f"head.attention.in_proj_{part}",)
        rules += [Rule(f"attn_pool.q.{part}", theirs, query)]
        rules += [Rule(f"attn_pool.kv.{part}", theirs, others)]
    names = {"proj": "attention.out_proj", "norm": "layernorm", "mlp.fc1": "mlp.fc1"}
    for ours, name in {**names, "mlp.fc2": "mlp.fc2"}.items():
        rules += pairs(f"attn_pool.{ours}", f"head.{name}")
    return rules


class HfSiglip(HuggingFace):
    name, title = "hf_siglip", "Hugging Face's SigLIP vision tower"
    kinds = ("siglip_vision_model", "siglip2_vision_model", "siglip", "siglip2")
    anchor, stem = "embeddings.patch_embedding.weight", STEM
    marks = (
        r"embeddings\.patch_embedding\.bias",
        r"encoder\.layers\.0\.self_attn\.q_proj\.weight",
    )
    unmarked = r"embeddings\.class_embedding"
    ignored = r"embeddings\.position_ids|head\."
    elsewhere = r"text_model\.|logit_scale|logit_bias"
    head = r"classifier\."
    default_activation, default_eps = "gelu_pytorch_tanh", 1e-6

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        rows = c.size("embeddings.position_embedding.weight", 0, 0)
        shape, head = c.shape(self.anchor), c.outside.get("classifier.weight")
        found: dict[str, Any]
        if len(shape) == 2:
            p = self.about(c).get("patch_size", 16)
            p = p if isinstance(p, int) and 0 < p <= math.isqrt(shape[1]) else 16
            found = {"width": shape[0], "channels": shape[1] // (p * p), "patch_size": p}
        else:
            found = dict(patch_fields(c, self.anchor))
        depth, mlp = c.count(STEM), c.shape(f"{STEM}0.mlp.fc1.weight")
        return {
            **found,
            **self.common(c, heads_of(found["width"], depth)),
            **pixel_fields(c, found["channels"]),
            "image_size": self.placed(c, rows, 0, found["patch_size"]),
            "depth": depth,
            "mlp_width": mlp[0] if mlp else 4 * found["width"],
            "class_token": False,
            # A classifier is of the mean; its file may hold the pool all the same.
            "pool": "mean" if head is not None else "map" if _has_pool(c) else "none",
            "classes": 0 if head is None or not head.ndim else head.shape[0],
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        return [
            *tower_rules(),
            Rule("patch_embed.proj.weight", (self.anchor,), _convolution),
            Rule("patch_embed.proj.bias", ("embeddings.patch_embedding.bias",)),
            *pairs("norm", "post_layernorm"),
            *pairs("head", "classifier", outside=True),
            *(_pool_rules() if config.pool == "map" else []),
        ]

    def export_refusal(self, config: ViTConfig) -> str:
        pool = "mean" if config.classes else "none"
        return unlike(
            config, class_token=False, registers=0, pool=pool, position="learned", qkv_bias=True,
            layer_scale=None, qk_norm=False, pre_norm=False, final_norm="before_pool",
            head="linear",
        )  # fmt: skip

    def export_prefix(self, config: ViTConfig) -> str:
        return "vision_model."

    def export_config(self, config: ViTConfig) -> dict[str, Any]:
        if not config.classes:
            about = self.written(config, self.kinds[0], "SiglipVisionModel")
            return about | {"vision_use_head": False}
        whole = self.written(config, "siglip", "SiglipForImageClassification")
        tower = {**self.written(config, self.kinds[0], ""), "vision_use_head": False}
        named = ("architectures", "model_type", "id2label", "label2id", "dtype")
        return {name: whole[name] for name in named} | {
            "vision_config": {k: v for k, v in tower.items() if k not in named or k == "model_type"}
        }
