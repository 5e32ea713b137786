"""Checkpoints of projects that are no Python package here: their documented names and shapes, and
an independent Vision Transformer, written in the plainest PyTorch, that says what they compute.

JAX: google-research/vision_transformer and big_vision. PyTorch: DINO, DINOv2, MAE, OpenCLIP.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, H, L, M, P, GRID = 64, 2, 2, 128, 8, 4  # width, heads, depth, MLP width, patch, patches a side
E = D // H


def _linear(rows: int, columns: int) -> nn.ParameterDict:
    g = torch.Generator().manual_seed(rows * 1000 + columns)
    made = {
        "weight": torch.randn(rows, columns, generator=g) * 1.2 / columns**0.5,
        "bias": torch.randn(rows, generator=g) / 2,
    }
    return nn.ParameterDict(made)


def _norm(seed: int) -> nn.ParameterDict:
    g = torch.Generator().manual_seed(seed)
    made = {
        "weight": 1 + torch.randn(D, generator=g) * 0.3,
        "bias": torch.randn(D, generator=g) / 2,
    }
    return nn.ParameterDict(made)


def _rows(count: int, seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) / 2)


class Plain(nn.Module):
    """One token at a time in words: embed, (norm), attend, (scale), MLP, norm, pool, project."""

    def __init__(
        self, *, token: bool = True, registers: int = 0, pre_norm: bool = False,
        scale: bool = False, act: str = "none", eps: float = 1e-6, hidden: int = 0, out: int = 0,
        bias: bool = True, token_has_position: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.act, self.eps, self.pre_norm, self.hidden = act, eps, pre_norm, hidden
        g = torch.Generator().manual_seed(7)
        self.patch = nn.Parameter(torch.randn(D, 3, P, P, generator=g) / (3 * P * P) ** 0.5)
        self.patch_bias = None if pre_norm else nn.Parameter(torch.randn(D, generator=g) / 2)
        self.token = _rows(1, 8) if token else None
        self.registers = _rows(registers, 9) if registers else None
        self.position = _rows(GRID * GRID + (token and token_has_position), 10)
        self.first = _norm(11) if pre_norm else None
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "n1": _norm(20 + i), "q": _linear(D, D), "k": _linear(D, D),
                    "v": _linear(D, D), "o": _linear(D, D), "n2": _norm(40 + i),
                    "up": _linear(M, D), "down": _linear(D, M),
                }
            )
            for i in range(L)
        )  # fmt: skip
        for i, block in enumerate(self.blocks):  # else both blocks are the same, and q, k, v too
            for j, layer in enumerate(block.values()):
                layer["bias"].data.add_(0.1 * (i + j))
                layer["weight"].data.mul_(1 - 0.05 * (i + j))
        self.scales = (
            nn.ParameterList(1 + _rows(1, 60 + i)[0].detach() * 0.5 for i in range(2 * L))
            if scale
            else None
        )
        self.last = _norm(12)
        self.middle = _linear(hidden, D) if hidden else None
        self.head = _linear(out, hidden or D) if out else None
        if self.head is not None and not bias:
            self.head["bias"].data.zero_()
        self.eval()

    def forward(self, image: Tensor) -> Tensor:
        x = F.conv2d(image, self.patch, self.patch_bias, stride=P).flatten(2).mT  # (B, N, D)
        B = x.shape[0]
        position = self.position
        if self.token is not None:
            token = self.token
            if len(position) > GRID * GRID:
                token, position = token + position[:1], position[1:]
            x = torch.cat([token.expand(B, 1, D), x + position], 1)
        else:
            x = x + position
        if self.registers is not None:
            x = torch.cat([x[:, :1], self.registers.expand(B, -1, D), x[:, 1:]], 1)
        if self.first is not None:
            x = self._normed(x, self.first)
        for i, block in enumerate(self.blocks):
            y = self._attended(self._normed(x, block["n1"]), block)
            x = x + (y if self.scales is None else y * self.scales[2 * i])
            y = F.linear(self._normed(x, block["n2"]), block["up"]["weight"], block["up"]["bias"])
            y = torch.sigmoid(1.702 * y) * y if self.act == "quick" else F.gelu(
                y, approximate=self.act
            )  # fmt: skip
            y = F.linear(y, block["down"]["weight"], block["down"]["bias"])
            x = x + (y if self.scales is None else y * self.scales[2 * i + 1])
        x = self._normed(x, self.last)
        x = x[:, 0] if self.token is not None else x.mean(1)
        if self.middle is not None:
            x = F.linear(x, self.middle["weight"], self.middle["bias"]).tanh()
        return x if self.head is None else F.linear(x, self.head["weight"], self.head["bias"])

    def _normed(self, x: Tensor, norm: nn.ParameterDict) -> Tensor:
        return F.layer_norm(x, (D,), norm["weight"], norm["bias"], self.eps)

    def _attended(self, x: Tensor, block: nn.ModuleDict) -> Tensor:
        q, k, v = (
            F.linear(x, block[n]["weight"], block[n]["bias"]).unflatten(-1, (H, E)).transpose(1, 2)
            for n in ("q", "k", "v")
        )
        weights = (q @ k.mT / E**0.5).softmax(-1)
        y = (weights @ v).transpose(1, 2).flatten(2)
        return F.linear(y, block["o"]["weight"], block["o"]["bias"])


# ---- the JAX files ----


def _kernel(layer: nn.ParameterDict, path: str) -> dict[str, Tensor]:
    return {f"{path}/kernel": layer["weight"].mT, f"{path}/bias": layer["bias"]}


def _scale(norm: nn.ParameterDict, path: str) -> dict[str, Tensor]:
    return {f"{path}/scale": norm["weight"], f"{path}/bias": norm["bias"]}


def _jax_blocks(m: Plain, attention: str, norm: str, mlp: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for i, block in enumerate(m.blocks):
        stem = f"Transformer/encoderblock_{i}"
        found |= _scale(block["n1"], f"{stem}/LayerNorm_0") | _scale(block["n2"], f"{stem}/{norm}")
        for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
            found[f"{stem}/{attention}/{name}/kernel"] = block[short]["weight"].mT.reshape(D, H, E)
            found[f"{stem}/{attention}/{name}/bias"] = block[short]["bias"].reshape(H, E)
        found[f"{stem}/{attention}/out/kernel"] = block["o"]["weight"].mT.reshape(H, E, D)
        found[f"{stem}/{attention}/out/bias"] = block["o"]["bias"]
        found |= _kernel(block["up"], f"{stem}/{mlp}/Dense_0")
        found |= _kernel(block["down"], f"{stem}/{mlp}/Dense_1")
    return found


def _jax(m: Plain, folder: pathlib.Path, scan: bool = False) -> pathlib.Path:
    old = m.token is not None
    names = ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3") if old else (
        "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")  # fmt: skip
    found = _jax_blocks(m, *names) | _scale(m.last, "Transformer/encoder_norm")
    found |= {"embedding/kernel": m.patch.permute(2, 3, 1, 0), "embedding/bias": m.patch_bias}
    place = "Transformer/posembed_input/pos_embedding" if old else "pos_embedding"
    found[place] = m.position[None]
    if m.token is not None:
        found["cls"] = m.token[None]
    if m.middle is not None:
        found |= _kernel(m.middle, "pre_logits")
    if m.head is not None:
        found |= _kernel(m.head, "head")
    if scan:
        stem = "Transformer/encoderblock_"
        ends = sorted({n.split("/", 2)[2] for n in found if n.startswith(stem)})
        for end in ends:
            layers = [found.pop(f"{stem}{i}/{end}") for i in range(L)]
            found[f"Transformer/encoderblock/{end}"] = torch.stack(layers)
    prefix = "" if old else "params/"
    arrays = {prefix + name: t.detach().numpy() for name, t in found.items()}
    if not old:
        arrays["opt/0/count"] = np.zeros((), np.int32)
    np.savez(folder / "weights.npz", **arrays)
    return folder / "weights.npz"


# ---- the PyTorch files ----


def _own_names(m: Plain) -> dict[str, Tensor]:
    """The names of DINO, DINOv2 and MAE, which timm shares."""
    found = {
        "cls_token": m.token[None], "pos_embed": m.position[None],
        "patch_embed.proj.weight": m.patch, "patch_embed.proj.bias": m.patch_bias,
        "norm.weight": m.last["weight"], "norm.bias": m.last["bias"],
    }  # fmt: skip
    for i, block in enumerate(m.blocks):
        for part in ("weight", "bias"):
            qkv = torch.cat([block[n][part] for n in ("q", "k", "v")])
            found[f"blocks.{i}.attn.qkv.{part}"] = qkv
            for short, name in (
                ("n1", "norm1"), ("o", "attn.proj"), ("n2", "norm2"), ("up", "mlp.fc1"),
                ("down", "mlp.fc2"),
            ):  # fmt: skip
                found[f"blocks.{i}.{name}.{part}"] = block[short][part]
        if m.scales is not None:
            found[f"blocks.{i}.ls1.gamma"] = m.scales[2 * i]
            found[f"blocks.{i}.ls2.gamma"] = m.scales[2 * i + 1]
    return {name: t.detach().clone() for name, t in found.items()}


def _dino(m: Plain, folder: pathlib.Path) -> pathlib.Path:
    """Teacher and student with their projection heads, as the training script writes them."""
    head = {
        "head.mlp.0.weight": torch.ones(8, D),
        "head.last_layer.weight_g": torch.ones(9, 1),
        "head.last_layer.weight_v": torch.ones(9, 8),
    }
    whole = {f"backbone.{name}": t for name, t in _own_names(m).items()} | head
    student = {f"module.{name}": torch.zeros_like(t) for name, t in whole.items()}
    torch.save({"student": student, "teacher": whole, "epoch": 3}, folder / "checkpoint.pth")
    return folder / "checkpoint.pth"


def _dinov2(m: Plain, folder: pathlib.Path) -> pathlib.Path:
    found = _own_names(m) | {"mask_token": torch.zeros(1, D)}
    found["register_tokens"] = m.registers.detach()[None]
    torch.save(found, folder / "dinov2_vits14_reg4_pretrain.pth")
    return folder / "dinov2_vits14_reg4_pretrain.pth"


def _mae(m: Plain, folder: pathlib.Path) -> pathlib.Path:
    decoder = {"mask_token": torch.zeros(1, 1, 32), "decoder_embed.weight": torch.ones(32, D),
               "decoder_pos_embed": torch.ones(1, 17, 32), "decoder_norm.weight": torch.ones(32),
               "decoder_blocks.0.norm1.weight": torch.ones(32)}  # fmt: skip
    torch.save({"model": _own_names(m) | decoder}, folder / "mae_visualize_vit_base.pth")
    return folder / "mae_visualize_vit_base.pth"


def _open_clip(m: Plain, folder: pathlib.Path) -> pathlib.Path:
    found = {
        "class_embedding": m.token[0], "positional_embedding": m.position,
        "proj": m.head["weight"].mT, "conv1.weight": m.patch,
        "ln_pre.weight": m.first["weight"], "ln_pre.bias": m.first["bias"],
        "ln_post.weight": m.last["weight"], "ln_post.bias": m.last["bias"],
    }  # fmt: skip
    for i, block in enumerate(m.blocks):
        stem = f"transformer.resblocks.{i}"
        for part in ("weight", "bias"):
            qkv = torch.cat([block[n][part] for n in ("q", "k", "v")])
            found[f"{stem}.attn.in_proj_{part}"] = qkv
            for short, name in (
                ("n1", "ln_1"), ("o", "attn.out_proj"), ("n2", "ln_2"), ("up", "mlp.c_fc"),
                ("down", "mlp.c_proj"),
            ):  # fmt: skip
                found[f"{stem}.{name}.{part}"] = block[short][part]
    found = {f"visual.{name}": t.detach().clone() for name, t in found.items()}
    text = {"positional_embedding": torch.ones(77, 32), "logit_scale": torch.ones(()),
            "transformer.resblocks.0.ln_1.weight": torch.ones(32), "text_projection": torch.ones(
                32, 24), "token_embedding.weight": torch.ones(9, 32)}  # fmt: skip
    torch.save(found | text, folder / "open_clip_pytorch_model.bin")
    about = {"model_cfg": {"embed_dim": 24, "quick_gelu": True, "vision_cfg": {"head_width": 32}}}
    (folder / "open_clip_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


MODELS: dict[str, Callable[[], Plain]] = {
    "jax": functools.partial(Plain, act="tanh", out=5),
    "jax-pre-logits": functools.partial(Plain, act="tanh", hidden=48, out=5),
    "big-vision": functools.partial(Plain, token=False, act="tanh", out=5),
    "big-vision-scan": functools.partial(Plain, token=False, act="tanh", out=5),
    "dino": Plain,
    "dinov2": functools.partial(Plain, registers=4, scale=True),
    "mae": Plain,
    "open-clip": functools.partial(Plain, pre_norm=True, act="quick", eps=1e-5, out=24, bias=False),
}
WRITERS: dict[str, Callable[[Plain, pathlib.Path], pathlib.Path]] = {
    "jax": _jax,
    "jax-pre-logits": _jax,
    "big-vision": _jax,
    "big-vision-scan": functools.partial(_jax, scan=True),
    "dino": _dino,
    "dinov2": _dinov2,
    "mae": _mae,
    "open-clip": _open_clip,
}
