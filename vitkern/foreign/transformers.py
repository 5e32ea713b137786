"""transformers' live encoders (ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP), read as a ViT.

transformers is not imported to read them: its models are recognised by class and module names. The
names of their parts are those of its version 5.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..config import ViTConfig
from .towers import Reading, affine

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
_ENCODERS = {
    "DINOv3ViTModel",
    "ViTModel", "DeiTModel", "Dinov2Model", "Dinov2WithRegistersModel", "CLIPVisionModel",
    "CLIPVisionTransformer", "SiglipVisionModel", "SiglipVisionTransformer",
}  # fmt: skip


def reader(module: nn.Module) -> Callable[[Any], Reading] | None:
    """How a module is read, if it is an encoder of transformers' that a ViT can stand for."""
    kind = type(module)
    known = kind.__name__ in _ENCODERS and kind.__module__.startswith("transformers.")
    return _read if known and hasattr(module, "embeddings") else None


def is_transformers(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def _read(encoder: Any) -> Reading:
    try:
        config = _config(encoder)
        parameters = {**_ends(encoder, config), **_blocks(encoder, config)}
    except AttributeError as error:
        _refuse(f"a {type(encoder).__name__} of this version of transformers: {error}")
    return Reading(config, parameters, _finish)


def _layers(encoder: Any) -> Any:
    if hasattr(encoder, "layers"):
        return encoder.layers
    if hasattr(encoder, "model"):  # DINOv3
        return encoder.model.layer
    return encoder.encoder.layers if hasattr(encoder.encoder, "layers") else encoder.encoder.layer


def _config(encoder: Any) -> ViTConfig:
    c, e, layers = encoder.config, encoder.embeddings, _layers(encoder)
    name = type(encoder).__name__
    act = c.hidden_act
    if act not in _ACTIVATIONS:
        _refuse(f"{name} has the activation {act!r}, expected one of {', '.join(_ACTIVATIONS)}")
    proj, size = _projection(e), c.image_size
    patch = proj.kernel_size[0]
    if len({*proj.kernel_size, *proj.stride}) != 1:
        _refuse(f"{name} has patches {proj.kernel_size} with stride {proj.stride}")
    rows, columns = (size, size) if isinstance(size, int) else size
    clip = name.startswith("CLIP")
    return ViTConfig(
        image_size=(rows // patch * patch, columns // patch * patch),
        patch_size=patch,
        channels=proj.in_channels,
        width=c.hidden_size,
        depth=len(layers),
        heads=c.num_attention_heads,
        classes=0,
        class_token=_class_token(e) is not None,
        registers=sum(token.shape[1] for token in _registers(e)),
        pool="none",
        layer_scale=1.0 if name.startswith(("Dinov2", "DINOv3")) else None,
        pre_norm=clip,
        final_norm="none" if clip else "before_pool",
        norm_eps=c.layer_norm_eps,
        **_mlp(layers, _ACTIVATIONS[act], c.hidden_size),
        **_attention(c, name),
    )


def _mlp(layers: Any, activation: str, width: int) -> dict[str, Any]:
    if not len(layers):
        return {"mlp_width": width, "activation": activation}
    first = _first_layers(layers[0].mlp)
    if len(first) == 1:
        return {"mlp_width": first["mlp.fc1"].out_features, "activation": activation}
    gates = first["mlp.fc1_g"].out_features
    return {"mlp": "swiglu_split", "mlp_width": gates, "activation": "silu"}


def _first_layers(mlp: Any) -> dict[str, Any]:
    """What makes the hidden rows, by vitkern's names: one layer, or a gate and what it is of."""
    if hasattr(mlp, "gate_proj"):
        return {"mlp.fc1_g": mlp.gate_proj, "mlp.fc1_x": mlp.up_proj}
    return {"mlp.fc1": mlp.up_proj if hasattr(mlp, "up_proj") else mlp.fc1}


def _attention(c: Any, name: str) -> dict[str, Any]:
    """Which biases there are, and DINOv3's rotary positions."""
    if not name.startswith("DINOv3"):
        return {"qkv_bias": getattr(c, "qkv_bias", True)}
    if c.query_bias != c.value_bias or not c.proj_bias or not c.mlp_bias:
        _refuse(f"{name} has other biases than its published models")
    return {
        "qkv_bias": c.query_bias,
        "key_bias": c.key_bias or not c.query_bias,
        "separate_qkv": True,
        "position": "none",
        "rope": "dinov3",
        "rope_temperature": float(c.rope_theta),
        "rope_half": True,
    }


def _projection(embeddings: Any) -> nn.Conv2d:
    if hasattr(embeddings, "patch_embedding"):
        return embeddings.patch_embedding
    if isinstance(embeddings.patch_embeddings, nn.Conv2d):  # DINOv3
        return embeddings.patch_embeddings
    return embeddings.patch_embeddings.projection


def _class_token(embeddings: Any) -> Tensor | None:
    if hasattr(embeddings, "class_embedding"):
        return embeddings.class_embedding[None, None]
    return getattr(embeddings, "cls_token", None)


def _registers(embeddings: Any) -> list[Tensor]:
    """DeiT's distillation token is one, with a position of its own; DINOv2's have none."""
    names = ("distillation_token", "register_tokens")
    found = [getattr(embeddings, name) for name in names if hasattr(embeddings, name)]
    return [token for token in found if token.shape[1]]


def _ends(encoder: Any, config: ViTConfig) -> dict[str, Tensor]:
    """The parameters before and after the blocks."""
    e, proj = encoder.embeddings, _projection(encoder.embeddings)
    named = {"patch_embed.proj.weight": proj.weight}
    if proj.bias is not None:
        named["patch_embed.proj.bias"] = proj.bias
    token, registers = _class_token(e), _registers(e)
    if token is not None:
        named["cls_token"] = token
    if registers:
        named["reg_token"] = registers[0]
    if config.position == "none":
        return named | affine("norm", encoder.norm)
    if hasattr(e, "position_embedding"):
        position = e.position_embedding.weight[None]
    else:
        position = e.position_embeddings
    if hasattr(e, "register_tokens"):  # which have no positions: zeros, to be covered with the rest
        none = torch.zeros_like(e.register_tokens)
        position = torch.cat([position[:, :1], none, position[:, 1:]], 1)
    named["pos_embed"] = position
    if config.pre_norm:
        named |= affine("norm_pre", encoder.pre_layrnorm)
    elif hasattr(encoder, "post_layernorm"):
        named |= affine("norm", encoder.post_layernorm)
    else:
        named |= affine("norm", encoder.layernorm)
    return named


def _blocks(encoder: Any, config: ViTConfig) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for i, layer in enumerate(_layers(encoder)):
        at = f"blocks.{i}."
        norms = [
            getattr(layer, first) if hasattr(layer, first) else getattr(layer, second)
            for first, second in (("norm1", "layer_norm1"), ("norm2", "layer_norm2"))
            if hasattr(layer, first) or hasattr(layer, second)
        ] or [layer.layernorm_before, layer.layernorm_after]
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attention
        out = attention.out_proj if hasattr(attention, "out_proj") else attention.o_proj
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        _check_norms(i, norms, encoder.config.layer_norm_eps)
        gated = config.mlp != "plain"
        _check_activation(i, layer.mlp, "silu" if gated else encoder.config.hidden_act)
        first = _first_layers(layer.mlp)
        fc2 = layer.mlp.down_proj if hasattr(layer.mlp, "down_proj") else layer.mlp.fc2
        linears = (*parts, out, *first.values(), fc2)
        if any(type(linear) is not nn.Linear for linear in linears):
            _refuse(f"layer {i} has another module than nn.Linear; merge adapters first")
        named |= affine(f"{at}norm1", norms[0]) | affine(f"{at}norm2", norms[1])
        if config.separate_qkv:
            for key, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                biased = affine(f"{at}attn.{key}", part)
                named |= {name: value for name, value in biased.items() if value is not None}
        else:
            named[f"{at}attn.qkv.weight"] = torch.cat([part.weight for part in parts])
            if parts[0].bias is not None:
                named[f"{at}attn.qkv.bias"] = torch.cat([part.bias for part in parts])
        named |= affine(f"{at}attn.proj", out) | affine(f"{at}mlp.fc2", fc2)
        for key, linear in first.items():
            named |= affine(f"{at}{key}", linear)
        if hasattr(layer, "layer_scale1"):
            named[f"{at}ls1.gamma"] = layer.layer_scale1.lambda1
            named[f"{at}ls2.gamma"] = layer.layer_scale2.lambda1
    return named


def _check_norms(layer: int, norms: list[Any], eps: float) -> None:
    for norm in norms:
        if type(norm) is not nn.LayerNorm or norm.eps != eps:
            _refuse(f"layer {layer} has another norm than the configuration's LayerNorm")


def _check_activation(layer: int, mlp: Any, name: str) -> None:
    """The module itself: the configuration may say what somebody replaced."""
    known = sys.modules["transformers.activations"].ACT2FN[name]
    own = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    if type(own) is not type(known):
        kind = type(own).__name__
        _refuse(f"layer {layer} has the activation {kind}, its configuration says {name}")


def _finish(encoder: Any, tokens: Tensor) -> Any:
    """The encoder's output class, with its own pooling of the tokens."""
    name = type(encoder).__name__
    if name.startswith("CLIP"):
        pooled = encoder.post_layernorm(tokens[:, 0])
    elif name.startswith(("Dinov2", "DINOv3")):
        pooled = tokens[:, 0]
    else:
        head = getattr(encoder, "head" if name.startswith("Siglip") else "pooler", None)
        pooled = None if head is None else head(tokens)
    output = sys.modules[type(encoder).__module__].BaseModelOutputWithPooling
    return output(last_hidden_state=tokens, pooler_output=pooled)


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"accelerate: {message}")
