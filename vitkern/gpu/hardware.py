"""What a multiprocessor of each architecture holds and does per clock, each number with its source.

Limits decide whether a kernel starts and how many blocks share a multiprocessor. Rates decide the
static ceiling of machine_code.py: they are peaks that the vendor publishes, so a share computed
from them is an upper bound and no measurement.

Sources
  [limits]   CUDA C++ Programming Guide, Technical Specifications per Compute Capability.
  [rates]    CUDA C++ Best Practices Guide 13, Throughput of Native Arithmetic Instructions
             (results per clock and multiprocessor).
  [pipes]    Nsight Compute, Kernel Profiling Guide, Pipelines: which unit executes what. FMA units
             do FP32 and IMAD (IMAD in half of them from 8.6 on), the ALU does logic, integer adds,
             comparisons, min/max and packed FP32-to-16-bit conversion, the XU special functions and
             the other conversions.
  [A100]     NVIDIA A100 architecture whitepaper: 312 TFLOPS (bf16, fp32 sums) / 108 SM / 1.41 GHz.
  [GA102]    NVIDIA Ampere GA102 whitepaper: A40, 149.7 TFLOPS / 84 SM / 1.74 GHz. GeForce boards
             add in fp32 at half of this rate.
  [AD102]    NVIDIA Ada whitepaper: L40S, 362 TFLOPS / 142 SM / 2.52 GHz. GeForce: half.
  [H100]     NVIDIA H100 architecture whitepaper: 989.4 TFLOPS / 132 SM / 1.83 GHz, with wgmma.
  [mma]      Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture
             (arXiv 2402.13499): on Hopper mma.sync reaches 62.9 % of the tensor cores' peak.
  [B200]     NVIDIA Blackwell architecture brief: 2250 TFLOPS / 148 SM / 1.85 GHz, with tcgen05.
             mma.sync has no published rate there: Hopper's is taken.
  [GB202]    NVIDIA RTX Blackwell whitepaper: RTX PRO 6000, 503.8 TFLOPS / 188 SM / 2.62 GHz.
             GeForce: half.
  [CDNA3]    AMD CDNA 3 whitepaper and ISA guide: MI300X, 1307 TFLOPS (bf16) and 163 TFLOPS (fp32)
             / 304 CU / 2.1 GHz; 512 registers a lane, 8 waves a SIMD, 64 KiB of LDS; L2 reads of
             2 KiB a clock for each 38 CU.
  [L2]       A100 architecture whitepaper: 5120 bytes per clock. No vendor's number for the others:
             H100 is given as many, B200 twice that (two dies); 4090s are measured at about 5 TB/s
             (2 KiB per clock), which is taken for sm_86, sm_89 and sm_120.
Where boards of an architecture differ, the fastest is taken: on a slower one the tensor cores take
longer, so that everything else limits them less.
"""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """Limits and rates of one multiprocessor (a compute unit on AMD)."""

    name: str  # the board that the rates are of
    warps: int  # resident at once  [limits]
    blocks: int  # resident at once  [limits]
    shared: int  # bytes for all blocks  [limits]
    shared_block: int  # bytes that one block can opt in to  [limits]
    tensor: int  # flop per clock with 16-bit factors and fp32 sums; tf32 half of it
    mma_sync: int  # the same by mma.sync alone, where a newer instruction is faster
    fma: int  # fp32 multiply-adds per clock  [rates]
    reserved: int = 1024  # bytes of shared memory that the system takes of each block  [limits]
    registers: int = 65536  # of 32 bits  [limits]
    registers_thread: int = 255  # [limits]
    warp_size: int = 32
    imad: int = 64  # 32-bit integer multiply-adds per clock  [rates]
    alu: int = 64  # logic, compare, select, packed conversion per clock  [rates] [pipes]
    xu: int = 16  # exp2, rcp, rsqrt, unpacked conversions per clock  [rates] [pipes]
    shared_bytes: int = 128  # per clock: 32 banks of 4 bytes; L1's data path too  [limits]
    issue: int = 4  # warp instructions per clock: one per scheduler  [limits]
    tensor_columns: int = 512  # of tensor memory (tcgen05)
    processors: int = 1  # of the board
    l2: float = 64.0  # bytes per clock from L2 for one processor, when all of them read  [L2]


