"""vitkern's attention for transformers' models: `attn_implementation="vitkern"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops


def register_with_transformers() -> None:
    """Make transformers know the attention function "vitkern".

    Then `AutoModel.from_pretrained(..., attn_implementation="vitkern")`, or
    `model.set_attn_implementation("vitkern")`, runs self-attention by `vitkern.ops.attention`.
    Causal, grouped, cached and dropped-out attention runs by transformers' "sdpa".
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("vitkern", attention)
    AttentionMaskInterface.register("vitkern", sdpa_mask)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """softmax(q k^T * scaling + mask) v of q, k, v (B, H, S, E): (B, S, H, E), and no weights."""
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if query.shape != key.shape or query.shape != value.shape or dropout or causal:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **options
        )
    bias = attention_mask
    if bias is not None:
        S = query.shape[2]
        bias = bias[..., :S, :S]
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
        bias = bias.to(query.dtype)
    qkv = torch.stack([t.transpose(1, 2) for t in (query, key, value)], 2)  # (B, S, 3, H, E)
    return ops.attention(qkv, bias, scale=scaling), None
