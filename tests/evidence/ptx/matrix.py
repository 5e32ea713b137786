"""The tensor cores' instructions: mma.sync and ldmatrix.

Who holds what (lane = 4 g + t, g in 0..7, t in 0..3; a register holds h = 32 / bits numbers):
  A (16 x k)  register 2 c + r: row g + 8 r, columns h (t + 4 c) ...
  B (k x 8)   register c:       rows h (t + 4 c) ..., column g
  C (16 x 8)  register 2 r + j: row g + 8 r, column 2 t + j
Products are exact and so is, nearly, their sum with C (in float64); it is rounded to float32 once.
What the hardware does is unspecified: it is known to cut off instead of rounding to nearest, and to
add a few products at a time. `Machine.toward_zero` cuts off, for an idea of what that may do.
tf32 operands are float32 registers whose last 13 bits the hardware ignores.
"""

from __future__ import annotations

import numpy as np

from .machine import WARP, Machine, Step, opcode, unsupported
from .memory import addresses, parts_of
from .parser import Instruction
from .warp import whole_warps

_SHAPES = {
    ("m16n8k16", "bf16"): 2,  # -> c: halves of k
    ("m16n8k16", "f16"): 2,
    ("m16n8k8", "bf16"): 1,
    ("m16n8k8", "f16"): 1,
    ("m16n8k8", "tf32"): 2,
    ("m16n8k4", "tf32"): 1,
}


