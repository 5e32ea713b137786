"""cvt: between integers, floats and the 16- and 19-bit floats, with each one's rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .floating import flushed, from_bf16, to_half
from .machine import DTYPES, Machine, Step, opcode, unsupported
from .parser import Instruction

_FLOATS = ("f16", "bf16", "f32", "f64")
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_tf32(x: np.ndarray) -> np.ndarray:
    """float32 -> 19 bits in a word, ties away from zero (.rna)."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits))


@opcode("cvt")
@opcode("cvt", family="integer")
@opcode("cvt", family="float")
@opcode("cvt", family="half")
def _convert(m: Machine, i: Instruction) -> Step:
    *how, to, source = i.modifiers
    if to in ("f16x2", "bf16x2"):
        return _pack(m, i, to.removesuffix("x2"))
    if to == "tf32":
        if how != ["rna"]:
            raise unsupported(i)
        d, a = m.write(i.operands[0], "b32"), m.read(i.operands[1], "f32")
        return lambda where: np.copyto(d, to_tf32(a), where=where)
    if not {"rn", "sat", "ftz", *_TO_INTEGER}.issuperset(how):
        raise unsupported(i)
    d, a = m.write_wide(i.operands[0], to), m.read(i.operands[1], source)
    value = _value(source, to, set(how), i)

    def step(where: object) -> None:
        np.copyto(d, value(a), where=where, casting="unsafe")

    return step


def _value(source: str, to: str, how: set[str], i: Instruction) -> Callable:
    """A function of the source's numbers to those of `to` (bf16: its bits)."""
    if source in _FLOATS and to in _FLOATS:
        return _float_to_float(source, to, how, i)
    if source in _FLOATS:
        return _float_to_integer(source, to, how, i)
    if to in _FLOATS:
        if "rn" not in how:
            raise unsupported(i)
        if to in ("f16", "bf16"):  # by float32 it would round twice
            if int(source[1:]) > 16:
                raise unsupported(i)
            return lambda a: to_half(a.astype(np.float32), to)
        return lambda a: a.astype(DTYPES[to])
    if "sat" in how:
        low, high = np.iinfo(DTYPES[to]).min, np.iinfo(DTYPES[to]).max
        wide = np.iinfo(DTYPES[source])
        low, high = max(low, wide.min), min(high, wide.max)
        return lambda a: np.clip(a, low, high).astype(DTYPES[to])
    return lambda a: a.astype(DTYPES[to])  # the low bits, or more of them


def _number(a: np.ndarray, source: str) -> np.ndarray:
    return from_bf16(a) if source == "bf16" else a


def _float_to_float(source: str, to: str, how: set[str], i: Instruction) -> Callable:
    narrower = DTYPES[to].itemsize < DTYPES[source].itemsize
    if (narrower and "rn" not in how) or (source == "f64" and to in ("f16", "bf16")):
        raise unsupported(i)
    whole = next((_TO_INTEGER[x] for x in how if x in _TO_INTEGER), None)

    def value(a: np.ndarray) -> np.ndarray:
        x = _number(a, source)
        if "ftz" in how and x.dtype == np.float32:
            x = flushed(x)
        if whole is not None:
            x = whole(x)
        if "sat" in how:
            x = np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1))
        if to in ("f16", "bf16"):
            return to_half(x.astype(np.float32), to)
        x = x.astype(DTYPES[to])
        return flushed(x) if "ftz" in how and to == "f32" else x

    return value


def _float_to_integer(source: str, to: str, how: set[str], i: Instruction) -> Callable:
    whole = next((_TO_INTEGER[x] for x in how if x in _TO_INTEGER), None)
    if whole is None:
        raise unsupported(i)
    info = np.iinfo(DTYPES[to])

    def value(a: np.ndarray) -> np.ndarray:
        """What does not fit becomes the nearest number that does; NaN becomes 0."""
        x = _number(a, source)
        x = whole((flushed(x) if "ftz" in how else x).astype(np.float64))
        r = np.clip(x, info.min, info.max)
        r = np.where(np.isnan(r), 0, r)
        top = r >= float(info.max)  # 2**63 - 1 is no float64
        return np.where(top, info.max, np.where(top, 0, r).astype(DTYPES[to])).astype(DTYPES[to])

    return value


def _pack(m: Machine, i: Instruction, kind: str) -> Step:
    """Two float32 to 16 bits each: the first one is the upper half."""
    if not {"rn", "relu"}.issuperset(i.modifiers[:-2]) or i.modifiers[-1] != "f32":
        raise unsupported(i)
    d = m.write(i.operands[0], "b32")
    upper, lower = (m.read(o, "f32") for o in i.operands[1:])
    relu = "relu" in i.modifiers

    def step(where: object) -> None:
        a, b = (np.where(x < 0, np.float32(0), x) if relu else x for x in (upper, lower))
        high, low = to_half(a, kind).astype(np.uint32), to_half(b, kind)
        np.copyto(d, high << np.uint32(16) | low, where=where)

    return step
