"""What the 32 threads of a warp do together: shfl, vote, redux, activemask."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .machine import DTYPES, WARP, Machine, Step, opcode, unsupported
from .parser import Instruction, Pair

_LANE = np.arange(WARP)


def whole_warps(m: Machine, where: object) -> np.ndarray | slice:
    """The warps that execute an instruction which all 32 threads of a warp must execute."""
    if where is True:
        return slice(None)
    mask = where.reshape(-1, WARP)
    some, every = mask.any(1), mask.all(1)
    if np.any(some != every):
        m.fail(np.flatnonzero(some != every)[0] * WARP, "a warp's threads have parted here")
    return np.flatnonzero(every)


def _members(m: Machine, i: Instruction) -> Callable[[object], np.ndarray | slice]:
    """whole_warps, checked against the member mask, the last operand: it must name all 32."""
    named = np.broadcast_to(m.read(i.operands[-1], "b32"), m.size)

    def warps(where: object) -> np.ndarray | slice:
        partly = (named != 0xFFFFFFFF) & where
        if partly.any():
            m.fail(np.flatnonzero(partly)[0], "a member mask that is not the whole warp")
        return whole_warps(m, where)

    return warps


@opcode("shfl")
@opcode("shfl", family="integer")
def _shuffle(m: Machine, i: Instruction) -> Step:
    """d|p = a of another lane, p whether there is such a lane; c = clamp | segment mask << 8."""
    mode = i.modifiers[1]
    if i.modifiers[0] != "sync" or i.modifiers[-1] != "b32":
        raise unsupported(i)
    members = _members(m, i)
    to, valid = i.operands[0], None
    if isinstance(to, Pair):
        to, valid = to.first, m.write(to.second, "pred").reshape(-1, WARP)
    d = m.write(to, "b32").reshape(-1, WARP)
    a, b, c = (np.broadcast_to(m.read(o, "b32"), m.size) for o in i.operands[1:4])
    a, b, c = (x.reshape(-1, WARP) for x in (a, b, c))

    def step(where: object) -> None:
        warps = members(where)
        by, clamp = b[warps].astype(np.int64) & 31, c[warps].astype(np.int64)
        segment = clamp >> 8 & 31
        high = (_LANE & segment) | (clamp & ~segment & 31)
        low = _LANE & segment
        if mode == "up":
            source = _LANE - by
            inside = source >= high
        elif mode == "down":
            source = _LANE + by
            inside = source <= high
        elif mode == "bfly":
            source = _LANE ^ by
            inside = source <= high
        else:
            source = low | (by & ~segment)
            inside = source <= high
        source = np.where(inside, source, _LANE)
        d[warps] = np.take_along_axis(a[warps], source, 1)
        if valid is not None:
            valid[warps] = inside

    return step


@opcode("vote")
@opcode("vote", family="pred")
@opcode("vote", family="integer")
def _vote(m: Machine, i: Instruction) -> Step:
    if i.modifiers[0] != "sync" or i.modifiers[1] not in ("all", "any", "uni", "ballot"):
        raise unsupported(i)
    members = _members(m, i)
    mode, kind = i.modifiers[1], i.modifiers[-1]
    d = m.write(i.operands[0], kind).reshape(-1, WARP)
    given = i.operands[1]
    p = m.read(given.first if isinstance(given, Pair) else given, "pred")
    p = np.broadcast_to(p, m.size).reshape(-1, WARP)

    def step(where: object) -> None:
        warps = members(where)
        x = ~p[warps] if isinstance(given, Pair) else p[warps]
        if mode == "ballot":
            r = (x.astype(np.uint64) << _LANE.astype(np.uint64)).sum(1).astype(np.uint32)
        else:
            r = {"all": x.all(1), "any": x.any(1), "uni": x.all(1) | ~x.any(1)}[mode]
        d[warps] = r[:, None]

    return step


@opcode("redux", family="integer")
def _reduce(m: Machine, i: Instruction) -> Step:
    """Integers of a warp, added or compared."""
    sync, mode, kind = i.modifiers
    ufuncs = {"add": np.add, "min": np.minimum, "max": np.maximum}
    ufuncs |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    if sync != "sync" or mode not in ufuncs:
        raise unsupported(i)
    members = _members(m, i)
    d = m.write(i.operands[0], kind).reshape(-1, WARP)
    a = np.broadcast_to(m.read(i.operands[1], kind), m.size).reshape(-1, WARP)

    def step(where: object) -> None:
        warps = members(where)
        d[warps] = ufuncs[mode].reduce(a[warps], axis=1, dtype=DTYPES[kind], keepdims=True)

    return step


@opcode("bar")
def _meet(m: Machine, i: Instruction) -> Step:
    """bar.warp.sync: the threads of a warp are in step here anyway."""
    if i.modifiers != ("warp", "sync"):
        raise unsupported(i)
    return _members(m, i)
