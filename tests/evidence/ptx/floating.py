"""Floating-point arithmetic, 32 bits wide and in pairs of 16.

add, sub, mul, fma and div.rn round once, to nearest even, as IEEE 754 has it (fma by way of
float64, with the tie that a second rounding would break put right). The `.approx` and `.full`
functions are allowed an error by the manual (2 ulp or so) that is not specified further: here they
are correctly rounded, so a kernel that needs more than the manual promises is not found out.
What ptxas may still do is not in the PTX: it fuses a `mul` and an `add` without `.rn` into one fma.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .machine import DTYPES, Machine, Step, opcode, unsupported
from .parser import Instruction

TINY = np.finfo(np.float32).tiny  # the smallest normal number: .ftz makes zeros of those below


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers to zeros of the same sign."""
    small = np.abs(x) < TINY
    return np.where(small, x * np.float32(0), x) if small.any() else x


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c of float32, rounded once."""
    product = a.astype(np.float64) * b  # exact: 48 bits
    total = product + c
    # float64 rounds a second time only if it has put the sum on a tie between two float32.
    bits = total.view(np.int64)
    tie = ((bits & 0x1FFFFFFF) == 0x10000000) | (np.abs(total) < TINY)
    if tie.any():
        total = _to_odd(product, np.broadcast_to(c, total.shape).astype(np.float64), total)
    return total.astype(np.float32)


def _to_odd(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """a + b of float64 rounded to odd, so that it can be rounded again; `total` is the nearest."""
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact (Knuth)
    even = (total.view(np.int64) & 1) == 0
    shift = (error != 0) & even & np.isfinite(total)
    return np.where(shift, np.nextafter(total, np.copysign(np.inf, error)), total)


# ---- 16 bits -----------------------------------------------------------------------------------


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16, to nearest even; NaN as the hardware has it."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_half(bits: np.ndarray, kind: str) -> np.ndarray:
    """Raw 16 bits of kind "f16" or "bf16" -> float32."""
    return from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def to_half(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 -> raw 16 bits, to nearest even."""
    return to_bf16(x) if kind == "bf16" else x.astype(np.float16).view(np.uint16)


def widened(a: np.ndarray, kind: str, flush: bool = False) -> np.ndarray:
    """An operand of any type as numbers that numpy compares rightly."""
    if kind == "bf16":
        return from_bf16(a)
    return flushed(a) if flush and kind == "f32" else a


# ---- functions ---------------------------------------------------------------------------------


def _once(function: Callable) -> Callable:
    """A function of one number in float64, rounded to float32."""
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


def _negative(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) ^ np.uint32(0x80000000)).view(np.float32)


def _either(function: Callable) -> Callable:
    """min.NaN, max.NaN: NaN if either is."""
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), function(a, b))


_FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.fmin,  # the number, where the other is none
    "max": np.fmax,
    "abs": np.abs,
    "neg": _negative,
    "fma": fused,
    "sqrt": np.sqrt,
    "rcp": lambda x: np.float32(1) / x,
    "rsqrt": _once(lambda x: 1 / np.sqrt(x)),
    "ex2": _once(np.exp2),
    "lg2": _once(np.log2),
    "sin": _once(np.sin),
    "cos": _once(np.cos),
    "tanh": _once(np.tanh),
}
_HINTS = {"rn", "approx", "full", "ftz", "sat", "NaN", "f32", "f32x2"}


@opcode(*_FUNCTIONS, family="float")
def _float(m: Machine, i: Instruction) -> Step:
    kind = i.modifiers[-1]
    if kind == "f64":
        return _double(m, i)
    if not _HINTS.issuperset(i.modifiers):  # .rz, .rm, .rp
        raise unsupported(i)
    function = _FUNCTIONS[i.op]
    if "NaN" in i.modifiers:
        function = _either(function)
    d = _split(m.write(i.operands[0], kind), kind)
    sources = [_split(m.read(o, kind), kind) for o in i.operands[1:]]
    if i.op in ("min", "max") and len(sources) == 3:
        function = _of_three(function)
    ftz, sat = "ftz" in i.modifiers, "sat" in i.modifiers
    if isinstance(function, np.ufunc) and not ftz and not sat and kind == "f32":
        if len(sources) == 1:
            (a,) = sources
            return lambda where: function(a, out=d, where=where)
        a, b = sources
        return lambda where: function(a, b, out=d, where=where)

    def step(where: object) -> None:
        r = function(*(map(flushed, sources) if ftz else sources))
        if ftz:
            r = flushed(r)
        if sat:
            r = np.where(np.isnan(r), np.float32(0), np.clip(r, 0, 1))
        np.copyto(d, r, where=where if where is True or d.ndim == 1 else where[:, None])

    return step


