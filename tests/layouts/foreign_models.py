"""Small models of other libraries with random weights, and the files that those libraries write."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitkern.bench import timm_import

from . import originals

timm_import.prepare()

SIZES = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
    image_size=32, patch_size=8,
)  # fmt: skip
DINOV2 = {k: v for k, v in SIZES.items() if k != "intermediate_size"} | {"mlp_ratio": 2}
RELATIVE = SIZES | {"use_relative_position_bias": True}
SHARED = SIZES | {"use_shared_relative_position_bias": True, "use_mean_pooling": False}


@dataclass(frozen=True)
class Case:
    """A model of another library: how it is made, written and asked."""

    layout: str  # of vitkern.weights.layouts
    library: str  # to skip without it; "" for what is written out in originals.py
    make: Callable[[], nn.Module]
    write: Callable[[nn.Module, pathlib.Path], pathlib.Path]  # the file or folder to load
    ask: Callable[[nn.Module, Tensor], Tensor]  # what vitkern's model gives for an image
    options: dict[str, Any] = field(default_factory=dict)  # of `load`
    export: str = ""  # the layout to write again, "" where there is none


def randomised(model: nn.Module) -> nn.Module:
    """Random weights so wide that every part shows: gains are around 1, matrices keep a scale."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if p.ndim == 1 and not name.endswith(("bias", "embedding")):
                p.copy_(1 + 0.3 * noise)
            elif p.ndim >= 2 and not any(w in name for w in ("pos", "token", "table", "probe")):
                p.copy_(1.2 * noise / p[0].numel() ** 0.5)
            else:
                p.copy_(0.5 * noise)
    return model.eval()


# ---- Hugging Face ----


def _logits(model: Any, image: Tensor) -> Tensor:
    return model(image).logits


def _pooled(model: Any, image: Tensor) -> Tensor:
    return model(image).pooler_output


def _token(model: Any, image: Tensor) -> Tensor:
    return model(image).last_hidden_state[:, 0]


def _rows(model: Any, image: Tensor) -> Tensor:
    return model(image).last_hidden_state


def _embedded(model: Any, image: Tensor) -> Tensor:
    return model(image).image_embeds


def _pretrained(model: Any, folder: pathlib.Path) -> pathlib.Path:
    model.save_pretrained(folder / "model")
    return folder / "model"


