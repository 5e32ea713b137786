"""The machine: registers as arrays over threads, and groups of threads that walk the program.

A register is a row of numbers, one per thread of all blocks that run together (a wave), so that one
numpy call executes an instruction for all of them. Threads that agree on where they are form a
group, and the group that is furthest behind runs first: branches that rejoin do so here too, before
anything is executed twice. A barrier holds a block's threads until all have come.

Instructions are decoded once into closures `step(where)`: `where` is True for all threads, else the
mask of those that execute. Other threads' registers keep their values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from .parser import SINK, Immediate, Instruction, Name, Program, PtxError, Register

WARP = 32
LANES = 2048  # threads in a wave: enough to hide the cost of a numpy call, small enough for caches
REGISTER_BYTES = 64 << 20  # of a wave, at most (but one block at least)
POISON = 0x7FC0DEAD  # in registers before they are written: a NaN that is easy to recognise
ENDLESS = 2_000_000  # basic blocks after which a wave counts as an endless loop

Step = Callable[[object], object]
Builder = Callable[["Machine", Instruction], Step]
DTYPES = {
    f"{letter}{bits}": np.dtype(f"{code}{bits // 8}")
    for letter, code in (("b", "u"), ("u", "u"), ("s", "i"))
    for bits in (8, 16, 32, 64)
} | {
    "pred": np.dtype(bool),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # numpy has no bf16: its bits
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f32x2": np.dtype(np.uint64),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "tf32": np.dtype(np.uint32),
}
_FAMILIES = {"f32": "float", "f32x2": "float", "f64": "float", "pred": "pred"}
_FAMILIES |= dict.fromkeys(("f16", "bf16", "f16x2", "bf16x2"), "half")
_FAMILIES |= {k: "integer" for k in DTYPES if k[0] in "bus" and k[1:].isdigit()}
_BUILDERS: dict[tuple[str, str], Builder] = {}


def opcode(*names: str, family: str = "") -> Callable[[Builder], Builder]:
    """Registers the builder of some opcodes, for one family of types or ("") for all others."""

    def register(builder: Builder) -> Builder:
        for name in names:
            _BUILDERS[name, family] = builder
        return builder

    return register


def builder_of(i: Instruction) -> Builder:
    family = _FAMILIES.get(i.modifiers[-1], "") if i.modifiers else ""
    found = _BUILDERS.get((i.op, family)) or _BUILDERS.get((i.op, ""))
    if found is None:
        raise PtxError(f"unknown instruction, {i}")
    return found


def unsupported(i: Instruction) -> PtxError:
    return PtxError(f"unknown form of {i.op}, {i}")


# What kernels and what they execute are counted by, without waits and fences; TMA: bulk copies.
CLASSES: dict[str, Callable[[Instruction], bool]] = {
    "mma": lambda i: i.op == "mma",
    "wgmma": lambda i: i.op == "wgmma" and "mma_async" in i.modifiers,
    "ldmatrix": lambda i: i.op == "ldmatrix",
    "stmatrix": lambda i: i.op == "stmatrix",
    "cp.async": lambda i: i.op == "cp" and {"shared", "bulk"} & {*i.modifiers} == {"shared"},
    "TMA": lambda i: i.op == "cp" and "bulk" in i.modifiers,
}


class Machine:
    """A program with its grid, ready to run; what its instructions share."""

    def __init__(
        self, program: Program, grid: tuple[int, int, int], threads: int, params: dict[str, bytes]
    ) -> None:
        if program.threads and program.threads != threads:
            raise PtxError(f"{program.entry} wants {program.threads} threads, not {threads}")
        if threads % WARP or not 0 < threads <= 1024:
            raise PtxError(f"{threads} threads a block: give whole warps, at most 1024 threads")
        self.program, self.grid, self.threads, self.params = program, grid, threads, params
        widths = {n: 1 if k == "pred" else DTYPES[k].itemsize for n, k in program.registers.items()}
        total = grid[0] * grid[1] * grid[2]
        bound = min(LANES // threads, REGISTER_BYTES // (threads * max(1, sum(widths.values()))))
        self.blocks = max(1, min(bound, total))  # of a wave
        self.size = self.blocks * threads
        self.first = 0  # block of the wave that runs
        self.block_of = np.repeat(np.arange(self.blocks), threads)  # thread -> block of the wave
        tid = np.tile(np.arange(threads, dtype=np.uint32), self.blocks)
        self.warp_of = (tid // WARP).astype(np.uint32)
        self.stamp = np.zeros(self.size, np.uint32)  # barriers passed * 64 + warp: see shared.py
        self._specials = {"%tid.x": tid, "%laneid": tid % WARP, "%warpid": self.warp_of}
        for axis, letter in enumerate("xyz"):
            self._specials[f"%ctaid.{letter}"] = np.zeros(self.size, np.uint32)
            self._specials[f"%nctaid.{letter}"] = np.full(1, grid[axis], np.uint32)
            self._specials[f"%ntid.{letter}"] = np.full(1, 1 if axis else threads, np.uint32)
            self._specials.setdefault(f"%tid.{letter}", np.zeros(1, np.uint32))
        self._pools, self._rows = {}, {}
        for width in sorted(set(widths.values())):
            names = [n for n, w in widths.items() if w == width]
            kind = "pred" if width == 1 else f"u{8 * width}"
            self._pools[width] = np.empty((len(names), self.size), DTYPES[kind])
            self._rows.update(zip(names, self._pools[width], strict=True))
        self.resets: list[Callable[[], None]] = []  # of what instructions keep between waves
        self.addresses: dict[str, int] = {}  # shared variable -> its address
        self.globals = self.shared = None  # memory.py, shared.py
        self.flight = None  # warpgroup.py, of programs with wgmma
        self.executed: Counter[str] = Counter()  # instructions of CLASSES, once for each warp
        self.toward_zero = False  # how a matrix product rounds: see matrix.py

    # ---- operands -----------------------------------------------------------------------------

    def read(self, operand: object, kind: str) -> np.ndarray:
        """(size,) or (1,): the operand's low bits as `kind`; an alias, good for the whole run."""
        dtype = DTYPES[kind]
        if isinstance(operand, Register):
            row = self._rows[operand.name]
            if row.itemsize == dtype.itemsize:
                return row.view(dtype)
            if row.itemsize < dtype.itemsize:
                raise PtxError(f"{operand.name} is narrower than .{kind}")
            return row.view(dtype)[:: row.itemsize // dtype.itemsize]
        if isinstance(operand, Immediate):
            return _constant(operand, dtype)
        if isinstance(operand, Name) and operand.name in self._specials:
            return self._specials[operand.name].view(dtype)  # 32 bits: others raise
        if isinstance(operand, Name) and operand.name in self.addresses:
            return np.full(1, self.addresses[operand.name], dtype)
        raise PtxError(f"cannot read {operand}")

    def write(self, operand: object, kind: str) -> np.ndarray:
        """(size,): where to put a result of exactly this width."""
        if operand == SINK:
            return np.empty(self.size, DTYPES[kind])
        if not isinstance(operand, Register):
            raise PtxError(f"cannot write {operand}")
        row = self._rows[operand.name]
        if row.itemsize != DTYPES[kind].itemsize:
            raise PtxError(f"{operand.name} is not as wide as .{kind}")
        return row.view(DTYPES[kind])

    def write_wide(self, operand: object, kind: str) -> np.ndarray:
        """As `write`, but the register may be wider: signed kinds extend by sign, others by 0."""
        if operand == SINK or kind in ("f32", "f64"):
            return self.write(operand, kind)
        return self._rows[operand.name].view(
            f"{'i' if kind[0] == 's' else 'u'}{self._rows[operand.name].itemsize}"
        )

    # ---- complaints ---------------------------------------------------------------------------

    def fail(self, lane: int, message: str, kind: type[PtxError] = PtxError) -> None:
        block = tuple(int(self._specials[f"%ctaid.{c}"][lane]) for c in "xyz")
        raise kind(f"thread {int(lane) % self.threads} of block {block}: {message}")

    # ---- the walk -----------------------------------------------------------------------------

    def run(self) -> None:
        blocks = list(_basic_blocks(self))
        total = self.grid[0] * self.grid[1] * self.grid[2]
        with np.errstate(all="ignore"):
            for first in range(0, total, self.blocks):
                self._wave(blocks, first, min(self.blocks, total - first))

    def _wave(self, blocks: list[_Block], first: int, count: int) -> None:
        for width, pool in self._pools.items():
            pool.fill(False if width == 1 else POISON & (256**width - 1))
        self.first = first
        index = first + self.block_of
        self._specials["%ctaid.x"][:] = index % self.grid[0]
        self._specials["%ctaid.y"][:] = index // self.grid[0] % self.grid[1]
        self._specials["%ctaid.z"][:] = index // (self.grid[0] * self.grid[1])
        self.stamp[:] = self.warp_of
        for reset in self.resets:
            reset()
        exists = self.block_of < count
        ready = {0: exists}  # index of a basic block -> who stands before it
        held: list[tuple[int, np.ndarray]] = []  # those at a barrier, by where they will go on
        for _ in range(ENDLESS):
            if not ready:
                break
            at = min(ready)
            mask = ready.pop(at)
            block = blocks[at]
            block.run(True if np.count_nonzero(mask) == self.size else mask)
            for target, leaving in block.leave(mask):
                if block.barrier:
                    held.append((target, leaving))
                else:
                    ready[target] = ready[target] | leaving if target in ready else leaving
            if block.barrier:
                held = self._release(held, ready, exists)
        else:
            raise PtxError(f"{self.program.entry} does not end")
        if held:
            self.fail(np.flatnonzero(held[0][1])[0], "waits at a barrier where others never come")

    def _release(self, held: list, ready: dict, exists: np.ndarray) -> list:
        """Lets those blocks go whose threads have all come to a barrier."""
        here = np.logical_or.reduce([mask for _, mask in held])
        full = (here | ~exists).reshape(self.blocks, self.threads).all(1)
        free = np.repeat(full, self.threads) & here
        if not free.any():
            return held
        self.stamp[free] += 64
        left = []
        for target, mask in held:
            go, stay = mask & free, mask & ~free
            if go.any():
                ready[target] = ready[target] | go if target in ready else go
            if stay.any():
                left.append((target, stay))
        return left


class _Block:
    """A basic block: steps without a branch, and how its threads leave it."""

    def __init__(self, machine: Machine, code: list[Instruction]) -> None:
        self.code = code
        self.last = code[-1] if _ends(code[-1]) else None
        self.barrier = bool(self.last) and self.last.op in ("bar", "barrier")
        body = code[:-1] if self.last else code
        self.steps = [_guarded(machine, i, _counted(machine, i)) for i in body]
        self.next = self.target = -1  # set by _basic_blocks
        self.condition = self.last and self.last.guard and machine.read(self.last.guard, "pred")

    def run(self, where: object) -> None:
        n = 0
        try:
            for n, step in enumerate(self.steps):  # noqa: B007
                step(where)
        except PtxError as error:
            raise type(error)(f"{error}\n  at {self.code[n]}") from None
        except Exception as error:
            raise PtxError(f"the emulator failed at {self.code[n]}") from error

    def leave(self, mask: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Where the threads of `mask` go; those not mentioned have ended."""
        if self.condition is None:
            if self.last is None or self.barrier:
                return [(self.next, mask)]
            return [(self.target, mask)] if self.last.op == "bra" else []
        going = mask & (~self.condition if self.last.negated else self.condition)
        staying = mask & ~going
        found = [(self.next, staying)] if staying.any() else []
        return [*found, (self.target, going)] if self.last.op == "bra" and going.any() else found


def _ends(i: Instruction) -> bool:
    """Whether a basic block ends with it; bar.warp concerns the threads of one warp only."""
    return i.op in ("bra", "ret", "exit", "bar", "barrier") and "warp" not in i.modifiers


def _basic_blocks(machine: Machine) -> Iterator[_Block]:
    program = machine.program
    code, labels = program.instructions, program.labels
    starts = {0, *(n + 1 for n, i in enumerate(code) if _ends(i))}
    for i in code:
        if i.op == "bra":
            starts.add(labels[i.operands[0].name])
        elif i.op in ("bar", "barrier") and _ends(i) and not _is_plain_barrier(i):
            raise unsupported(i)
    order = sorted(starts - {len(code)})
    place = {start: n for n, start in enumerate(order)}
    for n, start in enumerate(order):
        end = order[n + 1] if n + 1 < len(order) else len(code)
        block = _Block(machine, code[start:end])
        block.next = n + 1
        if block.last and block.last.op == "bra":
            block.target = place[labels[block.last.operands[0].name]]
        if end == len(code) and (block.last is None or block.last.guard or block.barrier):
            raise PtxError(f"{program.entry} runs past its end")
        yield block


def _is_plain_barrier(i: Instruction) -> bool:
    """For all threads of the block, and for all that come to it: bar.sync 0."""
    return (
        i.modifiers in (("sync",), ("sync", "aligned"), ("cta", "sync"), ("cta", "sync", "aligned"))
        and i.guard is None
        and i.operands == (Immediate(0),)
    )


def _watched(machine: Machine, i: Instruction) -> Step:
    """Its step; where registers can be in flight, one that complains about their use."""
    step = builder_of(i)(machine, i)
    return step if machine.flight is None else machine.flight.watch(i, step)


def _counted(machine: Machine, i: Instruction) -> Step:
    """Its step; of an instruction of CLASSES one that counts the warps that execute it."""
    step, kinds = _watched(machine, i), [name for name, has in CLASSES.items() if has(i)]
    if not kinds:
        return step
    executed, every = machine.executed, machine.size // WARP

    def counted(where: object) -> None:
        step(where)
        warps = every if where is True else int(where.reshape(-1, WARP).any(1).sum())
        for kind in kinds:
            executed[kind] += warps

    return counted


def _guarded(machine: Machine, i: Instruction, step: Step) -> Step:
    if i.guard is None:
        return step
    guard, negated = machine.read(i.guard, "pred"), i.negated

    def guarded(where: object) -> None:
        mask = ~guard if negated else guard
        mask = mask if where is True else mask & where
        count = np.count_nonzero(mask)
        if count:
            # A copy: the instruction may write its own guard.
            step(True if count == len(mask) else mask.copy())

    return guarded


def _constant(operand: Immediate, dtype: np.dtype) -> np.ndarray:
    """(1,): an immediate as an instruction of this type reads it."""
    value, width = operand.value, operand.width
    if width == 64 and dtype == np.float32:  # a double where a float is wanted is converted
        return np.array([value], np.uint64).view(np.float64).astype(np.float32)
    if dtype == np.bool_:
        return np.array([bool(value)])
    bits = value & (256**dtype.itemsize - 1)
    return np.array([bits], f"u{dtype.itemsize}").view(dtype)


def lanes_of(where: object) -> np.ndarray | slice:
    """An index of the threads that execute."""
    return slice(None) if where is True else np.flatnonzero(where)
