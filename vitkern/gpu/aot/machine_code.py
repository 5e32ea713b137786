"""What a compiled kernel is like, read from its machine code: registers, spills, mix, ceiling.

`analyse` gives a `Report`, `gates` the rules that it breaks. No GPU is asked: a report says what
the instructions allow at best, never what a chip does.

The static ceiling is the share of the tensor cores' peak that the hot loop could reach if every
unit of a multiprocessor ran at its full rate, nothing waited and all operands were at hand in L1 or
L2. For one trip of one block each unit takes its clocks (hardware.py has the rates); the slowest
unit is the bound, and the ceiling is the clocks of the matmuls at peak rate over the clocks of the
bound. Latency, bank conflicts, tensor memory's ports, launch and tail waves, L2 and DRAM are left
out: they only lower it. Both sides of a branch in the loop are counted. AMD has no ceiling yet.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..hardware import CHIPS, Occupancy, occupancy
from . import disassembly, triton_ir
from .disassembly import Block, Instruction
from .excuses import EXCUSED, excuses
from .triton_ir import Asked

# ---- what an instruction costs -------------------------------------------------------------------

_FMA = {"FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2", "FFMA2", "FADD2", "FMUL2"}
_XU = {"MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV", "I2I"}
_ALU = set(
    "FMNMX FMNMX3 FSEL FSETP FSET FCHK ISETP LOP3 PLOP3 IADD3 IADD IABS LEA SEL PRMT SHF SHL SHR"
    " IMNMX VIADD VIMNMX VIADDMNMX SGXT BMSK F2FP I2FP MOV P2R R2P HSET2 HSETP2 HMNMX2 VABSDIFF"
    " LOP PSETP".split()
)
_TENSOR = ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "QMMA", "QGMMA", "UTCQMMA", "OMMA")
_SPILLS = ("LDL", "STL", "scratch_load", "scratch_store")
_MMA_SHAPE = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "1684": 16 * 8 * 4, "16832": 16 * 8 * 32}


class Matmul(NamedTuple):
    """What one tensor instruction multiplies, seen from one warp."""

    flops: float
    narrow: bool  # 16-bit factors; else tf32, at half the rate
    sync: bool  # mma.sync, which newer tensor cores run below their peak
    shared: float  # bytes of its factors that it reads in shared memory


def matmul_of(one: Instruction, warps: int) -> Matmul | None:
    """The matmul of a tensor instruction; None for any other one."""
    narrow = ".TF32" not in one.opcode
    if found := re.match(r"HMMA\.(\d+)\.", one.opcode):
        return Matmul(2 * _MMA_SHAPE.get(found[1], 0), narrow, True, 0)
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", one.opcode):  # four warps together
        m, n, k = map(int, found.groups())
        rows = n + (m if re.match(r"\w+, gdesc", one.operands) else 0)  # 32 bytes of each
        return Matmul(2 * m * n * k / 4, narrow, False, rows * 32 / 4)
    if one.name == "UTCHMMA":  # one thread for the whole block
        found = re.search(r"idesc\[(0x\w+)\]", one.operands)
        if not found:
            return Matmul(0, narrow, False, 0)
        word = int(found[1], 16)  # PTX ISA, tcgen05's instruction descriptor
        m, n, kind = (word >> 24 & 31) * 16, (word >> 17 & 63) * 8, word >> 7 & 7
        rows = n + (m if one.operands.startswith("gdesc") else 0)
        k = 8 if kind == 2 else 16
        return Matmul(2 * m * n * k / warps, kind != 2, False, rows * 32 / warps)
    return None


def _width(opcode: str) -> int:
    """Bytes per thread of a memory instruction."""
    if found := re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", opcode):
        return int(found[1]) // 8
    return 4


def shared_bytes(one: Instruction) -> int:
    """Bytes of a warp that pass the shared memory's port, which is L1's too; at least a line."""
    if one.name in ("LDSM", "STSM"):
        return 128 * int(one.opcode[-1]) if one.opcode[-2:] in (".2", ".4") else 128
    if one.name in ("LDS", "STS", "LDG", "STG", "LDGSTS", "LD", "ST", "LDL", "STL"):
        return max(4, _width(one.opcode)) * 32
    return 128 if one.name in ("SHFL", "ATOMS", "ATOMG", "RED") else 0


# ---- the report ----------------------------------------------------------------------------------


class Accesses(NamedTuple):
    """Bytes of global memory per block, by accesses of at least 128 bits and by narrower ones."""

    wide: int
    narrow: int

    @classmethod
    def of(cls, widths: Iterable[int], threads: int) -> Accesses:
        """From the accesses' bytes per thread."""
        widths = list(widths)
        wide = sum(width for width in widths if width >= 16)
        return cls(wide * threads, (sum(widths) - wide) * threads)


