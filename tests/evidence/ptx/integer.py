"""Integer, logic, comparison and move instructions.

Registers are bits: `add.s32` and `add.u32` differ in nothing, and wrap around.
"""

from __future__ import annotations

import numpy as np

from .floating import widened
from .machine import DTYPES, Machine, Step, opcode, unsupported
from .parser import Instruction, Pair, PtxError, Vector

_BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_PREDICATES = {"and": np.logical_and, "or": np.logical_or, "xor": np.not_equal}


def _wide(kind: str) -> str:
    """The type of twice the width: u32 -> u64."""
    return f"{kind[0]}{2 * int(kind[1:])}"


@opcode(*_BINARY, family="integer")
def _binary(m: Machine, i: Instruction) -> Step:
    if len(i.modifiers) > 1:  # .sat, .cc
        raise unsupported(i)
    kind, ufunc = i.modifiers[-1], _BINARY[i.op]
    d, a, b = m.write(i.operands[0], kind), *(m.read(o, kind) for o in i.operands[1:])
    return lambda where: ufunc(a, b, out=d, where=where)


@opcode(*_PREDICATES, family="pred")
def _logic(m: Machine, i: Instruction) -> Step:
    ufunc = _PREDICATES[i.op]
    d, a, b = m.write(i.operands[0], "pred"), *(m.read(o, "pred") for o in i.operands[1:])
    return lambda where: ufunc(a, b, out=d, where=where)


_UNARY = {"not": np.invert, "neg": np.negative, "abs": np.abs}


@opcode(*_UNARY, family="integer")
@opcode("not", family="pred")
def _unary(m: Machine, i: Instruction) -> Step:
    kind, ufunc = i.modifiers[-1], _UNARY[i.op]
    d, a = m.write(i.operands[0], kind), m.read(i.operands[1], kind)
    return lambda where: ufunc(a, out=d, where=where)


@opcode("mul", "mad", family="integer")
def _multiply(m: Machine, i: Instruction) -> Step:
    half, kind = i.modifiers  # .lo, .hi or .wide
    bits = int(kind[1:])
    out = _wide(kind) if half == "wide" else kind
    d, a, b = m.write(i.operands[0], out), *(m.read(o, kind) for o in i.operands[1:3])
    c = m.read(i.operands[3], out) if i.op == "mad" else None
    if half == "lo":
        if c is None:
            return lambda where: np.multiply(a, b, out=d, where=where)
        return lambda where: np.add(a * b, c, out=d, where=where)
    if bits == 64:
        if half != "hi" or c is not None:
            raise unsupported(i)
        return lambda where: np.copyto(d, _high_half(a, b), where=where)
    product = DTYPES[_wide(kind)]
    if half == "wide":
        if c is None:
            return lambda where: np.multiply(a, b, out=d, where=where, dtype=product)
        return lambda where: np.add(np.multiply(a, b, dtype=product), c, out=d, where=where)

    def high(where: object) -> None:
        r = (np.multiply(a, b, dtype=product) >> product.type(bits)).astype(DTYPES[kind])
        np.copyto(d, r if c is None else r + c, where=where)

    return high


def _high_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 64 bits of products of 64-bit numbers, by halves of 32."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + (x0 * y0 >> half)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":  # a negative number was read as 2**64 more
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


