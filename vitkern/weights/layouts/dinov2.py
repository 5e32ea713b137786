"""DINOv2 as its authors publish it: timm's names but for the registers and their positions."""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import Checkpoint, Rule, heads_of, pairs, patch_fields, place_fields, unlike
from .registers import folded
from .timm import Timm


class Dinov2(Timm):
    holds = ("mlp",)
    name, title = "dinov2", "DINOv2's own layout"
    marks = (*Timm.marks, r"mask_token|register_tokens", r"blocks\.0\.ls1\.gamma")
    unmarked = r"decoder_|head\.(mlp|last_layer)"
    ignored = r"mask_token"
    elsewhere = r"(dino|ibot)_head\."
    spellings = ((r"\bblocks\.[0-9]+\.([0-9]+)\.", r"blocks.\1."),)  # sharded in chunks of blocks

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, p, depth = found["width"], found["patch_size"], c.count(self.stem)
        registers = c.size("register_tokens", 1, 0)
        rows = c.size("pos_embed", 1, 0)
        return {
            **found,
            **self.block_fields(c, D, D // 64 if D == 1536 else heads_of(D, depth)),  # giant: 24
            "depth": depth,
            "image_size": place_fields(c, rows, (1,), p)[1],
            "registers": registers,
            "position_covers_prefix": not registers,
            "classes": 0,
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        replaced: tuple[str, ...] = ("cls_token", "reg_token", "pos_embed")
        gated: list[Rule] = []
        if config.mlp == "swiglu":
            gated += pairs("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.w12")
            gated += pairs("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.w3")
            replaced += tuple(rule.ours for rule in gated)
        return [
            *(rule for rule in super().rules(config) if rule.ours not in replaced),
            *gated,
            *folded(config, "cls_token", "pos_embed"),
            Rule("reg_token", ("register_tokens",)),
        ]

    def export_refusal(self, config: ViTConfig) -> str:
        if config.layer_scale is None:
            return "layer_scale=None, and it has a LayerScale"
        if not config.registers:
            return "without registers its names are timm's"
        return unlike(
            config, class_token=True, position="learned", classes=0, head="linear",
            position_covers_prefix=False, pre_norm=False, qk_norm=False, pool="token",
        )  # fmt: skip