def transformers_model(model: str, config: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    return randomised(getattr(transformers, model)(getattr(transformers, config)(**sizes)))


def hugging_face(
    layout: str, model: str, config: str, sizes: dict[str, Any], ask: Callable, export: str = "",
    **options: Any,
) -> Case:  # fmt: skip
    make = functools.partial(transformers_model, model, config, sizes)
    return Case(layout, "transformers", make, _pretrained, ask, options, export)


def _tower(**more: Any) -> dict[str, Any]:
    return {"vision_config": SIZES, "num_labels": 5, **more}


# ---- timm and torchvision ----

TIMM = dict(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=5,
            mlp_ratio=2)  # fmt: skip


def timm_vit(**changes: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return randomised(VisionTransformer(**{**TIMM, **changes}))


def timm_beit(**changes: Any) -> nn.Module:
    from timm.models.beit import Beit

    more = dict(use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1)
    return randomised(Beit(**{**TIMM, **more, **changes}))


def timm_eva(**changes: Any) -> nn.Module:
    from timm.models.eva import Eva

    return randomised(Eva(**{**TIMM, **changes}))


def timm_giant() -> nn.Module:
    """As DINOv2's giant: a gate in the MLP."""
    from timm.layers import SwiGLUPacked

    return timm_vit(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, init_values=1e-5, mlp_ratio=4)


EVA02 = dict(use_rot_pos_emb=True, ref_feat_shape=(16, 16), swiglu_mlp=True)
DINOV3 = dict(
    use_rot_pos_emb=True, use_abs_pos_emb=False, rope_type="dinov3", rope_temperature=100,
    rope_rotate_half=True, num_reg_tokens=4, init_values=1e-5, qkv_bias=False, global_pool="token",
    use_fc_norm=False, dynamic_img_size=True, num_classes=0,
)  # fmt: skip
AXIAL: dict[str, Any] = dict(rope="axial", rope_grid=(16, 16))


def torchvision_vit(**changes: Any) -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    sizes = dict(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=128)
    return randomised(VisionTransformer(**sizes, num_classes=5, **changes))


def _state_dict(model: nn.Module, folder: pathlib.Path) -> pathlib.Path:
    torch.save(model.state_dict(), folder / "weights.pth")
    return folder / "weights.pth"


def _call(model: nn.Module, image: Tensor) -> Tensor:
    return model(image)


def plain(layout: str, library: str, make: Callable, export: str, **options: Any) -> Case:
    """Tensors do not tell how many heads there are: a width of 64 would have one."""
    given = {"heads": 2, **options}
    return Case(layout, library, make, _state_dict, _call, given, export)


def original(kind: str, layout: str, export: str = "", **options: Any) -> Case:
    """A checkpoint written by its documented names, and the independent model that it is of."""
    make = functools.partial(originals.MODELS[kind])
    return Case(layout, "", make, originals.WRITERS[kind], _call, options, export)


HF = hugging_face
CASES: dict[str, Case] = {
    "timm": plain("timm", "timm", timm_vit, "timm"),
    "timm-deit3": plain(
        "timm", "timm", functools.partial(timm_vit, no_embed_class=True, init_values=0.1), "timm"
    ),
    "timm-registers": plain(
        "timm", "timm", functools.partial(timm_vit, reg_tokens=4, no_embed_class=True), "timm"
    ),
    "timm-gap": plain("timm", "timm", functools.partial(timm_vit, global_pool="avg"), "timm"),
    "timm-clip": plain(
        "timm", "timm", functools.partial(timm_vit, pre_norm=True, act_layer="quick_gelu"), "timm",
        activation="quick_gelu", norm_eps=1e-6,
    ),
    "timm-beit": plain("beit", "timm", timm_beit, "beit"),
    "timm-giant": plain("timm", "timm", timm_giant, "timm"),
    "timm-eva": plain("eva", "timm", timm_eva, "eva"),
    "timm-eva02": plain("eva", "timm", functools.partial(timm_eva, **EVA02), "eva", **AXIAL),
    "timm-eva02-normed": plain(
        "eva", "timm", functools.partial(timm_eva, **EVA02, scale_mlp=True, scale_attn_inner=True,
                                         qkv_fused=False), "eva", **AXIAL,
    ),
    "timm-dinov3": plain(
        "eva", "timm", functools.partial(timm_eva, **DINOV3), "eva", image_size=32, norm_eps=1e-6
    ),
    "torchvision": plain("torchvision", "torchvision", torchvision_vit, "torchvision"),
    "torchvision-tanh": plain(
        "torchvision", "torchvision", functools.partial(torchvision_vit, representation_size=48),
        "torchvision",
    ),
    "hf-vit": HF("hf_vit", "ViTForImageClassification", "ViTConfig", SIZES | {"num_labels": 5},
                 _logits, "hf_vit"),
    "hf-vit-pooler": HF("hf_vit", "ViTModel", "ViTConfig", SIZES, _pooled, "hf_vit"),
    "hf-vit-headless": HF("hf_vit", "ViTModel", "ViTConfig", SIZES, _token, classes=0),
    "hf-deit": HF("hf_deit", "DeiTForImageClassification", "DeiTConfig", SIZES | {"num_labels": 5},
                  _logits, "hf_deit"),
    "hf-dinov2": HF("hf_dinov2", "Dinov2Model", "Dinov2Config", DINOV2, _pooled, "hf_dinov2"),
    "hf-dinov2-registers": HF("hf_dinov2", "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig",
                              DINOV2, _pooled, "hf_dinov2"),
    "hf-dinov2-giant": HF("hf_dinov2", "Dinov2Model", "Dinov2Config",
                          DINOV2 | {"use_swiglu_ffn": True}, _pooled, "hf_dinov2"),
    "hf-dinov3": HF("hf_dinov3", "DINOv3ViTModel", "DINOv3ViTConfig",
                    SIZES | {"num_register_tokens": 4}, _pooled, "hf_dinov3"),
    "hf-dinov3-gated": HF("hf_dinov3", "DINOv3ViTModel", "DINOv3ViTConfig",
                          SIZES | {"use_gated_mlp": True, "hidden_act": "silu"}, _pooled,
                          "hf_dinov3"),
    "hf-clip": HF("hf_clip", "CLIPVisionModel", "CLIPVisionConfig", SIZES, _pooled, "hf_clip"),
    "hf-clip-projection": HF("hf_clip", "CLIPVisionModelWithProjection", "CLIPVisionConfig",
                             SIZES | {"projection_dim": 24}, _embedded, "hf_clip"),
    "hf-clip-classifier": HF("hf_clip", "CLIPForImageClassification", "CLIPConfig", _tower(),
                             _logits),
    "hf-siglip": HF("hf_siglip", "SiglipVisionModel", "SiglipVisionConfig", SIZES, _rows,
                    "hf_siglip", pool="none"),
    "hf-siglip-classifier": HF("hf_siglip", "SiglipForImageClassification", "SiglipConfig",
                               _tower(), _logits, "hf_siglip"),
    "hf-beit": HF("hf_beit", "BeitForImageClassification", "BeitConfig",
                  RELATIVE | {"num_labels": 5}, _logits, "hf_beit"),
    "hf-beit-shared": HF("hf_beit", "BeitModel", "BeitConfig", SHARED, _pooled, "hf_beit"),
    "jax": original("jax", "jax", "jax"),
    "jax-pre-logits": original("jax-pre-logits", "jax", "jax"),
    "big-vision": original("big-vision", "jax"),
    "big-vision-scan": original("big-vision-scan", "jax"),
    "dino": original("dino", "dino", heads=2),
    "dinov2": original("dinov2", "dinov2", "dinov2", heads=2),
    "mae": original("mae", "mae", heads=2),
    "open-clip": original("open-clip", "open_clip", "open_clip", heads=2),
}  # fmt: skip
