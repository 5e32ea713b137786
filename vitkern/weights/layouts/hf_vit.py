"""Hugging Face's ViT (and the encoders of ViT-MAE and ViT-MSN), and DeiT with its second token."""

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
    stacked_pairs,
    unlike,
)  # fmt: skip
from .huggingface import MLP_SPELLINGS, SPELLINGS, HuggingFace

STEM = "encoder.layer."
ATTENTION = "attention.attention."
BLOCK = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


class HfViT(HuggingFace):
    name, title = "hf_vit", "Hugging Face's ViT"
    kinds: tuple[str, ...] = ("vit", "vit_mae", "vit_msn")
    anchor, stem = "embeddings.patch_embeddings.projection.weight", STEM
    marks: tuple[str, ...] = (r"encoder\.layer\.0\.layernorm_before\.weight",)
    unmarked = r"embeddings\.distillation_token|encoder\.(layer\.0\.(lambda_1|.*relative)|relative)"
    ignored = r"embeddings\.mask_token|decoder"
    elsewhere = r"decoder\."
    head = r"classifier\.|pooler\."
    spellings = SPELLINGS + MLP_SPELLINGS
    tokens = 1

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, depth = found["width"], c.count(STEM)
        rows = c.size("embeddings.position_embeddings", 1, 0)
        found["image_size"] = self.placed(c, rows, self.tokens, found["patch_size"])
        mlp, pooler = c.shape(f"{STEM}0.intermediate.dense.weight"), c.shape("pooler.dense.weight")
        head = self.classifier(c)
        return {
            **found,
            **self.common(c, heads_of(D, depth)),
            **pixel_fields(c, found["channels"]),
            "depth": depth,
            "mlp_width": mlp[0] if mlp else 4 * D,
            "registers": self.tokens - 1,
            "qkv_bias": f"{STEM}0.{ATTENTION}query.bias" in c.tensors,
            "classes": head[0] if head else 0,
            # A model with a classifier has no pooler, though its file may still hold one.
            "head": "tanh" if pooler and not head else "linear",
            "representation_size": pooler[0] if pooler and not head else None,
        }

    def classifier(self, c: Checkpoint) -> tuple[int, ...]:
        found = c.outside.get("classifier.weight")
        return () if found is None else tuple(found.shape)

    def rules(self, config: ViTConfig) -> list[Rule]:
        stem = f"{STEM}{{i}}.{ATTENTION}"
        return [
            Rule("cls_token", ("embeddings.cls_token",)),
            Rule("pos_embed", ("embeddings.position_embeddings",)),
            *pairs("patch_embed.proj", "embeddings.patch_embeddings.projection"),
            *stacked_pairs("blocks.{i}.attn.qkv", stem + "query", stem + "key", stem + "value"),
            *plain_blocks(STEM, BLOCK),
            *pairs("norm", "layernorm"),
            *pairs("pre_logits.fc", "pooler.dense"),
            *pairs("head", "classifier", outside=True),
        ]

    def is_ignored(self, name: str, outside: bool) -> bool:
        return name.startswith("pooler.dense.") or super().is_ignored(name, outside)

    def export_refusal(self, config: ViTConfig) -> str:
        if config.head == "tanh" and config.classes:
            return "its pooler (a tanh layer) stands without a classifier"
        return unlike(
            config, class_token=True, registers=self.tokens - 1, pool="token", position="learned",
            position_covers_prefix=True, layer_scale=None, qk_norm=False, pre_norm=False,
            final_norm="before_pool", head=("linear", "tanh"),
            representation_size=(None, config.width),
        )  # fmt: skip

    def export_prefix(self, config: ViTConfig) -> str:
        return f"{self.kinds[0]}." if config.classes else ""

    def export_config(self, config: ViTConfig) -> dict[str, Any]:
        kind = self.kinds[0]
        model = {"vit": "ViT", "deit": "DeiT"}[kind]
        architecture = f"{model}{'ForImageClassification' if config.classes else 'Model'}"
        return {**self.written(config, kind, architecture), "qkv_bias": config.qkv_bias}


class HfDeiT(HfViT):
    """With both classifiers, or with that of the class token alone: then the distillation token is
    a register with a position."""

    name, title = "hf_deit", "Hugging Face's DeiT"
    kinds = ("deit",)
    marks = (*HfViT.marks, r"embeddings\.distillation_token")
    unmarked = r"encoder\.(layer\.0\.(lambda_1|.*relative)|relative)"
    head = r"classifier\.|pooler\.|(cls|distillation)_classifier\."
    tokens = 2

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        two = {"head": "distilled", "registers": 0, "representation_size": None}
        return super().fields(c) | (two if "distillation_classifier.weight" in c.outside else {})

    def classifier(self, c: Checkpoint) -> tuple[int, ...]:
        found = c.outside.get("classifier.weight", c.outside.get("cls_classifier.weight"))
        return () if found is None else tuple(found.shape)

    def rules(self, config: ViTConfig) -> list[Rule]:
        token, rules = ("embeddings.distillation_token",), super().rules(config)
        if config.head != "distilled":
            return [*rules, Rule("reg_token", token), *pairs("head", "cls_classifier", True)]
        rules = [rule for rule in rules if not rule.ours.startswith("head.")]
        rules += [*pairs("head", "cls_classifier", True), Rule("dist_token", token)]
        return [*rules, *pairs("head_dist", "distillation_classifier", True)]

    def export_refusal(self, config: ViTConfig) -> str:
        if config.head != "distilled":
            return super().export_refusal(config)
        if not config.classes:
            return "two heads without classes"
        return super().export_refusal(config.replace(head="linear", registers=1))

    def export_config(self, config: ViTConfig) -> dict[str, Any]:
        about = super().export_config(config)
        if config.head == "distilled":
            about["architectures"] = ["DeiTForImageClassificationWithTeacher"]
        return about