@dataclasses.dataclass(frozen=True)
class Report:
    """One kernel on one architecture."""

    kernel: str
    arch: str
    registers: int  # per thread; on AMD vector and accumulation registers together
    stack: int  # bytes per thread in local memory
    spills: tuple[int, int]  # instructions: in the hot loops, in all
    shared: int  # bytes per block
    occupancy: Occupancy
    asked: Asked  # what the source wants
    tensor: tuple[int, int]  # tensor instructions: in the hot loop, in all
    mix: Counter  # instructions of the hot loop by name
    loads: Accesses  # in the hot loop; in all, if it multiplies nothing
    stores: Accesses  # in all
    flops: float = 0.0  # per trip of the hot loop and block
    clocks: dict[str, float] = dataclasses.field(default_factory=dict)  # per trip, by unit
    ceiling: float | None = None  # share of the tensor cores' peak; None without a model
    bound: str = ""  # the unit that limits it
    feed: float = 0.0  # bytes per clock from L2 that the ceiling needs


def analyse(
    kernel: str,
    arch: str,
    code: bytes | str,
    warps: int,
    shared: int,
    ttir: str = "",
    columns: int = 0,
    listing: str | None = None,
) -> Report:
    """Report on a cubin, or on the assembly text of an AMD kernel; `ttir` tells its matmuls.

    `listing` is the cubin's SASS, where it was disassembled together with others.
    """
    wanted = triton_ir.asked(ttir, arch, warps * CHIPS[arch].warp_size)
    if isinstance(code, str):
        return _analyse_gcn(kernel, arch, code, warps, shared, wanted)
    used = disassembly.resources(code)
    if listing is None:
        (listing,) = disassembly.sass([code], arch)
    blocks = _with_shapes(disassembly.parse_sass(listing))
    everything = [one for block in blocks for one in block.code if not one.never]
    hot, trips = _hot(blocks, lambda one: one.name in _TENSOR, _global_bytes)
    matmuls = [p for one in hot if (p := matmul_of(one, warps))]
    clocks = _clocks(arch, hot, matmuls, warps)
    shapes = bool(matmuls) and all(p.flops for p in matmuls)  # of all are known
    flops = sum(p.flops for p in matmuls) * warps if shapes else 0.0
    ideal = sum(p.flops / (1 if p.narrow else 0.5) for p in matmuls) * warps / CHIPS[arch].tensor
    bound = max(clocks, key=lambda unit: clocks[unit])
    reading = hot if matmuls else everything
    loads = _accesses(reading, ("LDG", "LDGSTS", "LD"), warps)
    return Report(
        kernel, arch, used["REG"], used["STACK"], _spills(trips, everything), shared,
        occupancy(arch, used["REG"], shared, warps, columns), wanted,
        (_count(hot, _TENSOR), _count(everything, _TENSOR)),
        Counter(one.name for one in hot), loads,
        _accesses(everything, ("STG", "ST"), warps),
        flops, clocks, ideal / clocks[bound] if flops else None, bound if flops else "",
        sum(loads) / clocks[bound] if flops else 0.0,
    )  # fmt: skip


