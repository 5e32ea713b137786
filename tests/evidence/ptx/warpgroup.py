"""wgmma (sm_90a): four warps multiply from shared memory, asynchronously, and what that forbids.

Warp w of a group has rows 16 w ... of D (64 x N) and, if it comes from registers, of A (64 x k), in
mma.sync's layout (matrix.py); registers 4 c ... of D hold columns 8 c ... A matrix in shared memory
is named by a descriptor: start, leading offset L, stride offset S, and the width W = 32, 64 or 128
of a swizzled pattern of 8 rows, or 16 without swizzle. It lies in chunks of 16 bytes:
  k contiguous   chunk c (0, 1) of row r:  W (r % 8) + S (r / 8) + 16 c
                 without swizzle           16 (r % 8) + S (r / 8) + L c
  transposed     chunk c of column k:      16 (c % w) + L (c / w) + W (k % 8) + S (k / 8), w = W/16
                 without swizzle           S c + 16 (k % 8) + L (k / 8)
Swizzle: bits 4 ... of the address by exclusive or with bits 7 ..., 3 of them for 128 bytes, 2 for
64, 1 for 32, counted from the descriptor's base offset on.

The result is computed when the instruction is issued. As a GPU may be later, everything that would
then notice is an error: access to D, or writing A or shared memory, before the wait for its group;
and registers that were accessed after the last wgmma.fence, unless by a wgmma of the same shape.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from .machine import WARP, Machine, Step, lanes_of, opcode, unsupported
from .matrix import cut
from .memory import parts_of
from .parser import Address, Instruction, Pair, Program, PtxError, Register, Vector
from .proxy import GROUP

THREADS = GROUP * WARP
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_DEPTH = {"bf16": 16, "f16": 16, "tf32": 8}
_SWIZZLE = np.array([0, 3, 2, 1])  # descriptor's mode -> bits that are swizzled


class InFlightError(PtxError):
    """Registers of a wgmma are used while it is under way.

    ptxas sees that too, says so (C7510 ... C7515), and fences and waits for every single wgmma of
    the kernel: right results at a lower speed. `serialised` is that: no register is in flight.
    """


def uses_wgmma(program: Program) -> bool:
    return any(i.op == "wgmma" for i in program.instructions)


# ---- registers that are in flight --------------------------------------------------------------


@dataclasses.dataclass
class _Multiply:
    """One wgmma of some warp groups, under way."""

    shape: str
    sums: np.ndarray  # registers of D, as rows of Flight's arrays
    factors: np.ndarray  # registers of A
    groups: np.ndarray  # warp groups
    number: np.ndarray  # of the commit that they wait for, per group
    place: np.ndarray  # (groups, rows) of shared memory that it reads

    def only(self, mask: np.ndarray) -> _Multiply:
        groups, number, place = self.groups[mask], self.number[mask], self.place[mask]
        return dataclasses.replace(self, groups=groups, number=number, place=place)


class Flight:
    """What is under way, and what other instructions may do to its registers meanwhile."""

    def __init__(self, m: Machine, serialised: bool = False) -> None:
        self.m, self.serialised = m, serialised
        found: dict[str, int] = {}  # register -> row of the arrays below
        for i in m.program.instructions:
            if i.op == "wgmma" and i.modifiers[0] == "mma_async":
                for register in (*parts_of(i.operands[0]), *registers_of(i.operands[1])):
                    if register.kind != "b64":  # a descriptor is read at once
                        found.setdefault(register.name, len(found))
        self.rows = found
        shape = len(found), m.size // THREADS, THREADS
        self.loose = np.ones(shape, bool)  # accessed since the last wgmma.fence
        self.sums, self.factors = np.zeros(shape, bool), np.zeros(shape, bool)  # in flight
        self.under_way: list[_Multiply] = []
        self.commits = np.zeros(shape[1], np.int64)
        m.resets.append(self._reset)

    def _reset(self) -> None:
        self.loose.fill(True)
        self.under_way.clear()
        self.commits.fill(0)
        self._mark()

    def _mark(self) -> None:
        for array in (self.sums, self.factors):
            array.fill(False)
        for one in self.under_way:
            self.sums[np.ix_(one.sums, one.groups)] = True
            self.factors[np.ix_(one.factors, one.groups)] = True

    def indices(self, registers: list[Register]) -> np.ndarray:
        return np.array([self.rows[r.name] for r in registers if r.name in self.rows], np.int64)

    def watch(self, i: Instruction, step: Step) -> Step:
        """The step of another instruction, which may not touch what is in flight."""
        names = [r for o in i.operands for r in registers_of(o)]
        touched, written = self.indices(names), self.indices(written_by(i))
        if i.op == "wgmma" or self.serialised or not len(touched):
            return step
        flat = [x.reshape(len(self.rows), -1) for x in (self.loose, self.sums, self.factors)]
        loose, sums, factors = flat

        def watched(where: object) -> None:
            if self.under_way:
                self._complain(sums[touched] & where, "that wgmma has yet to write")
                self._complain(factors[written] & where, "that wgmma has yet to read")
            step(where)
            for row in touched:
                loose[row][lanes_of(where)] = True

        return watched

    def _complain(self, wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            self.m.fail(np.argwhere(wrong)[0][1], f"uses a register {what}", InFlightError)

    def groups(self, where: object) -> np.ndarray:
        """The warp groups that execute an instruction which all their threads must execute."""
        if where is True:
            return np.arange(len(self.commits))
        mask = where.reshape(-1, THREADS)
        some, every = mask.any(1), mask.all(1)
        if np.any(some != every):
            self.m.fail(
                np.flatnonzero(some != every)[0] * THREADS,
                "a warp group's threads have parted here",
            )
        return np.flatnonzero(every)

    def fence(self, where: object) -> None:
        self.loose[:, self.groups(where)] = False

    def commit(self, where: object) -> None:
        self.commits[self.groups(where)] += 1

    def wait(self, where: object, keep: int) -> None:
        """Ends those of the executing groups but those of their last `keep` commits."""
        here, left = np.zeros(len(self.commits), bool), []
        here[self.groups(where)] = True
        for one in self.under_way:
            done = here[one.groups] & (one.number < self.commits[one.groups] - keep)
            if done.any():
                ended = one.only(done)
                lanes = np.repeat(ended.groups * THREADS, ended.place.shape[1])
                self.m.shared.proxy.end(ended.place.ravel(), lanes)
            if not done.all():
                left.append(one.only(~done))
        self.under_way = left
        self._mark()

    def begin(self, one: _Multiply) -> None:
        """Counts a wgmma as under way."""
        if not self.serialised:
            self._check(one)
        self.m.shared.proxy.begin(one.place.ravel())
        self.under_way.append(one)
        self.sums[np.ix_(one.sums, one.groups)] = True
        self.factors[np.ix_(one.factors, one.groups)] = True

    def _check(self, one: _Multiply) -> None:
        """Complains about its registers."""
        used = np.concatenate([one.sums, one.factors])
        loose = self.loose[np.ix_(used, one.groups)]
        if loose.any():
            n, group, _ = np.argwhere(loose)[0]
            name = list(self.rows)[used[n]]
            self.m.fail(
                one.groups[group] * THREADS, f"wgmma uses {name} without a wgmma.fence before it"
            )
        for other in self.under_way:
            if not np.isin(other.groups, one.groups).any():
                continue
            same = other.shape == one.shape and np.array_equal(other.sums, one.sums)
            clash = not same and np.isin(one.sums, other.sums).any()
            clash |= bool(np.isin(one.factors, other.sums).any())
            clash |= bool(np.isin(one.sums, other.factors).any())
            if clash:
                lane = one.groups[0] * THREADS
                self.m.fail(lane, "wgmma uses registers of one under way", InFlightError)


def registers_of(operand: object) -> list[Register]:
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Vector):
        return [r for part in operand.parts for r in registers_of(part)]
    if isinstance(operand, Pair):
        return [*registers_of(operand.first), *registers_of(operand.second)]
    return registers_of(operand.base) if isinstance(operand, Address) else []


def written_by(i: Instruction) -> list[Register]:
    """Results come first, but for stores, whose first operand is an address."""
    if not i.operands or isinstance(i.operands[0], Address):
        return []
    return registers_of(i.operands[0])


# ---- matrices ----------------------------------------------------------------------------------


class _Shared:
    """A factor in shared memory, (rows, k): named by a descriptor, or by one for its transpose."""

    def __init__(self, m: Machine, operand: Register, rows: int, kind: str, transposed: bool):
        self.m, self.kind, self.transposed = m, kind, transposed
        self.descriptor = np.broadcast_to(m.read(operand, "b64"), m.size).reshape(-1, THREADS)
        if transposed:
            self.part, self.step = np.indices((rows // 8, _DEPTH[kind])).reshape(2, 1, -1)
        else:
            self.step, self.part = np.indices((rows, 2)).reshape(2, 1, -1)
        self.rows = rows

    def place(self, groups: np.ndarray) -> np.ndarray:
        """(groups, n): where its rows of 16 bytes are."""
        words = self.descriptor[groups]
        if np.any(words != words[:, :1]):
            bad = np.flatnonzero((words != words[:, :1]).any(1))[0]
            self.m.fail(groups[bad] * THREADS, "a descriptor that differs between threads")
        word = words[:, :1].astype(np.uint64)

        def field(first: int, bits: int) -> np.ndarray:
            return (word >> np.uint64(first) & np.uint64(2**bits - 1)).astype(np.int64)

        start, leading, stride = (field(first, 14) * 16 for first in (0, 16, 32))
        base, bits = field(49, 3), _SWIZZLE[field(62, 2)]
        width = 16 << bits
        across = width // 16
        if self.transposed:
            plain = stride * self.part + 16 * (self.step % 8) + leading * (self.step // 8)
            swizzled = 16 * (self.part % across) + leading * (self.part // across)
            swizzled = swizzled + width * (self.step % 8) + stride * (self.step // 8)
        else:
            plain = 16 * (self.step % 8) + stride * (self.step // 8) + leading * self.part
            swizzled = width * (self.step % 8) + stride * (self.step // 8) + 16 * self.part
        address = start + np.where(bits == 0, plain, swizzled)
        address ^= ((address >> 7) - base & (1 << bits) - 1) << 4
        lanes = np.repeat(groups * THREADS, address.shape[1])
        return self.m.shared.locate(address.ravel(), lanes, 16).reshape(address.shape)

    def numbers(self, place: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """(groups, rows, k)"""
        lanes = np.repeat(groups * THREADS, place.shape[1])
        words = self.m.shared.proxy.fetch(place.ravel(), lanes).reshape(len(groups), -1)
        if not self.transposed:
            return _numbers(words, self.kind).reshape(len(groups), self.rows, -1)
        by_column = _numbers(words, self.kind).reshape(len(groups), self.rows // 8, -1, 8)
        return by_column.transpose(0, 1, 3, 2).reshape(len(groups), self.rows, -1)


class _Registers:
    """A in registers: 2 c + r has rows g + 8 r of a warp's sixteen, columns from t + 4 c on."""

    def __init__(self, m: Machine, operand: Vector, kind: str) -> None:
        self.kind = kind
        self.registers = [m.read(o, "b32").reshape(-1, GROUP, 8, 4) for o in operand.parts]

    def place(self, groups: np.ndarray) -> np.ndarray:
        return np.empty((len(groups), 0), np.int64)

    def numbers(self, place: np.ndarray, groups: np.ndarray) -> np.ndarray:
        words = np.stack([r[groups] for r in self.registers])  # (2 c + r, group, w, g, t)
        words = words.reshape(2, 2, *words.shape[1:]).transpose(2, 3, 1, 4, 0, 5)
        return _numbers(np.ascontiguousarray(words), self.kind).reshape(len(groups), 64, -1)


