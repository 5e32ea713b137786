"""What follows the last block: pooling, and the classifiers; their module where it is not torch's.

The forward's other parts are in model.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import layers
from .config import ViTConfig
from .precision import without_autocast

if TYPE_CHECKING:
    from .model import ViT


def pooled(model: ViT, x: Tensor, fused: bool = False) -> Tensor:
    """(B, D) of rows (B, S, D); (B, 2, D) for two heads, x itself with pool="none"."""
    pool, T = model.config.pool, model.config.prefix_tokens
    if pool == "token":
        return x[:, :2] if model.config.head == "distilled" else x[:, 0]
    attn_pool: Any = model.attn_pool
    if attn_pool is not None:
        rows = x if model.config.pool_prefix else x[:, T:]
        return (attn_pool.fused if fused else attn_pool)(rows)
    return x[:, T:].mean(1) if pool == "mean" else x


def rows_read(model: ViT) -> int | None:
    """How many rows of each image the head reads, the first ones, if the last block can make those
    alone: what it does after attention is for each row by itself. None: all of them.

    Of a ViT-B that is 6 % of a step's multiply-adds, forward and backward.
    """
    last: Any = model.blocks[-1] if len(model.blocks) else None
    if model.config.pool != "token" or not getattr(last, "leaves_rows", False):
        return None
    return 2 if model.config.head == "distilled" else 1


def classified(model: ViT, x: Tensor, seeds: Tensor | None, pre_logits: bool = False) -> Any:
    """Everything after pooling and norm; a pair of logits if two heads are trained.

    The token_norm head is defined over all rows and then takes the class token's; as it works row
    by row, taking that row first is the same.
    """
    seed = None if seeds is None else seeds[-1:]
    if model.config.head == "distilled":
        if pre_logits or not model.config.classes:
            return x.mean(1)
        both = model.head(x[:, 0]), model.head_dist(x[:, 1])
        return both if model.distilled_training and model.training else (both[0] + both[1]) / 2
    x = model.pre_logits(x)
    if model.config.head != "token_norm":
        x = model.head_drop(x, seed)
        return x if pre_logits else model.head(x)
    if pre_logits:
        return x
    return model.head_norm(model.head_drop(F.gelu(model.head(x)), seed))


def classifiers(c: ViTConfig, size: int, **made: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    """head, head_norm and head_dist of a configuration, of rows of `size`."""

    def linear(wanted: bool) -> nn.Module:
        return nn.Linear(size, c.classes, **made) if wanted and c.classes else nn.Identity()

    normed = c.head == "token_norm"
    norm = nn.LayerNorm(c.classes, **made) if normed else nn.Identity()
    return linear(True), norm, linear(c.head == "distilled")


class AttentionPool(nn.Module):
    """Tokens (B, S, D) to one row (B, D), with the names of timm's AttentionPoolLatent."""

    def __init__(self, c: ViTConfig, **made: Any) -> None:
        super().__init__()
        D = c.width
        self.heads = c.pool_heads or c.heads
        self.latent = nn.Parameter(torch.empty(1, 1, D, **made))
        self.q = nn.Linear(D, D, **made)
        self.kv = nn.Linear(D, 2 * D, **made)
        self.proj = nn.Linear(D, D, **made)
        self.norm = layers.make_norm(c, D, **made)
        act = c.activation if c.mlp == "plain" else "gelu"  # it has no gate
        width = c.pool_mlp_width or c.mlp_width
        plain = c.replace(
            mlp="plain", mlp_norm=False, mlp_width=width, activation=act, projection_dropout=0.0
        )
        self.mlp = layers.Mlp(plain, **made)

    def initialise(self) -> None:
        """As timm's: a query of about unit length."""
        nn.init.trunc_normal_(self.latent, std=self.latent.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        H, E = self.heads, D // self.heads
        q = self.q(self.latent).view(1, 1, H, E).transpose(1, 2).expand(B, -1, -1, -1)
        k, v = self.kv(x).view(B, S, 2, H, E).permute(2, 0, 3, 1, 4).unbind()  # (B, H, S, E)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k, v)
        return self._after(y.reshape(B, D))

    def fused(self, x: Tensor) -> Tensor:
        """The same without keys and values of every token: O(S D H) multiply-adds, not O(S D D).

        There is one query for all images, so q k^T is x times one vector a head, and the weighted
        sum of values is the value of the weighted sum of rows. The keys' bias adds the same to all
        scores: softmax does not see it. In fp32 or more.
        """
        B, _, D = x.shape
        H, E = self.heads, D // self.heads
        wide = torch.promote_types(x.dtype, torch.float32)
        rows, weight = x.to(wide), self.kv.weight.to(wide).view(2, H, E, D)
        with without_autocast(x):
            latent = F.linear(self.latent[0].to(wide), self.q.weight.to(wide), self.q.bias.to(wide))
            query = latent.view(H, 1, E) * E**-0.5
            scores = rows @ (query @ weight[0]).view(H, D).T  # (B, S, H)
            pooled = scores.softmax(1).transpose(1, 2) @ rows  # (B, H, D)
            y = (pooled.transpose(0, 1) @ weight[1].transpose(1, 2)).transpose(0, 1)  # (B, H, E)
            y = y.reshape(B, D) + self.kv.bias[D:].to(wide)
        return self._after(y.to(x.dtype))

    def _after(self, y: Tensor) -> Tensor:
        y = self.proj(y)
        return y + self.mlp(self.norm(y))