def _hot(
    blocks: list[Block],
    is_tensor: Callable[[Instruction], bool],
    weight: Callable[[Instruction], int],
) -> tuple[list[Instruction], list[list[Instruction]]]:
    """(the hot loop's instructions, those of every loop that could be it).

    Loops that hold tensor instructions and no smaller loop that does; without any, loops that hold
    no other loop. The hot one has the most matmuls (or global bytes). A kernel without loops is
    hot as a whole.
    """
    bodies = disassembly.loops(blocks)
    codes = {b: [one for i in sorted(b) for one in blocks[i].code if not one.never] for b in bodies}
    work = [b for b in bodies if any(map(is_tensor, codes[b]))]
    if not work and not any(is_tensor(one) for block in blocks for one in block.code):
        work = [b for b in bodies if sum(map(weight, codes[b]))]
    inner = [codes[b] for b in work if not any(other < b for other in work)]
    if not inner:
        everything = [one for block in blocks for one in block.code if not one.never]
        return everything, [everything]
    return max(inner, key=lambda code: (_count_if(code, is_tensor), sum(map(weight, code)))), inner


def _clocks(
    arch: str, hot: Sequence[Instruction], matmuls: Sequence[Matmul], warps: int
) -> dict[str, float]:
    """Clocks of a multiprocessor for one trip of one block, by unit."""
    chip, names = CHIPS[arch], Counter(one.name for one in hot)
    lanes = 32 * warps
    fma = sum(n * (2 if name.endswith("2") and name[0] == "F" else 1)
              for name, n in names.items() if name in _FMA)  # fmt: skip
    imad = sum(n for name, n in names.items() if name.startswith("IMAD") or name == "IDP")
    tensor = sum(
        p.flops / (1 if p.narrow else 0.5) / (chip.mma_sync if p.sync else chip.tensor)
        for p in matmuls
    )
    port = sum(map(shared_bytes, hot)) + sum(p.shared for p in matmuls)
    return {
        "tensor": tensor * warps,
        "fp32": (fma + imad) * lanes / chip.fma,
        "imad": imad * lanes / chip.imad,
        "alu": sum(n for name, n in names.items() if name in _ALU) * lanes / chip.alu,
        "special": sum(n for name, n in names.items() if name in _XU) * lanes / chip.xu,
        "shared memory": port * warps / chip.shared_bytes,
        "issue": len(hot) * warps / chip.issue,
    }


def _with_shapes(blocks: list[Block]) -> list[Block]:
    """The same with tcgen05's shapes written where the register that holds them is named.

    A shape is a constant, set by the last UMOV to that register in the order of the listing.
    """
    known: dict[str, str] = {}
    changed = []
    for block in blocks:
        code = []
        for one in block.code:
            if one.name == "UMOV":
                register, _, value = one.operands.partition(", ")
                known[register] = value
            elif one.name == "UTCHMMA":
                shape = re.search(r"idesc\[(UR\d+)\]", one.operands)
                if shape and known.get(shape[1], "").startswith("0x"):
                    named = one.operands.replace(shape[0], f"idesc[{known[shape[1]]}]")
                    one = one._replace(operands=named)
            code.append(one)
        changed.append(block._replace(code=tuple(code)))
    return changed


def _spills(trips: list[list[Instruction]], everything: list[Instruction]) -> tuple[int, int]:
    return sum(_count(code, _SPILLS) for code in trips), _count(everything, _SPILLS)


def _count(code: Sequence[Instruction], names: tuple[str, ...]) -> int:
    return _count_if(code, lambda one: one.name.startswith(names))


def _count_if(code: Iterable[Instruction], test: Callable[[Instruction], bool]) -> int:
    return sum(1 for one in code if test(one))


def _global_bytes(one: Instruction) -> int:
    return _width(one.opcode) if one.name in ("LDG", "STG", "LDGSTS", "LD", "ST") else 0


def _accesses(code: Sequence[Instruction], names: tuple[str, ...], warps: int) -> Accesses:
    return Accesses.of((_width(one.opcode) for one in code if one.name in names), 32 * warps)


