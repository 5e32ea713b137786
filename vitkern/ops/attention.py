"""attention: flash-style softmax(q k^T * scale + bias) v on packed qkv, read in place by stride."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .. import philox
from ..registry import Axes, Operator, OpSpec, check_tensor, register
from . import _library
from ._wide import ordered, wide


class _Sequence:
    """Tokens that see each other: all of them, or offsets[i]:offsets[i + 1].

    Each is computed by itself: a mask over all S x S scores multiplies other sequences by 0, which
    leaves their NaN and Inf in the sum.
    """

    def __init__(self, tokens: slice, qkv: Tensor, bias: Tensor | None, scale: float) -> None:
        self.tokens = tokens
        self.q, self.k, self.v = (t.transpose(1, 2) for t in qkv[:, tokens].unbind(2))  # (B,H,n,E)
        self.scores = (self.q @ self.k.mT) * scale  # (B, H, n, n)
        if bias is not None:
            self.scores = self.scores + bias[..., tokens, tokens].to(self.scores.dtype)
        self.probabilities = self.scores.softmax(-1)

    def dropped(self, t: Tensor, keep: Tensor | None, p: float) -> Tensor:
        """t (B, H, n, n) where its element of the mask (B, H, S, S) is kept."""
        return t if keep is None else philox.masked(t, keep[..., self.tokens, self.tokens], p)


def _sequences(
    qkv: Tensor, bias: Tensor | None, scale: float, offsets: Tensor | None
) -> list[_Sequence]:
    ends = [0, qkv.shape[1]] if offsets is None else _ends(offsets, qkv.shape[1])
    return [_Sequence(slice(*pair), qkv, bias, scale) for pair in itertools.pairwise(ends)]


def _mask(qkv: Tensor, p: float, seed: Tensor | None) -> Tensor | None:
    B, S, _, H, _ = qkv.shape
    return philox.dropout_mask(philox.given(seed), p, (B, H, S, S)) if p else None


def reference(
    qkv: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    offsets: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    sequences, keep = _sequences(qkv, bias, scale, offsets), _mask(qkv, dropout_p, seed)
    y = [s.dropped(s.probabilities, keep, dropout_p) @ s.v for s in sequences]
    lse = [wide(s.scores).logsumexp(-1) for s in sequences] if save else [wide(qkv.new_empty(0))]
    return torch.cat(y, 2).transpose(1, 2).contiguous(), torch.cat(lse, -1)  # (B,S,H,E), (B,H,S)


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    given = dict(zip(OP.arguments, args, strict=True))
    qkv, bias, scale, p, seed, offsets, _ = args
    keep, parts = _mask(qkv, p, seed), []
    dbias = wide(bias).new_zeros(bias.shape) if "bias" in needs else None
    for s in _sequences(wide(qkv), bias, scale, offsets):
        dy = wide(grad)[:, s.tokens].transpose(1, 2)  # (B, H, n, E)
        # A kernel takes P = exp(scores - lse) and delta = sum(dy * y), which need no sum of n x n;
        # the definition sums P itself, three times more exact in fp32.
        dropped = s.dropped(s.probabilities, keep, p)
        dprobabilities = s.dropped(dy @ s.v.mT, keep, p)
        delta = (s.probabilities * dprobabilities).sum(-1, keepdim=True)
        dscores = s.probabilities * (dprobabilities - delta)  # (B, H, n, n)
        three = (dscores @ s.k * scale, dscores.mT @ s.q * scale, dropped.mT @ dy)
        parts.append(torch.stack([t.transpose(1, 2) for t in three], 2))  # (B, n, 3, H, E)
        if dbias is not None:
            place = dbias[..., s.tokens, s.tokens]
            place += dscores.sum_to_size(place.shape)
    grads = {"qkv": lambda: torch.cat(parts, 1), "bias": lambda: dbias}
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
        E = qkv.shape[-1] if qkv.ndim else 0  # the operator refuses what has no five axes
        scale = E**-0.5 if E else 1.0
    save = _library.needs_save(qkv, bias) and _library.has_elements(qkv)
    return _op(qkv, bias, scale, dropout_p, seed, offsets, save)[0]


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
        _ends(offsets, qkv.shape[1])


def _ends(offsets: Tensor, S: int) -> list[int]:
    ends = offsets.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != S or sorted(ends) != ends:
        raise ValueError(
            f"attention: offsets must ascend from 0 to S={S}, got {ends[:4]}"
            f"{'...' if len(ends) > 4 else ''}"
        )
    return ends
