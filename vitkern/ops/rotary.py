"""rotary: queries and keys turned by the angles of their places; values as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..registry import Axes, Operator, OpSpec, register
from . import _library
from ._wide import ordered, wide


def rotate(x: Tensor, table: Tensor, half: bool) -> Tensor:
    """x (..., E) turned by a table that broadcasts with it: E/2 cosines, then E/2 sines.

    half: channel e is the partner of e + E/2, else 2e of 2e + 1.
    """
    cos, sin = table.chunk(2, -1)
    a, b = x.chunk(2, -1) if half else (x[..., ::2], x[..., 1::2])
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)


def reference(qkv: Tensor, table: Tensor, half: bool) -> tuple[Tensor]:
    by = _of_heads(table)
    q, k, v = qkv.unbind(2)  # (B, S, H, E)
    turned = [rotate(wide(x), by, half).to(qkv.dtype) for x in (q, k)]
    return (torch.stack([*turned, v], 2).contiguous(),)


def _of_heads(table: Tensor) -> Tensor:
    """A table (P, S, E) as (S, P, E), which broadcasts with (B, S, H, E)."""
    return wide(table).transpose(0, 1)


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    qkv, table, half = args
    given = {"qkv": qkv, "table": table}
    grads = {
        "qkv": lambda: reference(wide(grad), turned_back(table), half)[0],
        "table": lambda: _table_gradient(wide(grad), wide(qkv), table, half),
    }
    return ordered(needs, OP.arguments[:2], grads, given)


def turned_back(table: Tensor) -> Tensor:
    """The table of the opposite angles."""
    cos, sin = table.chunk(2, -1)
    return torch.cat([cos, -sin], -1)


def _table_gradient(grad: Tensor, qkv: Tensor, table: Tensor, half: bool) -> Tensor:
    """(P, S, E): sums over images, over queries and keys and, where P is 1, over heads."""
    x, g = qkv[:, :, :2], grad[:, :, :2]  # (B, S, 2, H, E)
    halves = (lambda t: t.chunk(2, -1)) if half else (lambda t: (t[..., ::2], t[..., 1::2]))
    (a, b), (da, db) = halves(x), halves(g)
    both = torch.cat([a * da + b * db, a * db - b * da], -1).sum((0, 2))  # (S, H, E)
    if table.shape[0] == 1:
        both = both.sum(1, keepdim=True)
    return both.transpose(0, 1)


OP = Operator(
    name="rotary",
    schema="Tensor qkv, Tensor table, bool half",
    axes={"qkv": "B S 3 H E", "table": "H? S E"},
    outputs={"y": ("B S 3 H E", "qkv")},
    reference=reference,
    backward=backward,
    differentiable=("qkv", "table"),
    native="vitkern.cpu:rotary",
)


def _spec(suffix: str, half: bool, formula: str, bench: tuple[Axes, ...] = ()) -> OpSpec:
    return OpSpec(
        name="rotary" + suffix,
        op=OP,
        formula=formula,
        inputs=("qkv", "table"),
        scalars={"half": half},
        makers={"table": make_table} if suffix else {},
        flops=lambda n: 6 * n["B"] * n["S"] * n["H"] * n["E"],
        cases=(
            {"B": 1, "S": 1, "H": 1, "E": 2},
            {"B": 0, "S": 3, "H": 2, "E": 8},
            {"B": 2, "S": 5, "H": 3, "E": 20},
            {"B": 1, "S": 31, "H": 2, "E": 88},
            {"B": 2, "S": 197, "H": 3, "E": 64},
        ),
        bench=bench,
    )


def make_table(shape: list[int], generator: torch.Generator, axes: Axes) -> Tensor:
    """One for all heads."""
    return torch.randn(1, *shape[1:], generator=generator, dtype=torch.float64).float()


_BENCH = tuple({"B": b, "S": 197, "H": h, "E": 64} for b in (1, 8) for h in (3, 6, 12))
register(
    _spec("", False, "q[2e], q[2e+1] turned by the angle of their head, row and e; k as q", _BENCH),
    _spec("+half", True, "q[e], q[e + E/2] turned by the angle of their row and e; k as q"),
)
_op = _library.define(OP)


def rotary(qkv: Tensor, table: Tensor, *, half: bool = False) -> Tensor:
    """qkv (B, S, 3, H, E) with queries and keys turned, values copied; in qkv's dtype.

    table (H or 1, S, E): of each row the cosines of E/2 angles, then their sines. half: channel e
    is the partner of e + E/2; else 2e of 2e + 1.
    """
    if isinstance(qkv, Tensor) and qkv.ndim == 5 and qkv.shape[-1] % 2:
        raise ValueError(f"rotary: channels are turned in pairs, and E={qkv.shape[-1]} is odd")
    return _op(qkv, table, half)
