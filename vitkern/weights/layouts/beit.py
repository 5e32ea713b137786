"""BEiT as its authors and timm name it: vitkern's names, but for LayerScale and biases."""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import Checkpoint, Rule, heads_of, patch_fields, unlike, without_keys
from .relative import image_size_of, table_rule
from .timm import Timm

BIASES = ("q_bias", "v_bias")
SHARED = "rel_pos_bias.relative_position_bias_table"


class Beit(Timm):
    holds = ()
    name, title = "beit", "BEiT as its authors and timm name it"
    marks = (*Timm.marks, r"blocks\.0\.(attn\.q_bias|gamma_1)")
    own_names = False
    unmarked = r"(?!)"
    ignored = r"mask_token|.*relative_position_index$|.*k_bias$"

    def refusal(self, c: Checkpoint) -> str:
        table = "blocks.0.attn.relative_position_bias_table" in c.tensors or SHARED in c.tensors
        if table and "pos_embed" in c.tensors:
            return "learned positions beside relative ones"
        return super().refusal(c)

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, p, depth = found["width"], found["patch_size"], c.count(self.stem)
        table = c.shape("blocks.0.attn.relative_position_bias_table") or c.shape(SHARED)
        heads = table[1] if len(table) == 2 else heads_of(D, depth)
        found |= self.block_fields(c, D, heads) | self.head_fields(c) | {"depth": depth}
        found["qkv_bias"], found["key_bias"] = "blocks.0.attn.q_bias" in c.tensors, True
        found["layer_scale"] = 0.1 if "blocks.0.gamma_1" in c.tensors else None
        if table:
            size = image_size_of(c, table[0], 1, p, None)
            return found | {"position": "relative", "image_size": size}
        return found | self.positions(c, p, 1)

    def rules(self, config: ViTConfig) -> list[Rule]:
        bias = "blocks.{i}.attn.qkv.bias"
        replaced = {bias, "blocks.{i}.ls1.gamma", "blocks.{i}.ls2.gamma"}
        own = [Rule(f"blocks.{{i}}.attn.{n}", (f"blocks.{{i}}.attn.{n}",)) for n in BIASES]
        return [
            *([] if config.key_bias else own),
            *(rule for rule in super().rules(config) if rule.ours not in replaced),
            *table_rule("blocks.{i}.attn.relative_position_bias_table", SHARED)[1:],
            without_keys(bias, "blocks.{i}.attn.q_bias", "blocks.{i}.attn.v_bias"),
            Rule("blocks.{i}.ls1.gamma", ("blocks.{i}.gamma_1",)),
            Rule("blocks.{i}.ls2.gamma", ("blocks.{i}.gamma_2",)),
        ]

    def export_refusal(self, config: ViTConfig) -> str:
        return unlike(
            config, class_token=True, registers=0, position="relative", qkv_bias=True,
            qk_norm=False, pre_norm=False, head="linear",
        )  # fmt: skip
