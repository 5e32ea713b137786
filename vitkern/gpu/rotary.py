"""rotary: queries and keys turned by the angles of their rows, values copied: one read, one write.

A program holds both halves of BM rows of heads. The engine turns in place and leaves values alone;
gradients turn back. A table's own gradient sums over images, and over heads where they share it, in
a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .gemm import row_for


@triton.jit
def _channels(BP: tl.constexpr, E, HALF: tl.constexpr):
    """Where the first and the second channel of each pair are."""
    pair = tl.arange(0, BP)
    if HALF:
        first, second = pair, pair + E // 2
    else:
        first, second = 2 * pair, 2 * pair + 1
    return pair, first, second


@triton.jit(do_not_specialize=["M", "S"])
def rotary_forward(
    x,  # (B, S, 3, H, E) by strides
    table,  # (H or 1, S, E) fp32: E/2 cosines, then E/2 sines
    y,  # (B, S, 3, H, E); may be x
    M,  # rows: B * S * PARTS * H
    S, H, E,
    strides,  # of x: image, token, part, head
    SHARED: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    image_stride, token_stride, part_stride, head_stride = strides
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    head, part, token = rows % H, rows // H % PARTS, rows // (H * PARTS)
    b, s = token // S, token % S
    pair, first, second = _channels(BP, E, HALF)
    mask = (rows < M)[:, None] & (pair < E // 2)[None, :]
    at = b * image_stride + s * token_stride + part * part_stride + head * head_stride
    to = ((token * 3 + part) * H + head) * E
    by = s * E if SHARED else (head * S + s) * E
    a = tl.load(x + at[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)  # (BM, BP)
    c = tl.load(x + at[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(table + by[:, None] + pair[None, :], mask=mask, other=0.0)
    sin = tl.load(table + by[:, None] + (E // 2 + pair)[None, :], mask=mask, other=0.0)
    if BACK:
        sin = -sin
    turned = (part < 2)[:, None]  # values are copied
    one = tl.where(turned, a * cos - c * sin, a).to(y.dtype.element_ty)
    other = tl.where(turned, c * cos + a * sin, c).to(y.dtype.element_ty)
    tl.store(y + to[:, None] + first[None, :], one, mask=mask)
    tl.store(y + to[:, None] + second[None, :], other, mask=mask)


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
    pair, first, second = _channels(BP, E, HALF)
    mask = (rows < S)[:, None] & (pair < E // 2)[None, :]
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
        a = tl.load(x + at[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
        c = tl.load(x + at[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
        da = tl.load(grad + of[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
        dc = tl.load(grad + of[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
        dcos += a * da + c * dc
        dsin += a * dc - c * da
    to = (own * S + rows) * E
    tl.store(out + to[:, None] + pair[None, :], dcos, mask=mask)
    tl.store(out + to[:, None] + (E // 2 + pair)[None, :], dsin, mask=mask)


def forward(n, results, qkv, table, half) -> None:
    turn(qkv, table, results[0], half)


def backward(grad, args, saved, needs) -> list[Tensor]:
    qkv, table, half = args
    grads = {}
    if "qkv" in needs:
        grads["qkv"] = qkv.new_empty(qkv.shape)
        turn(grad, table, grads["qkv"], half, back=True)
    if "table" in needs:
        grads["table"] = _table_gradient(grad, qkv, table, half)
    return list(grads.values())


def turn(qkv: Tensor, table: Tensor, y: Tensor, half: bool, back: bool = False) -> None:
    """y = qkv with queries and keys turned by the table; in place, values are not touched."""
    B, S, _, H, E = qkv.shape
    in_place = y is qkv
    qkv = _heads_of(qkv)
    parts = 2 if in_place else 3
    M = B * S * parts * H
    row = row_for("rotary", qkv)
    launch.launch(
        rotary_forward, (launch.cdiv(M, row.blocks["BM"]),), row, ("y",),
        x=qkv, table=table.float().contiguous(), y=y, M=M, S=S, H=H, E=E,
        strides=qkv.stride()[:4], SHARED=table.shape[0] == 1, HALF=half, BACK=back, PARTS=parts,
        BP=_block(E),
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
