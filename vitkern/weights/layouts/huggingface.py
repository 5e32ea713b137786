"""What Hugging Face's Vision Transformers have in common: config.json and two spellings of names.

A file keeps the names that transformers has had from the beginning; a live model of its version 5
has shorter ones (and a LoRA adapter of it too), which `SPELLINGS` takes back.
"""

from __future__ import annotations

from typing import Any

from ...config import ViTConfig
from .base import Checkpoint, Layout, Refused, place_fields

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
THEIR_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}

SPELLINGS = (
    (r"(?<!encoder\.)\blayers\.([0-9]+)\.(?=attention\.|mlp\.|layernorm|lambda_|relative)",
     r"encoder.layer.\1."),
    (r"(encoder\.layer\.[0-9]+\.attention)\.q_proj", r"\1.attention.query"),
    (r"(encoder\.layer\.[0-9]+\.attention)\.k_proj", r"\1.attention.key"),
    (r"(encoder\.layer\.[0-9]+\.attention)\.v_proj", r"\1.attention.value"),
    (r"(encoder\.layer\.[0-9]+\.attention)\.o_proj", r"\1.output.dense"),
)  # fmt: skip
# Of ViT, DeiT and BEiT, not of DINOv2, whose MLP has these names in files.
MLP_SPELLINGS = (
    (r"(encoder\.layer\.[0-9]+)\.mlp\.fc1\.", r"\1.intermediate.dense."),
    (r"(encoder\.layer\.[0-9]+)\.mlp\.fc2\.", r"\1.output.dense."),
)


class HuggingFace(Layout):
    """A model of transformers; `kinds` are the values of model_type whose config.json counts."""

    kinds: tuple[str, ...] = ()

    def about(self, c: Checkpoint) -> dict[str, Any]:
        """config.json, where it is of this model; that of the vision tower, where it has two."""
        for about in (c.config, c.config.get("vision_config")):
            if isinstance(about, dict) and about.get("model_type") in self.kinds:
                inner = about.get("vision_config")
                return inner if isinstance(inner, dict) else about
        return {}

    def common(self, c: Checkpoint, heads: int) -> dict[str, Any]:
        """The fields that config.json alone tells: heads, activation, eps; pixels' mean and std."""
        about = self.about(c)
        act = about.get("hidden_act", self.default_activation)
        if not isinstance(act, str) or act not in ACTIVATIONS:
            raise Refused(f"it needs the activation {act!r:.40}, which vitkern does not have")
        return {
            "heads": about.get("num_attention_heads", heads),
            "activation": ACTIVATIONS[act],
            "norm_eps": about.get("layer_norm_eps", self.default_eps),
        }

    default_activation = "gelu"
    default_eps = 1e-12

    def placed(self, c: Checkpoint, rows: int, prefix: int, patch: int) -> int | tuple[int, int]:
        """The image size of a table of positions."""
        return place_fields(c, rows, (prefix,), patch, self.about(c).get("image_size"))[1]

    def written(self, config: ViTConfig, kind: str, architecture: str) -> dict[str, Any]:
        """The part of config.json that every model has."""
        size = config.image_size
        labels = {str(i): f"LABEL_{i}" for i in range(config.classes)}
        return {
            "architectures": [architecture],
            "model_type": kind,
            "hidden_size": config.width,
            "num_hidden_layers": config.depth,
            "num_attention_heads": config.heads,
            "intermediate_size": config.mlp_width,
            "hidden_act": THEIR_ACTIVATIONS[config.activation],
            "layer_norm_eps": config.norm_eps,
            "image_size": size if isinstance(size, int) else list(size),
            "patch_size": config.patch_size,
            "num_channels": config.channels,
            "dtype": "float32",
            **({"id2label": labels, "label2id": {v: int(k) for k, v in labels.items()}}
               if labels else {}),
        }  # fmt: skip
