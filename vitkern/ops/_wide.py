"""Pieces that the reference backwards share: at least fp32 inside, the argument's dtype outside."""

import torch
from torch import Tensor


def wide(t: Tensor) -> Tensor:
    """t in the dtype that accumulates it: fp32 for 16-bit tensors, unchanged otherwise."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def flat(t: Tensor) -> Tensor:
    """t as rows: (M, last axis), also when either is empty."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


def row_stats(x: Tensor, eps: float) -> Tensor:
    """Mean and 1 / sqrt(var + eps) of each row: (M, 2), at least fp32."""
    rows = flat(wide(x))
    if not rows.shape[1]:
        return rows.new_zeros(rows.shape[0], 2)
    mean = rows.mean(1)
    variance = (rows - mean.unsqueeze(1)).square().mean(1)
    return torch.stack([mean, (variance + eps).rsqrt()], 1)


def normalised(x: Tensor, stats: Tensor) -> Tensor:
    """(x - mean) * rstd, wide, in x's shape."""
    mean, rstd = stats.to(wide(x).dtype).view(*x.shape[:-1], 2).unbind(-1)
    return (wide(x) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


def norm_backward(
    grad: Tensor, xhat: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (x, weight, bias) of y = xhat * weight + bias; everything wide."""
    g = grad if weight is None else grad * wide(weight)
    dx = rstd.view(*xhat.shape[:-1], 1) * (
        g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True)
    )
    return dx, rows_sum(grad * xhat), rows_sum(grad)


def rows_sum(t: Tensor) -> Tensor:
    """Sum over all axes but the last."""
    return flat(t).sum(0)


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x over all rows: the gradient of a Linear's weight, (N, K)."""
    return flat(grad).mT @ flat(x)


def ordered(needs: frozenset[str], names: tuple[str, ...], grads: dict, args: dict) -> list[Tensor]:
    """The gradients asked for, in argument order, in their arguments' dtypes."""
    return [
        grads[n]().reshape(args[n].shape).to(args[n].dtype).contiguous()
        for n in names
        if n in needs
    ]