def _numbers(words: np.ndarray, kind: str) -> np.ndarray:
    """The float32 numbers in 32-bit words, those of a word side by side."""
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)
    if kind == "f16":
        return words.view(np.float16).astype(np.float32)
    return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


# ---- instructions ------------------------------------------------------------------------------


@opcode("wgmma", family="half")
@opcode("wgmma")
def _warp_group(m: Machine, i: Instruction) -> Step:
    if m.threads % THREADS:
        raise unsupported(i)
    flight, what, form = m.flight, i.modifiers[0], i.modifiers[1:3]
    if form != ("sync", "aligned"):
        raise unsupported(i)
    if what == "mma_async":
        return _multiply(m, i)
    if what == "wait_group":
        return lambda where: flight.wait(where, i.operands[0].value)
    if what not in ("fence", "commit_group"):
        raise unsupported(i)
    return flight.fence if what == "fence" else flight.commit


def _multiply(m: Machine, i: Instruction) -> Step:
    """D = scale_d D + scale_a A scale_b B, D in registers."""
    shape, *kinds = i.modifiers[3:]
    found, kind = _SHAPE.fullmatch(shape), kinds[-1]
    d, a, b, scale_d, *flags = i.operands
    signs, transposed = [o.value for o in flags[:2]], [bool(o.value) for o in flags[2:]]
    columns = int(found[1]) if found else 0
    in_registers = isinstance(a, Vector)
    wanted = 0 if kind == "tf32" else 1 if in_registers else 2  # flags: imm-trans-a, imm-trans-b
    if (
        kinds != ["f32", kind, kind]
        or int(found[2]) != _DEPTH.get(kind)
        or len(transposed) != wanted
        or len(parts_of(d)) != columns // 2
        or any(sign not in (1, -1) for sign in signs)
    ):
        raise unsupported(i)
    transpose_a, transpose_b = (transposed[:1] + transposed[-1:]) or (False, False)
    if in_registers:
        left: _Registers | _Shared = _Registers(m, a, kind)
    else:
        left = _Shared(m, a, 64, kind, transpose_a)
    right = _Shared(m, b, columns, kind, transpose_b)
    keep = np.broadcast_to(m.read(scale_d, "pred"), m.size).reshape(-1, THREADS)
    sums = [m.write(o, "f32") for o in parts_of(d)]
    flight = m.flight
    d_rows = flight.indices(list(parts_of(d)))
    a_rows = flight.indices(registers_of(a)) if in_registers else np.empty(0, np.int64)
    # (register 4 c + 2 r + j, group, w, g, t) <-> (group, w, r, g, c, t, j): a matrix
    parts = columns // 8, 2, 2

    def step(where: object) -> None:
        groups = flight.groups(where)
        places = [factor.place(groups) for factor in (left, right)]
        numbers = zip((left, right), places, strict=True)
        x, y = (f.numbers(p, groups).astype(np.float64) for f, p in numbers)
        product = np.matmul(x, y.transpose(0, 2, 1)) * (signs[0] * signs[1])
        number = flight.commits[groups]
        flight.begin(
            _Multiply(shape + kind, d_rows, a_rows, groups, number, np.concatenate(places, 1))
        )
        before = np.stack(sums).reshape(*parts, -1, GROUP, 8, 4)[:, :, :, groups]
        product = product.reshape(len(groups), GROUP, 2, 8, columns // 8, 4, 2)
        product = product.transpose(4, 2, 6, 0, 1, 3, 5)
        adding = keep[groups].reshape(-1, GROUP, 8, 4)
        total = product + np.where(adding, before, np.float32(0))
        total = (cut(total) if m.toward_zero else total.astype(np.float32)).reshape(
            columns // 2, len(groups), THREADS
        )
        for to, value in zip(sums, total, strict=True):
            to.reshape(-1, THREADS)[groups] = value

    return step