# ---- AMD -----------------------------------------------------------------------------------------

_DWORDS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2}


def _analyse_gcn(
    kernel: str, arch: str, text: str, warps: int, shared: int, wanted: Asked
) -> Report:
    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        if found is None:
            raise ValueError(f"the assembly of {kernel} has no .{name}")
        return int(found[1])

    def is_tensor(one: Instruction) -> bool:
        return one.opcode.startswith("v_mfma")

    def weight(one: Instruction) -> int:
        return _gcn_width(one.opcode) if one.opcode.startswith(("global_", "buffer_")) else 0

    blocks = disassembly.parse_gcn(text)
    everything = [one for block in blocks for one in block.code]
    hot, trips = _hot(blocks, is_tensor, weight)
    # .vgpr_count holds both kinds: CDNA 3 has one file for them
    registers, stack = field("vgpr_count"), field("private_segment_fixed_size")
    return Report(
        kernel, arch, registers, stack, _spills(trips, everything), shared,
        occupancy(arch, registers, shared, warps), wanted,
        (_count_if(hot, is_tensor), _count_if(everything, is_tensor)),
        Counter(one.opcode for one in hot),
        _gcn_accesses(hot if wanted.dots else everything, "load", warps),
        _gcn_accesses(everything, "store", warps),
    )  # fmt: skip


def _gcn_width(opcode: str) -> int:
    return next((w for name, w in _DWORDS.items() if opcode.endswith(name)), 1)


def _gcn_accesses(code: Sequence[Instruction], kind: str, warps: int) -> Accesses:
    names = (f"global_{kind}", f"buffer_{kind}")
    widths = (_gcn_width(one.opcode) for one in code if one.opcode.startswith(names))
    return Accesses.of(widths, 64 * warps)


# ---- gates ---------------------------------------------------------------------------------------


def gates(report: Report, promised: bool = True, label: str = "") -> list[str]:
    """The rules that a kernel breaks, each as "rule: what is wrong"; what is excused aside.

    A kernel without matmuls (LayerNorm, sums) has no gate on tensor instructions, and one whose
    sizes or pointers are not `promised` to be multiples of 16 none on the width of its accesses.
    AMD's stores leave the matrix units' layout as it is, 64 bits wide: Triton's choice there.
    """
    chip, wanted = CHIPS[report.arch], report.asked
    nvidia = report.arch.startswith("sm_")
    found = {
        "spills": (report.spills[0], f"{report.spills[0]} instructions in the hot loop"),
        "tensor": (
            wanted.dots and not report.tensor[0],
            f"{wanted.dots} matmuls, {report.tensor[1]} tensor instructions, 0 in the hot loop",
        ),
        "loads": (
            promised and report.loads.wide < wanted.loads,
            f"{report.loads.wide} of {wanted.loads} bytes a trip are 128 bits wide",
        ),
        "stores": (
            promised and nvidia and report.stores.wide < wanted.stores,
            f"{report.stores.wide} of {wanted.stores} bytes are 128 bits wide",
        ),
        "shared memory": (
            report.shared > chip.shared_block,
            f"{report.shared} bytes a block, {chip.shared_block} are allowed",
        ),
        "registers": (
            report.registers > chip.registers_thread,
            f"{report.registers} a thread, {chip.registers_thread} are allowed",
        ),
        "occupancy": (
            not report.occupancy.blocks,
            f"no block fits a multiprocessor ({report.occupancy.limiter})",
        ),
    }
    named = f"{label or report.kernel} on {report.arch}"
    complaints = []
    for rule, (broken, what) in found.items():
        known = excuses(named, rule, EXCUSED) if broken else []
        if known and rule == "spills":
            most = max(one.most for one in known)
            broken, what = report.spills[0] > most, f"{what}, {most} are excused"
            known = []
        if broken and not known:
            complaints.append(f"{rule}: {what}")
    return complaints