@opcode("div", "rem", family="integer")
def _divide(m: Machine, i: Instruction) -> Step:
    kind = i.modifiers[-1]
    d, a, b = m.write(i.operands[0], kind), *(m.read(o, kind) for o in i.operands[1:])

    def step(where: object) -> None:
        if np.any((b == 0) & where):
            raise PtxError("integer division by zero")
        rest = np.fmod(a, b)  # C's: towards zero
        np.copyto(d, rest if i.op == "rem" else (a - rest) // b, where=where)

    return step


@opcode("shl", "shr", family="integer")
def _shift(m: Machine, i: Instruction) -> Step:
    kind = i.modifiers[-1]
    bits = int(kind[1:])
    d, a = m.write(i.operands[0], kind), m.read(i.operands[1], kind)
    by = m.read(i.operands[2], "u32")  # whatever is shifted; too many bits are all bits
    ufunc = np.left_shift if i.op == "shl" else np.right_shift
    dtype = DTYPES[kind]

    def step(where: object) -> None:
        n = np.minimum(by, bits).astype(dtype)
        if kind[0] == "s":
            r = np.right_shift(a, np.minimum(n, bits - 1))
        else:
            r = np.where(n >= bits, dtype.type(0), ufunc(a, n & dtype.type(bits - 1)))
        np.copyto(d, r, where=where)

    if by.size == 1 and by[0] < bits:
        n = by.astype(dtype)
        return lambda where: ufunc(a, n, out=d, where=where)
    return step


@opcode("shf")
def _funnel(m: Machine, i: Instruction) -> Step:
    """Shifts the 64 bits (b, a) and gives the high half (.l) or the low one (.r)."""
    side, mode, kind = i.modifiers
    d = m.write(i.operands[0], kind)
    a, b, by = (m.read(o, "u32") for o in i.operands[1:])

    def step(where: object) -> None:
        n = (np.minimum(by, 32) if mode == "clamp" else by & 31).astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a
        r = (both << n) >> np.uint64(32) if side == "l" else both >> n
        np.copyto(d, r.astype(np.uint32), where=where)

    return step


@opcode("bfe")
def _extract(m: Machine, i: Instruction) -> Step:
    """`length` bits of a from bit `start`; signed ones repeat the last bit that there is."""
    kind = i.modifiers[-1]
    width = int(kind[1:])
    d, a = m.write(i.operands[0], kind), m.read(i.operands[1], f"u{width}")
    starts, lengths = (m.read(o, "u32") for o in i.operands[2:])

    dtype = DTYPES[kind]

    def step(where: object) -> None:
        start, length = (starts & 255).astype(np.int64), (lengths & 255).astype(np.int64)
        last = np.minimum(start + length - 1, width - 1)
        up = np.clip(width - 1 - last, 0, width - 1)
        down = np.minimum(up + start, width - 1).astype(dtype)
        r = (a << up.astype(a.dtype)).view(dtype) >> down
        empty = (length == 0) | ((start >= width) if kind[0] == "u" else False)
        np.copyto(d, np.where(empty, dtype.type(0), r), where=where)

    return step


@opcode("bfi")
def _insert(m: Machine, i: Instruction) -> Step:
    """The low `length` bits of a over those of b from bit `start`."""
    kind = i.modifiers[-1]
    width, dtype = int(kind[1:]), DTYPES[f"u{kind[1:]}"]
    d, a, b = m.write(i.operands[0], kind), *(m.read(o, kind) for o in i.operands[1:3])
    starts, lengths = (m.read(o, "u32") for o in i.operands[3:])

    def step(where: object) -> None:
        start, length = (starts & 255).astype(object), (lengths & 255).astype(object)
        full = 2**width - 1
        mask = (((1 << length) - 1) << start & full).astype(dtype)
        moved = (a.astype(object) << start & full).astype(dtype)
        np.copyto(d, (b & ~mask) | (moved & mask), where=where)

    return step


@opcode("prmt")
def _permute(m: Machine, i: Instruction) -> Step:
    """Each byte of the result is one of the 8 of (b, a), or its sign eight times."""
    if i.modifiers != ("b32",):
        raise unsupported(i)
    d = m.write(i.operands[0], "b32")
    a, b, selector = (m.read(o, "b32") for o in i.operands[1:])

    def step(where: object) -> None:
        both = b.astype(np.uint64) << np.uint64(32) | a
        r = np.zeros(1, np.uint32)
        for byte in range(4):
            choice = (selector >> np.uint32(4 * byte)) & np.uint32(15)
            value = (both >> ((choice & 7) * 8).astype(np.uint64) & np.uint64(255)).astype("u4")
            value = np.where(choice & 8, np.where(value & 128, np.uint32(255), np.uint32(0)), value)
            r = r | value << np.uint32(8 * byte)
        np.copyto(d, r, where=where)

    return step


@opcode("lop3")
def _lop3(m: Machine, i: Instruction) -> Step:
    """Any function of three bits: bit (4 a + 2 b + c) of the table."""
    if i.modifiers != ("b32",):
        raise unsupported(i)
    d = m.write(i.operands[0], "b32")
    a, b, c = (m.read(o, "b32") for o in i.operands[1:4])
    table = i.operands[4].value

    def step(where: object) -> None:
        r = np.zeros(1, np.uint32)
        for n in range(8):
            if table >> n & 1:
                r = r | (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        np.copyto(d, r, where=where)

    return step


@opcode("popc", "clz", "brev")
def _count(m: Machine, i: Instruction) -> Step:
    kind = i.modifiers[-1]
    width = int(kind[1:])
    a = m.read(i.operands[1], kind)
    d = m.write(i.operands[0], kind if i.op == "brev" else "u32")

    def step(where: object) -> None:
        bits = a[None] >> np.arange(width, dtype=a.dtype)[:, None] & a.dtype.type(1)  # (width, n)
        if i.op == "popc":
            r = bits.sum(0)
        elif i.op == "clz":
            r = np.where(bits.any(0), np.argmax(bits[::-1], 0), width)
        else:
            r = (bits[::-1] << np.arange(width, dtype=a.dtype)[:, None]).sum(0)
        np.copyto(d, r.astype(d.dtype), where=where)

    return step


# ---- comparisons and choices -------------------------------------------------------------------

_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_COMPARE |= {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
# Unordered ones are true for NaN, and the ordered ones' opposites otherwise.
_UNORDERED = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}


def _comparison(name: str, a: np.ndarray, b: np.ndarray, is_float: bool):
    """A function () -> bool array."""
    if name in _UNORDERED:
        opposite = _comparison(_UNORDERED[name], a, b, True)
        return lambda: ~opposite()
    if name == "num":
        return lambda: (a == a) & (b == b)
    if name == "nan":
        return lambda: (a != a) | (b != b)
    if name == "ne" and is_float:
        return lambda: (a < b) | (a > b)
    return lambda: _COMPARE[name](a, b)


@opcode("setp", family="integer")
@opcode("setp", family="float")
@opcode("setp", family="half")
def _set_predicate(m: Machine, i: Instruction) -> Step:
    """p|q = a < b, its opposite; with .and, .or or .xor a third operand, a predicate, joins in."""
    name, *join, kind = (x for x in i.modifiers if x != "ftz")
    a, b = (m.read(o, kind) for o in i.operands[1:3])
    first, second = i.operands[0], None
    if isinstance(first, Pair):
        first, second = first.first, first.second
    d = m.write(first, "pred")
    if not join and second is None and kind[0] != "f" and name in _COMPARE and kind != "bf16":
        ufunc = _COMPARE[name]
        return lambda where: ufunc(a, b, out=d, where=where)
    other = m.write(second, "pred") if second is not None else None
    c, negated = None, False
    if join:
        negated = isinstance(i.operands[3], Pair)
        c = m.read(i.operands[3].first if negated else i.operands[3], "pred")
        joined = _PREDICATES[join[0]]
    flush = "ftz" in i.modifiers

    def step(where: object) -> None:
        x, y = widened(a, kind, flush), widened(b, kind, flush)
        r = _comparison(name, x, y, kind[0] not in "bus" or kind == "bf16")()
        s = ~r
        if c is not None:
            r, s = (joined(v, ~c if negated else c) for v in (r, s))
        np.copyto(d, r, where=where)
        if other is not None:
            np.copyto(other, s, where=where)

    return step


@opcode("selp")
def _select(m: Machine, i: Instruction) -> Step:
    kind = i.modifiers[-1]
    d, a, b = m.write(i.operands[0], kind), *(m.read(o, kind) for o in i.operands[1:3])
    p = m.read(i.operands[3], "pred")
    return lambda where: np.copyto(d, np.where(p, a, b), where=where)


# ---- moves -------------------------------------------------------------------------------------


@opcode("mov")
@opcode("mov", family="integer")
@opcode("mov", family="pred")
@opcode("mov", family="float")
@opcode("mov", family="half")
def _move(m: Machine, i: Instruction) -> Step:
    """Also packs {a, b} into a wider register, lowest first, and unpacks it."""
    kind, (to, source) = i.modifiers[-1], i.operands
    if isinstance(to, Vector):
        part = f"b{int(kind[1:]) // len(to.parts)}"
        whole = m.read(source, kind).view(DTYPES[part]).reshape(-1, len(to.parts))
        return _each([(m.write(o, part), whole[:, n]) for n, o in enumerate(to.parts)])
    if isinstance(source, Vector):
        part = f"b{int(kind[1:]) // len(source.parts)}"
        whole = m.write(to, kind).view(DTYPES[part]).reshape(-1, len(source.parts))
        return _each([(whole[:, n], m.read(o, part)) for n, o in enumerate(source.parts)])
    d, a = m.write(to, kind), m.read(source, kind)
    return lambda where: np.copyto(d, a, where=where)


def _each(moves: list[tuple[np.ndarray, np.ndarray]]) -> Step:
    def step(where: object) -> None:
        for d, a in moves:
            np.copyto(d, a, where=where)

    return step


@opcode("cvta")
def _to_generic(m: Machine, i: Instruction) -> Step:
    """Global addresses are generic addresses; there are no generic ones of other spaces here."""
    if "global" not in i.modifiers:
        raise unsupported(i)
    d, a = m.write(i.operands[0], "u64"), m.read(i.operands[1], "u64")
    return lambda where: np.copyto(d, a, where=where)


@opcode("nanosleep", "membar", "griddepcontrol")
def _nothing(m: Machine, i: Instruction) -> Step:
    """Orders or delays what is in order here anyway."""
    return lambda where: None
