"""timm's EVA, EVA-02 and DINOv3: vitkern's names, but for LayerScale.

Tensors do not tell rotary positions that nobody learns: those follow from the model's name in
config.json, from what a file of vitkern's says, or from the caller.
"""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import Checkpoint, Refused, Rule, place_fields
from .timm import ROPE, Timm

_NAMED = ("heads", "activation", "norm_eps", "layer_scale", "block", "dynamic_image_size")
_DINOV3 = {"rope": "dinov3", "rope_temperature": 100.0, "rope_half": True, "norm_eps": 1e-5}
_DINOV3 |= {"dynamic_image_size": True}
_ENORMOUS = (1792, 64)  # width and depth of EVA-02's enormous CLIP, whose norms come last


class Eva(Timm):
    name, title = "eva", "timm's EVA, EVA-02 or DINOv3"
    marks = (
        r"blocks\.0\.norm1\.weight",
        r"blocks\.0\.(gamma_1|attn\.(q_bias|q_proj\.weight)|mlp\.fc1_g\.weight)",
    )
    unmarked = r".*relative_position_|rel_pos_bias|decoder_|head\.(mlp|last_layer)"
    ignored = r"mask_token|.*k_bias$|rope\.(periods|t_x|t_y|pos_embed.*|bands)$"

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        found = super().fields(c)
        if "blocks.0.gamma_1" in c.tensors:
            found["layer_scale"] = 1e-5
        if (found["width"], found["depth"]) == _ENORMOUS:
            found.setdefault("block", "post_norm")
        return found | self.rope_fields(c, found)

    def rope_fields(self, c: Checkpoint, found: dict[str, Any]) -> dict[str, Any]:
        known = _named(c)
        if known is not None:
            pixels = {"image_size": known.image_size} if "pos_embed" not in c.tensors else {}
            return pixels | {key: getattr(known, key) for key in (*ROPE, *_NAMED)}
        if "rope" in c.said:
            return {}
        learned, gated = "pos_embed" in c.tensors, found.get("mlp", "plain") != "plain"
        if "rope.freqs" in c.tensors:
            return {"rope": "mixed", "rope_temperature": 10.0, "rope_x_first": True}
        if learned and not gated and not found["layer_scale"]:  # EVA's first models
            return {}
        if not learned and found["class_token"] and found["registers"] == 4:
            return {**_DINOV3, "image_size": c.said.get("image_size", 256)}
        raise Refused(
            "its rotary positions are not told by its tensors: load the folder with its"
            ' config.json, or pass rope="axial" and what goes with it (rope_temperature,'
            ' rope_grid, ...), or rope="none"'
        )

    def positions(self, c: Checkpoint, p: int, T: int) -> dict[str, Any]:
        shape = c.shape("pos_embed")
        if len(shape) != 3:
            return {"position": "none", "image_size": c.said.get("image_size", 224)}
        prefix, size = place_fields(c, shape[1], (T, 0), p)
        return {"position": "learned", "image_size": size, "position_covers_prefix": bool(prefix)}

    def rules(self, config: ViTConfig) -> list[Rule]:
        gammas = {f"blocks.{{i}}.ls{n}.gamma": f"blocks.{{i}}.gamma_{n}" for n in (1, 2)}
        plain = [rule for rule in super().rules(config) if rule.ours not in gammas]
        return [*plain, *(Rule(ours, (theirs,)) for ours, theirs in gammas.items())]

    def export_refusal(self, config: ViTConfig) -> str:
        if config.position not in ("learned", "none"):
            return f"position={config.position!r}, and it has learned ones or none"
        if config.block not in ("pre_norm", "post_norm"):
            return f"block={config.block!r}, and it has norms before or after attention and MLP"
        return "" if _is_eva(config) else "its blocks are those of timm's plain ViT"


def _named(c: Checkpoint) -> ViTConfig | None:
    name = c.config.get("architecture")
    try:
        return ViTConfig.named(name) if isinstance(name, str) else None
    except ValueError:
        return None


def _is_eva(config: ViTConfig) -> bool:
    """Whether its parameters show that it is not timm's VisionTransformer."""
    no_key = config.qkv_bias and not config.key_bias
    scaled = config.layer_scale is not None and config.rope != "none"
    return no_key or config.separate_qkv or config.mlp == "swiglu_split" or scaled