def _split(a: np.ndarray, kind: str) -> np.ndarray:
    """(n,), or (n, 2) for a pair: float32."""
    return a.view(np.float32).reshape(-1, 2) if kind == "f32x2" else a


def _of_three(function: Callable) -> Callable:
    return lambda a, b, c: function(function(a, b), c)


def _double(m: Machine, i: Instruction) -> Step:
    if i.op not in ("add", "sub", "mul", "div", "min", "max", "abs", "sqrt") or "rn" not in (
        *i.modifiers,
        *(("rn",) if i.op in ("add", "sub", "mul", "min", "max", "abs") else ()),
    ):
        raise unsupported(i)
    function, d = _FUNCTIONS[i.op], m.write(i.operands[0], "f64")
    sources = [m.read(o, "f64") for o in i.operands[1:]]
    return lambda where: function(*sources, out=d, where=where)


@opcode("add", "sub", "fma", family="half")
def _half_or_mixed(m: Machine, i: Instruction) -> Step:
    """add.f32.bf16: all operands but the last have 16 bits; it and the result have 32."""
    if "f32" not in i.modifiers:
        return _half(m, i)
    kind = i.modifiers[-1]
    if not {"rn", "f32", kind}.issuperset(i.modifiers):
        raise unsupported(i)
    function, d = _FUNCTIONS[i.op], m.write(i.operands[0], "f32")
    *narrow, wide = i.operands[1:]
    narrow, wide = [m.read(o, "u16") for o in narrow], m.read(wide, "f32")

    def step(where: object) -> None:
        np.copyto(d, function(*(from_half(x, kind) for x in narrow), wide), where=where)

    return step


_HALF = ("add", "sub", "mul", "fma", "min", "max", "abs", "neg", "ex2", "tanh")


@opcode(*(op for op in _HALF if op not in ("add", "sub", "fma")), family="half")
def _half(m: Machine, i: Instruction) -> Step:
    """One or two numbers of 16 bits: float32 is wide enough to round add, sub, mul only once."""
    kind = i.modifiers[-1]
    single = kind.removesuffix("x2")
    if not {"rn", "NaN", "approx", "ftz", kind}.issuperset(i.modifiers):  # .sat, .relu
        raise unsupported(i)
    function = _FUNCTIONS[i.op]
    if "NaN" in i.modifiers:
        function = _either(function)
    pack = 2 if kind.endswith("x2") else 1
    d = m.write(i.operands[0], kind).view(np.uint16).reshape(-1, pack)
    sources = [m.read(o, kind).view(np.uint16).reshape(-1, pack) for o in i.operands[1:]]

    def step(where: object) -> None:
        wide = [from_half(s, single) for s in sources]
        if i.op == "fma":
            bits = _fused_half(*wide, single)
        else:
            bits = to_half(function(*wide), single)
        np.copyto(d, bits, where=where if where is True else where[:, None])

    return step


def _fused_half(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str) -> np.ndarray:
    product = a.astype(np.float64) * b
    c = np.broadcast_to(c, np.broadcast_shapes(product.shape, c.shape)).astype(np.float64)
    total = _to_odd(product, c, product + c)
    if kind == "f16":
        return total.astype(np.float16).view(np.uint16)
    near = total.astype(np.float32)  # to odd once more, so that the last rounding is the only one
    back = near.astype(np.float64)
    step = (back != total) & ((near.view(np.uint32) & 1) == 0) & np.isfinite(near)
    toward = np.where(total > back, np.float32(np.inf), np.float32(-np.inf))
    return to_bf16(np.where(step, np.nextafter(near, toward), near))


@opcode("testp")
def _test(m: Machine, i: Instruction) -> Step:
    name, kind = i.modifiers
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "notanumber": np.isnan,
        "number": lambda x: ~np.isnan(x),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(DTYPES[kind]).tiny),
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(DTYPES[kind]).tiny),
    }
    d, a = m.write(i.operands[0], "pred"), m.read(i.operands[1], kind)
    return lambda where: np.copyto(d, tests[name](a), where=where)


@opcode("copysign", family="float")
def _copysign(m: Machine, i: Instruction) -> Step:
    """The sign of the first, the size of the second."""
    kind = i.modifiers[-1]
    d, a, b = m.write(i.operands[0], kind), *(m.read(o, kind) for o in i.operands[1:])
    return lambda where: np.copysign(b, a, out=d, where=where)