@opcode("mma", family="float")
def _multiply(m: Machine, i: Instruction) -> Step:
    try:
        shape, row, column, d_kind, kind, b_kind, c_kind = i.modifiers[2:]
        chunks = _SHAPES[shape, kind]
    except (ValueError, KeyError):
        raise unsupported(i) from None
    if (row, column, d_kind, c_kind, b_kind) != ("row", "col", "f32", "f32", kind):
        raise unsupported(i)
    d, a, b, c = (parts_of(o) for o in i.operands)
    if (len(d), len(a), len(b), len(c)) != (4, 2 * chunks, chunks, 4):
        raise unsupported(i)
    warps = m.size // WARP
    a, b = ([m.read(o, "b32") for o in x] for x in (a, b))
    c, d = [m.read(o, "f32") for o in c], [m.write(o, "f32") for o in d]
    c = [np.broadcast_to(x, m.size).reshape(warps, 8, 4) for x in c]
    d = [x.reshape(warps, 8, 4) for x in d]
    left, right = _Fragment(m, a, kind), _Fragment(m, b, kind)
    # k runs in the order (half, c, t) in both factors: any order will do, if it is the same.
    a_rows = np.empty((warps, 2, 8, left.halves, chunks, 4))  # (w, r, g, half, c, t)
    b_rows = np.empty((warps, 8, left.halves, chunks, 4))  # (w, g, half, c, t)
    product = np.empty((warps, 16, 8))
    columns = product.reshape(warps, 2, 8, 4, 2)  # (w, r, g, t, j)
    a_matrix = a_rows.reshape(warps, 16, -1)
    b_matrix = b_rows.reshape(warps, 8, -1).transpose(0, 2, 1)

    def step(where: object) -> None:
        chosen = True
        if where is not True:
            whole_warps(m, where)
            chosen = where.reshape(warps, 8, 4)
        # (half, c, r, w, g, t) -> (w, r, g, half, c, t), and the same without r
        halves = left.numbers().reshape(left.halves, chunks, 2, warps, 8, 4)
        a_rows[...] = halves.transpose(3, 2, 4, 0, 1, 5)
        halves = right.numbers().reshape(left.halves, chunks, warps, 8, 4)
        b_rows[...] = halves.transpose(2, 3, 0, 1, 4)
        np.matmul(a_matrix, b_matrix, out=product)
        sums = [columns[:, n // 2, :, :, n % 2] + c[n] for n in range(4)]
        for to, total in zip(d, sums, strict=True):
            value = cut(total) if m.toward_zero else total
            np.copyto(to, value, where=chosen, casting="same_kind")

    return step


class _Fragment:
    """The registers of one factor, spread out into float32: (half, register, thread)."""

    def __init__(self, m: Machine, registers: list[np.ndarray], kind: str) -> None:
        self.registers, self.kind = registers, kind
        self.halves = 1 if kind == "tf32" else 2
        self.words = np.empty((len(registers), m.size), np.uint32)
        self.spread = np.empty((self.halves, len(registers), m.size), np.uint32)

    def numbers(self) -> np.ndarray:
        for n, register in enumerate(self.registers):
            self.words[n] = register
        if self.kind == "tf32":
            np.bitwise_and(self.words, np.uint32(0xFFFFE000), out=self.spread[0])
        elif self.kind == "bf16":
            np.left_shift(self.words, np.uint32(16), out=self.spread[0])
            np.bitwise_and(self.words, np.uint32(0xFFFF0000), out=self.spread[1])
        else:
            pairs = self.words.view(np.float16).reshape(*self.words.shape, 2)
            self.spread.view(np.float32)[...] = pairs.transpose(2, 0, 1)
        return self.spread.view(np.float32)


def cut(x: np.ndarray) -> np.ndarray:
    """float64 -> float32, towards zero."""
    near = x.astype(np.float32)
    return np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near)


@opcode("stmatrix")
@opcode("stmatrix", family="integer")
def _store_matrix(m: Machine, i: Instruction) -> Step:
    """ldmatrix the other way round (sm_90 and later)."""
    count, transposed = _matrices(i)
    sources = [m.read(o, "b32").reshape(-1, WARP) for o in parts_of(i.operands[1])]
    if len(sources) != count:
        raise unsupported(i)
    address = addresses(m, i.operands[0], "u32")
    lanes = np.arange(m.size).reshape(-1, WARP)[:, : 8 * count]

    def step(where: object) -> None:
        warps = whole_warps(m, where)
        own = lanes[warps].ravel()
        place = m.shared.locate(address(True)[own], own, 16)
        rows = np.stack([s[warps] for s in sources], 1).reshape(
            -1, count, 8, 4
        )  # (w, n, row, word)
        if transposed:
            numbers = rows.view(np.uint16).reshape(-1, count, 8, 8).transpose(0, 1, 3, 2)
            rows = np.ascontiguousarray(numbers).view(np.uint32)
        m.shared.claim(place, own, 16)
        m.shared.put(place, own, 16, rows.reshape(-1, 4))

    return step


def _matrices(i: Instruction) -> tuple[int, bool]:
    """(how many, .trans) of an ldmatrix or stmatrix."""
    words = [x for x in i.modifiers if x not in ("cta", "trans")]
    count = {"x1": 1, "x2": 2, "x4": 4}.get(words[3])
    if count is None or words[:3] + words[4:] != ["sync", "aligned", "m8n8", "shared", "b16"]:
        raise unsupported(i)
    return count, "trans" in i.modifiers


@opcode("ldmatrix")
@opcode("ldmatrix", family="integer")
def _load_matrix(m: Machine, i: Instruction) -> Step:
    """1, 2 or 4 matrices of 8 x 8 16-bit numbers; lane 8 n + r has the address of row r of the nth.

    Lane 4 r + t gets elements 2 t and 2 t + 1 of row r (of column r: .trans) of each.
    """
    count, transposed = _matrices(i)
    outs = [m.write(o, "b32").reshape(-1, WARP) for o in parts_of(i.operands[0])]
    if len(outs) != count:
        raise unsupported(i)
    address = addresses(m, i.operands[1], "u32")
    lanes = np.arange(m.size).reshape(-1, WARP)[:, : 8 * count]  # those whose addresses count
    word = np.dtype(np.uint32)

    def step(where: object) -> None:
        warps = whole_warps(m, where)
        own = lanes[warps].ravel()
        place = m.shared.locate(address(True)[own], own, 16)
        rows = m.shared.fetch(place, own, 16, word).reshape(-1, count, 8, 4)  # (w, n, row, word)
        if transposed:
            numbers = rows.view(np.uint16).reshape(-1, count, 8, 8).transpose(0, 1, 3, 2)
            rows = np.ascontiguousarray(numbers).view(np.uint32)
        for n, d in enumerate(outs):
            d[warps] = rows[:, n].reshape(-1, WARP)

    return step