_KIB = 1024
_AMD = {"reserved": 0, "registers": 512 * 64 * 4, "registers_thread": 512, "warp_size": 64}
CHIPS = {
    "sm_80": Chip(
        "A100", 64, 32, 164 * _KIB, 163 * _KIB, 2048, 2048, 64, processors=108, l2=5120 / 108
    ),  # [A100]
    "sm_86": Chip(
        "A40", 48, 16, 100 * _KIB, 99 * _KIB, 1024, 1024, 128, processors=84, l2=2048 / 84
    ),  # [GA102]
    "sm_89": Chip(
        "L40S", 48, 24, 100 * _KIB, 99 * _KIB, 1024, 1024, 128, processors=142, l2=2048 / 128
    ),  # [AD102]
    "sm_90": Chip(
        "H100", 64, 32, 228 * _KIB, 227 * _KIB, 4096, 2576, 128, processors=132, l2=5120 / 132
    ),  # [H100] [mma]
    "sm_100": Chip(
        "B200", 64, 32, 228 * _KIB, 227 * _KIB, 8192, 2576, 128, processors=148, l2=10240 / 148
    ),  # [B200] [mma]
    "sm_120": Chip(
        "RTX PRO 6000",
        48,
        24,
        100 * _KIB,
        99 * _KIB,
        1024,
        1024,
        128,
        processors=188,
        l2=2048 / 128,
    ),  # [GB202]
    "gfx942": Chip(
        "MI300X",
        32,
        32,
        64 * _KIB,
        64 * _KIB,
        2048,
        2048,
        128,
        processors=304,
        l2=2048 / 38,
        **_AMD,
    ),  # [CDNA3]
}


def flops(arch: str, bits: int) -> float:
    """Of GEMMs, per clock and multiprocessor, by the operands' bits: 16, 19 (tf32) or 32.

    fp32 is three tf32 matmuls on NVIDIA (configs.dot_precision), AMD's matrix cores have their own.
    """
    slower = {16: 1, 19: 2, 32: 6 if arch.startswith("sm_") else 8}
    return CHIPS[arch].tensor / slower[bits]


class Occupancy(NamedTuple):
    """How many blocks share a multiprocessor, and what keeps the next one out."""

    blocks: int
    limiter: str  # "registers", "shared memory", "warps", "blocks" or "tensor memory"
    share: float  # of the warps that it could hold


def occupancy(
    arch: str, registers: int, shared: int, warps: int, tensor_columns: int = 0
) -> Occupancy:
    """CUDA's occupancy rules: registers in units of 256 a warp, shared memory of 128 bytes.

    A scheduler (a SIMD on AMD) has a quarter of the registers and of the warps. AMD allocates
    registers in units of 8 a lane, which is 512 a wave.
    """
    chip = CHIPS[arch]
    unit = 256 if chip.warp_size == 32 else 512
    per_warp = max(unit, _up(registers * chip.warp_size, unit))
    per_block = _up(shared, 128) + chip.reserved
    limits = {
        "registers": chip.registers // 4 // per_warp * 4 // warps,
        "shared memory": chip.shared // per_block if per_block else chip.blocks,
        "warps": chip.warps // warps,
        "blocks": chip.blocks,
    }
    if tensor_columns:
        limits["tensor memory"] = chip.tensor_columns // tensor_columns
    if shared > chip.shared_block:
        limits["shared memory"] = 0
    if registers > chip.registers_thread:
        limits["registers"] = 0
    limiter = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limiter], limiter, limits[limiter] * warps / chip.warps)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
