"""Hugging Face's BEiT (and data2vec's vision model): relative positions in every block."""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import (
    Checkpoint,
    Rule,
    heads_of,
    pairs,
    patch_fields,
    pixel_fields,
    plain_blocks,
    stacked,
    unlike,
    without_keys,
)  # fmt: skip
from .hf_vit import ATTENTION, BLOCK, STEM
from .huggingface import MLP_SPELLINGS, SPELLINGS, HuggingFace
from .relative import image_size_of, table_rule

TABLE = "relative_position_bias.relative_position_bias_table"
SHARED = f"encoder.{TABLE}"


class HfBeit(HuggingFace):
    name, title = "hf_beit", "Hugging Face's BEiT"
    kinds = ("beit", "data2vec-vision")
    anchor, stem = "embeddings.patch_embeddings.projection.weight", STEM
    marks = (
        r"encoder\.layer\.0\.layernorm_before\.weight",
        r"encoder\.(layer\.0\.(lambda_1|.*relative)|relative)",
    )
    ignored = r"embeddings\.mask_token|.*relative_position_index$"
    spellings = (
        *SPELLINGS,
        *MLP_SPELLINGS,
        (r"(encoder\.layer\.[0-9]+)\.relative_position_bias", r"\1.attention.attention."
         "relative_position_bias"),
        (r"\bshared_position_bias\.", "encoder.relative_position_bias."),
    )  # fmt: skip

    def refusal(self, c: Checkpoint) -> str:
        both = "embeddings.position_embeddings" in c.tensors
        both = both and any(name.endswith(TABLE) for name in c.tensors)
        return "learned positions beside relative ones" if both else ""

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, p, depth = found["width"], found["patch_size"], c.count(STEM)
        table = c.shape(f"{STEM}0.{ATTENTION}{TABLE}") or c.shape(SHARED)
        rows = c.shape("embeddings.position_embeddings")
        mlp, head = (
            c.shape(f"{STEM}0.intermediate.dense.weight"),
            c.outside.get("classifier.weight"),
        )
        size = self.about(c).get("image_size")
        mean = "pooler.layernorm.weight" in c.tensors
        found |= self.common(c, table[1] if len(table) == 2 else heads_of(D, depth))
        if table:
            found |= {"position": "relative", "image_size": image_size_of(c, table[0], 1, p, size)}
        elif len(rows) == 3:
            found["image_size"] = self.placed(c, rows[1], 1, p)
        else:
            found |= {"position": "none", "image_size": c.said.get("image_size", size or 224)}
        return {
            **found,
            **pixel_fields(c, found["channels"]),
            "depth": depth,
            "mlp_width": mlp[0] if mlp else 4 * D,
            "layer_scale": 0.1 if f"{STEM}0.lambda_1" in c.tensors else None,
            "pool": "mean" if mean else "token",
            "final_norm": "after_pool" if mean else "before_pool",
            "classes": 0 if head is None or not head.ndim else head.shape[0],
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        own = f"{STEM}{{i}}.{ATTENTION}"
        return [
            Rule("cls_token", ("embeddings.cls_token",)),
            Rule("pos_embed", ("embeddings.position_embeddings",)),
            *pairs("patch_embed.proj", "embeddings.patch_embeddings.projection"),
            stacked("blocks.{i}.attn.qkv.weight", *(f"{own}{n}.weight" for n in
                                                    ("query", "key", "value"))),
            without_keys("blocks.{i}.attn.qkv.bias", own + "query.bias", own + "value.bias"),
            *table_rule(own + TABLE, SHARED),
            *plain_blocks(STEM, BLOCK),
            Rule("blocks.{i}.ls1.gamma", (f"{STEM}{{i}}.lambda_1",)),
            Rule("blocks.{i}.ls2.gamma", (f"{STEM}{{i}}.lambda_2",)),
            *pairs("norm", "layernorm"),
            *pairs("fc_norm", "pooler.layernorm"),
            *pairs("head", "classifier", outside=True),
        ]  # fmt: skip

    def export_refusal(self, config: ViTConfig) -> str:
        if config.layer_scale is None:
            return "layer_scale=None, and it has a LayerScale"
        norm = {"mean": "after_pool", "token": "before_pool"}.get(config.pool, "")
        return unlike(
            config, class_token=True, registers=0, pool=("mean", "token"), position="relative",
            qkv_bias=True, qk_norm=False, pre_norm=False, final_norm=norm, head="linear",
        )  # fmt: skip

    def export_prefix(self, config: ViTConfig) -> str:
        return "beit." if config.classes else ""

    def export_config(self, config: ViTConfig) -> dict[str, Any]:
        model = "BeitForImageClassification" if config.classes else "BeitModel"
        return self.written(config, "beit", model) | {
            "use_mean_pooling": config.pool == "mean",
            "use_relative_position_bias": True,
            "use_shared_relative_position_bias": False,
            "use_absolute_position_embeddings": False,
            "use_mask_token": False,
            "layer_scale_init_value": config.layer_scale,
        }
