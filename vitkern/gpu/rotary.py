"""rotary: queries and keys turned by the angles of their rows, values copied: one read, one write.

A program of the operator holds both halves of BM rows of heads; gradients turn back. A table's own
gradient sums over images, and over heads where they share it, in a fixed order.

In a plan turning costs no pass over qkv: the kernel that writes queries and keys last, the GEMM or
the one that normalises them, turns what it has in registers (store_turned, turned). There pairs are
neighbours, 2e and 2e + 1, whatever the model: the engine orders the rows of the weight so, which
changes no score.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .gemm import row_for


@triton.jit
def _load_pairs(x, at, live, E, HALF: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    """Both channels of each pair of rows `at`, (BM, BP) in fp32.

    Neighbours are read as they lie and parted in registers: every second channel by itself would
    be an access of 32 bits.
    """
    if HALF:
        channels = tl.arange(0, BP)
        mask = live[:, None] & (channels < E // 2)[None, :]
        one = tl.load(x + at[:, None] + channels[None, :], mask=mask, other=0.0)
        other = tl.load(x + at[:, None] + (E // 2 + channels)[None, :], mask=mask, other=0.0)
    else:
        channels = tl.arange(0, 2 * BP)
        mask = live[:, None] & (channels < E)[None, :]
        both = tl.load(x + at[:, None] + channels[None, :], mask=mask, other=0.0)
        one, other = tl.split(tl.reshape(both, (BM, BP, 2)))
    return one.to(tl.float32), other.to(tl.float32)


@triton.jit
def _store_pairs(
    y, one, other, to, live, E, HALF: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr
):
    """The inverse: both channels of each pair to where _load_pairs would read them."""
    one, other = one.to(y.dtype.element_ty), other.to(y.dtype.element_ty)
    if HALF:
        channels = tl.arange(0, BP)
        mask = live[:, None] & (channels < E // 2)[None, :]
        tl.store(y + to[:, None] + channels[None, :], one, mask=mask)
        tl.store(y + to[:, None] + (E // 2 + channels)[None, :], other, mask=mask)
    else:
        channels = tl.arange(0, 2 * BP)
        mask = live[:, None] & (channels < E)[None, :]
        both = tl.reshape(tl.join(one, other), (BM, 2 * BP))
        tl.store(y + to[:, None] + channels[None, :], both, mask=mask)


@triton.jit
def _turned(a, b, cos, sin):
    """Both channels of pairs. Written as it shall be rounded, so that no two tiles differ."""
    return tl.fma(a, cos, -(b * sin)), tl.fma(b, cos, a * sin)


@triton.jit
def turned(x, angles, BM: tl.constexpr, BN: tl.constexpr):
    """x (BM, BN) in fp32 with columns 2e and 2e + 1 turned; angles are rows of by_pairs' table."""
    a, b = tl.split(tl.reshape(x, (BM, BN // 2, 2)))
    cos, sin = tl.split(tl.reshape(angles, (BM, BN // 2, 2)))
    one, other = _turned(a, b, cos, sin)
    return tl.reshape(tl.join(one, other), (BM, BN))


@triton.jit
def store_turned(
    y, x, turns, rows, block, M, N, S,
    E: tl.constexpr, SHARED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store x (BM, BN), column block `block` of qkv (M, N), N = 3 H E, with q and k turned.

    x is rounded first, as the operator would read it: 16 bits a channel are moved from the matmul's
    layout to that of wide stores, which that of the angles' loads is, too. W angles serve all heads
    of the tile where they can.
    """
    W: tl.constexpr = E if SHARED and E < BN and (E & (E - 1)) == 0 else BN
    HEADS: tl.constexpr = BN // W
    D = N // 3
    first = block * BN
    stored = tl.reshape(x.to(y.dtype.element_ty), (BM, HEADS, W // 2, 2))
    a, b = tl.split(tl.permute(stored, (1, 0, 2, 3)))  # (HEADS, BM, W / 2)
    channel = first + tl.arange(0, W)
    at = (rows % S)[:, None] * E + (channel % E)[None, :]
    if not SHARED:
        at += (channel % D // E)[None, :] * (S * E)
    # After x has changed its layout: before, 128 x 256 tiles spill (182 instructions of E = 128).
    angles = tl.load(turns + at, mask=first < 2 * D, other=0.0)
    cos, sin = tl.split(tl.reshape(angles, (1, BM, W // 2, 2)))
    one, other = _turned(a.to(tl.float32), b.to(tl.float32), cos, sin)
    head = first + W * tl.arange(0, HEADS)[:, None, None]
    is_value = head + 2 * tl.arange(0, W // 2)[None, None, :] >= 2 * D
    one = tl.where(is_value, a, one.to(a.dtype))
    other = tl.where(is_value, b, other.to(b.dtype))
    columns = head + tl.arange(0, W)[None, None, :]
    to = rows.to(tl.int64)[None, :, None] * N + columns
    mask = (rows < M)[None, :, None] & (columns < N)
    tl.store(y + to, tl.reshape(tl.join(one, other), (HEADS, BM, W)), mask=mask)


@triton.jit(do_not_specialize=["M", "S", "H"])
def rotary_forward(
    x,  # (B, S, 3, H, E) by strides
    table,  # (H or 1, S, E) fp32: E/2 cosines, then E/2 sines
    y,  # (B, S, 3, H, E)
    M,  # rows: B * S * 3 * H
    S, H, E,
    strides,  # of x: image, token, part, head
    SHARED: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    image_stride, token_stride, part_stride, head_stride = strides
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    head, part, token = rows % H, rows // H % 3, rows // (H * 3)
    b, s = token // S, token % S
    live = rows < M
    at = b * image_stride + s * token_stride + part * part_stride + head * head_stride
    by = s * E if SHARED else (head * S + s) * E
    a, c = _load_pairs(x, at, live, E, HALF, BM, BP)  # (BM, BP)
    cos, sin = _load_pairs(table, by, live, E, True, BM, BP)
    if BACK:
        sin = -sin
    is_value = (part == 2)[:, None]
    one, other = _turned(a, c, cos, sin)
    one, other = tl.where(is_value, a, one), tl.where(is_value, c, other)
    _store_pairs(y, one, other, rows * E, live, E, HALF, BM, BP)


@triton.jit(do_not_specialize=["S", "COUNT"])
def rotary_table_gradient(
    grad,  # (B, S, 3, H, E) by strides
    x,  # (B, S, 3, H, E) by strides
    out,  # (H or 1, S, E) fp32
    S, H, E,
    COUNT,  # heads of queries and keys of all images that share a table's row
    grad_strides, strides,  # image, token, part, head
    SHARED: tl.constexpr, HALF: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)  # tokens
    own = tl.program_id(1).to(tl.int64)  # head of the table
    live = rows < S
    dcos = tl.zeros((BM, BP), tl.float32)
    dsin = tl.zeros((BM, BP), tl.float32)
    for i in range(COUNT):
        part, head, b = i % 2, own, i // 2
        if SHARED:
            head, b = own + i // 2 % H, i // 2 // H
        at = rows * strides[1] + part * strides[2] + head * strides[3]
        of = rows * grad_strides[1] + part * grad_strides[2] + head * grad_strides[3]
        at += b * (own * 0 + strides[0])  # in 64 bits
        of += b * (own * 0 + grad_strides[0])
        a, c = _load_pairs(x, at, live, E, HALF, BM, BP)
        da, dc = _load_pairs(grad, of, live, E, HALF, BM, BP)
        dcos += a * da + c * dc
        dsin += a * dc - c * da
    _store_pairs(out, dcos, dsin, (own * S + rows) * E, live, E, True, BM, BP)


def by_pairs(table: Tensor) -> Tensor:
    """A table (H or 1, S, E) as kernels that turn pairs of neighbours read it, fp32.

    The cosine of pair e is at 2e, its sine at 2e + 1: where the pair's own channels are.
    """
    return table.float().unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2).contiguous()


def arguments(turns: Tensor | None) -> dict[str, Any]:
    """Of a kernel that turns what it writes; absent where there is nothing to turn."""
    if turns is None:
        return dict(turns=None, S=None, HEAD=None, SHARED=None)
    return dict(turns=turns, S=turns.shape[1], HEAD=turns.shape[2], SHARED=turns.shape[0] == 1)


def forward(n, results, qkv, table, half) -> None:
    _turn(qkv, table, results[0], half)


def backward(grad, args, saved, needs) -> list[Tensor]:
    qkv, table, half = args
    grads = {}
    if "qkv" in needs:
        grads["qkv"] = qkv.new_empty(qkv.shape)
        _turn(grad, table, grads["qkv"], half, back=True)
    if "table" in needs:
        grads["table"] = _table_gradient(grad, qkv, table, half)
    return list(grads.values())


def _turn(qkv: Tensor, table: Tensor, y: Tensor, half: bool, back: bool = False) -> None:
    """y = qkv with queries and keys turned by the table, or back."""
    B, S, _, H, E = qkv.shape
    qkv = _heads_of(qkv)
    M = B * S * 3 * H
    row = row_for("rotary", qkv)
    launch.launch(
        rotary_forward, (launch.cdiv(M, row.blocks["BM"]),), row, ("y",),
        x=qkv, table=table.float().contiguous(), y=y, M=M, S=S, H=H, E=E,
        strides=qkv.stride()[:4], SHARED=table.shape[0] == 1, HALF=half, BACK=back, BP=_block(E),
    )  # fmt: skip


def _table_gradient(grad: Tensor, qkv: Tensor, table: Tensor, half: bool) -> Tensor:
    B, S, _, H, E = qkv.shape
    grad, qkv = _heads_of(grad), _heads_of(qkv)
    shared = table.shape[0] == 1
    out = table.new_empty(table.shape, dtype=qkv.new_empty(0).float().dtype)
    row = row_for("rotary", qkv)
    launch.launch(
        rotary_table_gradient, (launch.cdiv(S, row.blocks["BM"]), table.shape[0]), row, ("out",),
        grad=grad, x=qkv, out=out, S=S, H=H, E=E, COUNT=2 * B * (H if shared else 1),
        grad_strides=grad.stride()[:4], strides=qkv.stride()[:4], SHARED=shared, HALF=half,
        BP=_block(E),
    )  # fmt: skip
    return out.to(table.dtype)


def _heads_of(t: Tensor) -> Tensor:
    """As kernels read it: a head's channels beside each other."""
    return t if t.stride(4) == 1 else t.contiguous()


def _block(E: int) -> int:
    """Pairs of channels that a program holds: a whole head's."""
    return max(8, triton.next_power_of_2(E // 2))
