"""attention: flash-style softmax(q k^T * scale + bias) v on packed qkv, read in place by stride."""

from __future__ import annotations

import torch
from torch import Tensor

from ..registry import Axes, Operator, OpSpec, check_tensor, register
from . import _library, philox
from ._wide import ordered, wide


def _scores(qkv: Tensor, bias: Tensor | None, scale: float, offsets: Tensor | None) -> Tensor:
    q, k, _ = (t.transpose(1, 2) for t in qkv.unbind(2))  # (B, H, S, E)
    scores = (q @ k.mT) * scale  # (B, H, S, S)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if offsets is not None:
        S = qkv.shape[1]
        owner = torch.bucketize(torch.arange(S, device=qkv.device), offsets[1:], right=True)
        scores = scores.masked_fill(owner[:, None] != owner[None, :], float("-inf"))
    return scores


def reference(
    qkv: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    offsets: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    scores = _scores(qkv, bias, scale, offsets)
    v = qkv[:, :, 2].transpose(1, 2)  # (B, H, S, E)
    y = philox.dropout(scores.softmax(-1), dropout_p, seed) @ v
    lse = wide(scores).logsumexp(-1) if save else wide(qkv.new_empty(0))
    return y.transpose(1, 2).contiguous(), lse  # (B, S, H, E), (B, H, S)


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    given = dict(zip(OP.arguments, args, strict=True))
    qkv, bias, scale, p, seed, offsets, _ = args
    q, k, v = (wide(t).transpose(1, 2) for t in qkv.unbind(2))  # (B, H, S, E)
    dy = wide(grad).transpose(1, 2)  # (B, H, S, E)
    # A kernel takes P = exp(scores - lse) and delta = sum(dy * y), which need no S x S sum; the
    # definition sums P itself, three times more exact in fp32.
    probabilities = _scores(wide(qkv), bias, scale, offsets).softmax(-1)
    dropped = philox.dropout(probabilities, p, seed)
    dprobabilities = philox.dropout(dy @ v.mT, p, seed)
    delta = (probabilities * dprobabilities).sum(-1, keepdim=True)
    dscores = probabilities * (dprobabilities - delta)  # (B, H, S, S)

    def dqkv() -> Tensor:
        parts = (dscores @ k * scale, dscores.mT @ q * scale, dropped.mT @ dy)
        return torch.stack([t.transpose(1, 2) for t in parts], 2)

    grads = {"qkv": dqkv, "bias": lambda: dscores.sum_to_size(bias.shape)}
    return ordered(needs, OP.arguments, grads, given)


OP = Operator(
    name="attention",
    schema="Tensor qkv, Tensor? bias, float scale, float dropout_p, Tensor? seed, Tensor? offsets,"
    " bool save",
    axes={"qkv": "B S 3 H E", "bias": "B? H? S S", "seed": "1", "offsets": "O"},
    outputs={"y": ("B S H E", "qkv"), "lse": ("B H S", "wide")},
    reference=reference,
    backward=backward,
    differentiable=("qkv", "bias"),
    native="vitkern.cpu:attention",
    on_gpu=lambda n: n["E"] <= 256,
)


def _flops(n: Axes) -> int:
    return 4 * n["B"] * n["H"] * n["S"] * n["S"] * n["E"]


def _thirds(shape: list[int], g: torch.Generator, n: Axes) -> Tensor:
    """Three sequences of uneven length, the middle one possibly empty."""
    S = n["S"]
    return torch.tensor([0, S // 3, S // 3 + S // 5, S], dtype=torch.int32)


_CASES = (
    {"B": 1, "S": 1, "H": 1, "E": 1},
    {"B": 0, "S": 5, "H": 2, "E": 8},
    {"B": 2, "S": 7, "H": 3, "E": 5},
    {"B": 1, "S": 131, "H": 2, "E": 72},
    {"B": 1, "S": 197, "H": 3, "E": 64},
    {"B": 1, "S": 601, "H": 1, "E": 80},
)
_BENCH = tuple({"B": b, "S": 197, "H": h, "E": 64} for b in (1, 8) for h in (3, 6, 12))
_PLAIN = {"scale": 0.125, "dropout_p": 0.0}

register(
    OpSpec(
        name="attention",
        op=OP,
        formula="y = softmax(q k^T * scale) v,  lse = log sum exp(q k^T * scale)",
        inputs=("qkv",),
        scalars=_PLAIN,
        flops=_flops,
        cases=_CASES,
        bench=_BENCH,
    ),
    OpSpec(
        name="attention+bias",
        op=OP,
        formula="y = softmax(q k^T * scale + bias) v",
        inputs=("qkv", "bias"),
        scalars=_PLAIN,
        flops=_flops,
        cases=_CASES,
        bench=_BENCH[2:3],
    ),
    OpSpec(
        name="attention+dropout",
        op=OP,
        formula="y = dropout(softmax(q k^T * scale), p) v",
        inputs=("qkv", "seed"),
        scalars={**_PLAIN, "dropout_p": 0.3},
        makers={"seed": philox.make_seed},
        flops=_flops,
        cases=_CASES,
        bench=(),
    ),
    OpSpec(
        name="attention+offsets",
        op=OP,
        formula="y = softmax(q k^T * scale) v, each sequence offsets[i]:offsets[i+1] by itself",
        inputs=("qkv", "offsets"),
        scalars=_PLAIN,
        makers={"offsets": _thirds},
        flops=_flops,
        cases=tuple({**c, "O": 4} for c in _CASES if c["B"] == 1),
        bench=(),
    ),
)
_op = _library.define(OP)


def attention(
    qkv: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Multi-head attention on packed qkv (B, S, 3, H, E) -> (B, S, H, E); memory linear in S.

    bias (B or 1, H or 1, S, S) is added to the scaled scores. `offsets` (int32, ascending from 0 to
    S, with B = 1) makes the S axis a concatenation of sequences that do not see each other.
    """
    check_tensor("attention", "qkv", qkv)
    philox.check("attention", seed, dropout_p=dropout_p)
    if offsets is not None:
        check_tensor("attention", "offsets", offsets)
        _check_offsets(qkv, bias, offsets)
    if scale is None:
        scale = qkv.shape[-1] ** -0.5 if qkv.shape[-1] else 1.0
    return _op(qkv, bias, scale, dropout_p, seed, offsets, _library.needs_save(qkv, bias))[0]


def _check_offsets(qkv: Tensor, bias: Tensor | None, offsets: Tensor) -> None:
    if bias is not None:
        raise ValueError(
            "attention: bias and offsets cannot be used together; fold the mask into bias"
        )
    if qkv.ndim != 5 or qkv.shape[0] != 1:
        raise ValueError(
            f"attention: offsets needs qkv (1, S, 3, H, E) with all sequences in one row, got"
            f" {tuple(qkv.shape)}"
        )
    if offsets.dtype != torch.int32 or offsets.ndim != 1 or offsets.numel() < 2:
        raise ValueError(
            f"attention: offsets must be int32 of at least two elements, got {offsets.dtype} of"
            f" shape {tuple(offsets.shape)}"
        )
    if offsets.device.type == "cuda":  # a look would wait for the device
        ascends = (offsets[0] == 0) & (offsets[-1] == qkv.shape[1]) & (offsets.diff() >= 0).all()
        torch._assert_async(ascends, "attention: offsets must ascend from 0 to S")
    if offsets.device.type == "cpu":
        ends = offsets.tolist()
        if ends[0] != 0 or ends[-1] != qkv.shape[1] or sorted(ends) != ends:
            raise ValueError(
                f"attention: offsets must ascend from 0 to S={qkv.shape[1]}, got {ends[:4]}"
                f"{'...' if len(ends) > 4 else ''}"
            )
