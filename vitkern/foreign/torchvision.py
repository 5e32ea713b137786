"""torchvision's live Vision Transformers (`vit_b_16` and its like), read as a ViT's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from ..config import ViTConfig
from .towers import Reading, affine


def reader(module: nn.Module) -> Callable[[Any], Reading] | None:
    """How a module is read, if it is torchvision's VisionTransformer."""
    known = type(module).__name__ == "VisionTransformer" and hasattr(module, "conv_proj")
    return _read if known else None


def _read(model: Any) -> Reading:
    proj, layers = model.conv_proj, list(model.encoder.layers)
    if type(proj) is not nn.Conv2d:
        _refuse(f"conv_proj is a {type(proj).__name__} (a convolutional stem), not a projection")
    if not layers:
        _refuse("the model has no layers")
    config = ViTConfig(
        image_size=model.image_size,
        patch_size=model.patch_size,
        channels=proj.in_channels,
        width=model.hidden_dim,
        depth=len(layers),
        heads=layers[0].num_heads,
        mlp_width=layers[0].mlp[0].out_features,
        classes=0,
        pool="none",
        norm_eps=model.encoder.ln.eps,
    )
    named: dict[str, Tensor] = {"cls_token": model.class_token}
    named["pos_embed"] = model.encoder.pos_embedding
    named |= affine("patch_embed.proj", proj) | affine("norm", model.encoder.ln)
    for i, layer in enumerate(layers):
        at, attention, (fc1, act, _, fc2, *_) = f"blocks.{i}.", layer.self_attention, layer.mlp
        if type(act) is not nn.GELU or act.approximate != "none":
            _refuse(f"layer {i} has another activation than exact GELU")
        if attention.in_proj_weight is None:
            _refuse(f"layer {i} has another attention than torchvision's own")
        for norm in (layer.ln_1, layer.ln_2):
            if not isinstance(norm, nn.LayerNorm) or norm.eps != config.norm_eps:
                _refuse(f"layer {i} has another norm, or another eps, than the last one")
        named[f"{at}attn.qkv.weight"] = attention.in_proj_weight
        named[f"{at}attn.qkv.bias"] = attention.in_proj_bias
        named |= affine(f"{at}attn.proj", attention.out_proj)
        named |= affine(f"{at}norm1", layer.ln_1) | affine(f"{at}norm2", layer.ln_2)
        named |= affine(f"{at}mlp.fc1", fc1) | affine(f"{at}mlp.fc2", fc2)
    return Reading(config, named, _finish)


def _finish(model: Any, tokens: Tensor) -> Tensor:
    return model.heads(tokens[:, 0])


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"accelerate: {message}")
