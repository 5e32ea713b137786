"""Small models with every option of ViTConfig, their weights so wide that each option shows."""

import pytest
import torch

from vitkern import ViT, ViTConfig
from vitkern.contract import FEW, SLACK, judge

BASE = ViTConfig(
    image_size=(24, 16), patch_size=4, width=32, depth=3, heads=2, mlp_width=80, classes=37
)  # grid 6 x 4

OPTIONS = {
    "plain": {},
    "registers": {"registers": 3},
    "registers-without-positions": {"registers": 2, "position_covers_prefix": False},
    "no-class-token": {"class_token": False, "pool": "mean"},
    "registers-only": {"class_token": False, "registers": 2, "pool": "mean"},
    "pool-mean": {"pool": "mean"},
    "pool-mean-after": {"pool": "mean", "final_norm": "after_pool"},
    "pool-none": {"pool": "none"},
    "no-head": {"classes": 0},
    "one-class": {"classes": 1},
    "norm-after-pool": {"final_norm": "after_pool"},
    "no-final-norm": {"final_norm": "none"},
    "position-none": {"position": "none"},
    "position-none-no-prefix": {"position": "none", "class_token": False, "pool": "mean"},
    "position-patches-only": {"position_covers_prefix": False},
    "position-2d": {"position": "learned_2d"},
    "position-sincos-1d": {"position": "sincos_1d"},
    "position-sincos-1d-patches-only": {"position": "sincos_1d", "position_covers_prefix": False},
    "position-sincos-2d": {"position": "sincos_2d", "registers": 1},
    "position-relative": {"position": "relative"},
    "position-relative-registers": {"position": "relative", "registers": 2},
    "position-relative-no-prefix": {"position": "relative", "class_token": False, "pool": "mean"},
    "no-qkv-bias": {"qkv_bias": False},
    "layer-scale": {"layer_scale": 0.1},
    "qk-norm": {"qk_norm": True},
    "pre-norm": {"pre_norm": True, "norm_eps": 1e-5},
    "gelu-tanh": {"activation": "gelu_tanh"},
    "quick-gelu": {"activation": "quick_gelu"},
    "silu": {"activation": "silu"},
    "swiglu": {"mlp": "swiglu", "activation": "silu", "mlp_width": 53, "layer_scale": 0.1},
    "swiglu-split-normed": {
        "mlp": "swiglu_split", "activation": "silu", "mlp_norm": True, "attention_norm": True,
        "separate_qkv": True, "key_bias": False,
    },
    "mlp-norm": {"mlp_norm": True, "key_bias": False},
    "separate-qkv": {"separate_qkv": True, "qkv_bias": False},
    "position-rope": {"rope": "axial", "rope_grid": (5, 5), "rope_offset": 1.0, "registers": 1},
    "position-rope-x-first": {"rope": "axial", "rope_temperature": 100.0, "rope_x_first": True,
                              "qk_norm": True, "position": "none"},
    "position-rope-mixed": {"rope": "mixed", "rope_temperature": 10.0, "position": "none"},
    "position-rope-dinov3": {"rope": "dinov3", "rope_temperature": 100.0, "rope_half": True,
                             "position": "none", "class_token": False, "pool": "mean"},
    "head-tanh": {"head": "tanh", "representation_size": 24},
    "head-token-norm": {"head": "token_norm", "position": "sincos_1d"},
    "one-channel": {"channels": 1},
    "one-block": {"depth": 1},
    "no-blocks": {"depth": 0},
    "one-patch": {"image_size": 4},
    "stem": {"stem": "conv", "patch_size": 1, "image_size": (24, 16)},
    "stem-patches": {"stem": "conv", "patch_size": 2, "image_size": (48, 32), "registers": 1},
    "odd-sizes": {"width": 39, "heads": 3, "mlp_width": 53, "image_size": 15, "patch_size": 5},
}  # fmt: skip

PATHS = ("reference", "fused", "engine")


def tiny(dtype=torch.float32, seed=0, **changes):
    """A model of random parameters: matrices keep the scale of a row, gains are around 1."""
    model = ViT(BASE.replace(**changes), dtype=dtype)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g, dtype=torch.float64)
            if p.ndim == 1 and name.endswith(("weight", "gamma")):
                noise = 1 + 0.3 * noise
            elif p.ndim >= 2 and name.endswith("weight"):
                noise = 1.2 * noise / p[0].numel() ** 0.5
            else:
                noise = 0.5 * noise
            p.copy_(noise)
    return model.eval()


def picture(model, B=5, seed=1, **size):
    """Seeded images of the model's size (or y=, x= pixels) in its dtype."""
    c = model.config
    y, x = size.get("y", c.pixels[0]), size.get("x", c.pixels[1])
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, c.channels, y, x, generator=g, dtype=torch.float64).to(model.dtype)


def force(model, path, image):
    """Make the model take a path; skips, with the reason, what the engine does not serve."""
    if path == "engine":
        with torch.no_grad():
            precision = model.precision or "fp32"
            engines = model.engines
            reason = engines.why_not(image, precision) or engines.unpackable(precision)
        if reason:
            pytest.skip(f"the engine does not serve this: {reason}")
    model.path = path
    return model


def state_of(model, dtype=torch.float64):
    return {name: p.detach().to(dtype) for name, p in model.state_dict().items()}


def check_error(got, torchs, truth, dtype, what, gpu=None):
    """The project's error rule: at most 2x the worst and 1.25x the rms error that torch makes."""
    slack = SLACK if truth.numel() > FEW else (4.0, 4.0)  # a handful has no stable rms
    verdict = judge(got, torchs, truth, dtype=dtype, slack=slack, gpu=gpu)
    assert verdict.passed, f"{what}: {verdict.problem}"
