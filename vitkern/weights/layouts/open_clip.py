"""The visual tower of OpenCLIP and of OpenAI's CLIP."""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import (
    Checkpoint,
    Layout,
    Rule,
    heads_of,
    invented,
    pairs,
    patch_fields,
    place_fields,
    plain_blocks,
    reshaped,
    unlike,
)  # fmt: skip

STEM = "transformer.resblocks."
BLOCK = {
    "norm1": "ln_1",
    "attn.proj": "attn.out_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


class OpenClip(Layout):
    """The activation is in no tensor: open_clip_config.json says quick_gelu, else it is gelu."""

    name, title = "open_clip", "OpenCLIP's visual tower"
    anchor, stem = "conv1.weight", STEM
    marks = (r"class_embedding", r"transformer\.resblocks\.0\.attn\.in_proj_weight")
    head = r"proj$|attn_pool\.|ln_post_pool"
    elsewhere = (
        r"transformer\.|text|token_embedding|positional_embedding|ln_final|logit_|attn_mask"
        r"|input_resolution|context_length|vocab_size"
    )

    def refusal(self, c: Checkpoint) -> str:
        return "a norm inside attention or MLP" if any(
            f"{STEM}0.{name}.weight" in c.tensors for name in ("attn.ln_q", "ln_attn", "mlp.ln")
        ) else ""  # fmt: skip

    def head_refusal(self, c: Checkpoint) -> str:
        pooled = any(name.startswith("attn_pool.") for name in c.tensors)
        return "attention pooling (the MAP head)" if pooled else ""

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found: dict[str, Any] = patch_fields(c, self.anchor)
        D, p, depth = found["width"], found["patch_size"], c.count(STEM)
        about = c.config.get("model_cfg")
        about = about if isinstance(about, dict) else {}
        tower = about.get("vision_cfg")
        wide = tower.get("head_width") if isinstance(tower, dict) else None
        rows = c.size("positional_embedding", 0, 0)
        mlp, head = c.shape(f"{STEM}0.mlp.c_fc.weight"), c.shape("proj")
        return {
            **found,
            "depth": depth,
            "heads": D // wide if isinstance(wide, int) and 0 < wide <= D else heads_of(D, depth),
            "mlp_width": mlp[0] if mlp else 4 * D,
            "image_size": place_fields(c, rows, (1,), p)[1],
            "pre_norm": True,
            "norm_eps": 1e-5,
            "activation": "quick_gelu" if about.get("quick_gelu") is True else "gelu",
            "layer_scale": 1e-5 if f"{STEM}0.ls_1.gamma" in c.tensors else None,
            "classes": head[1] if len(head) == 2 else 0,
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        qkv = [
            Rule(f"blocks.{{i}}.attn.qkv.{part}", (f"{STEM}{{i}}.attn.in_proj_{part}",))
            for part in ("weight", "bias")
        ]
        why = "its projection has no bias, and this head has one"
        return [
            reshaped("cls_token", "class_embedding", lambda t: t[0, 0]),
            reshaped("pos_embed", "positional_embedding", lambda t: t[0]),
            Rule("patch_embed.proj.weight", (self.anchor,)),
            *pairs("norm_pre", "ln_pre"),
            *qkv,
            *plain_blocks(STEM, BLOCK),
            Rule("blocks.{i}.ls1.gamma", (f"{STEM}{{i}}.ls_1.gamma",)),
            Rule("blocks.{i}.ls2.gamma", (f"{STEM}{{i}}.ls_2.gamma",)),
            *pairs("norm", "ln_post"),
            Rule("head.weight", ("proj",), lambda parts, shape: parts[0].t(), lambda t: [t.t()]),
            invented("head.bias", why),
        ]

    def export_refusal(self, config: ViTConfig) -> str:
        return unlike(
            config, class_token=True, registers=0, pool="token", position="learned", qkv_bias=True,
            position_covers_prefix=True, qk_norm=False, pre_norm=True, norm_eps=1e-5,
            final_norm="before_pool", head="linear",
        )  # fmt: skip

    def export_prefix(self, config: ViTConfig) -> str:
        return "visual."
