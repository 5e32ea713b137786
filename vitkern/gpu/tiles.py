"""Which tile of the launch table a GEMM gets: the one whose last wave ends first.

A tile that suits thousands of rows leaves most of a GPU idle when there are few: B/16's projection
of three images is 15 tiles of 128 x 256, for 132 processors. The choice is arithmetic over the
table's rows and the device's number of processors: nothing is timed, the same sizes always get the
same tile, and every tile is in the ahead-of-time build.

Results do not depend on the choice, so that a sample's do not depend on its batch: a kernel's tiles
have one step BK along K and one kind of tensor instruction on an architecture, so an element is the
same sum in the same order in each of them (tests/gpu/test_tiles.py).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from . import hardware
from .configs import Row

# What a GEMM multiplies, beside elements of 16 and of 32 bits: tiles of its own, by `Row.bits`.
TF32 = 19  # fp32 as tf32, which has so many bits
MIXED = 48  # 16 bits, of which the left operand is read as fp32 and cast on its way (autocast)

# ---- the tiles, the largest first ----------------------------------------------------------------

# `rate` is the row's static ceiling as docs/gpu_kernels.md has it (`make gpu-check` compares). AMD
# has no ceilings yet: gfx942 is given those of sm_80, whose shared memory and tensor cores have the
# same rates. wgmma and tcgen05 (sm_90, sm_100) want 64 rows, fewer would be mma.sync.
_HALF_RATE = ("sm_86", "sm_89", "sm_120")  # of sm_80's tensor cores: operands arrive in time


def _tile(
    BM: int, BN: int, num_warps: int, num_stages: int, why: str, bits: int = 16, **rates: int
) -> tuple[Row, ...]:
    """A row for each group of architectures, with its `rate` in percent.

    The first row of a shape is an architecture's own: one by name stands before its group's.
    """
    blocks = {"BM": BM, "BN": BN, "BK": 64 if bits in (16, MIXED) else 32, "GROUP": 8}
    return tuple(
        Row(
            blocks, num_warps, num_stages, why, _HALF_RATE if arch == "half_rate" else (arch,),
            (bits,), rate=rate / 100,
        )
        for arch, rate in rates.items()
    )  # fmt: skip


def _aligned(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """For sizes that are multiples of 16 alone: narrow loads take more registers."""
    return tuple(row._replace(upto={"odd": 0}) for row in rows)


_WIDE = "operands come from shared memory: 64 x 256 per instruction halves a 128-wide tile's reads"
_EIGHT = "no spills in the epilogue"
_HALVED = "half of the larger tile"
_FEW = "a few images: four times as many programs"
_ONE = "one image"
_WGMMA = "one image: wgmma has 64 rows"
_SPLIT = "three tf32 matmuls a step leave registers for 64 x 64 only"
_ROUNDED = "one matmul a step: half of 64 x 64's reads of L2 and of its roundings, which limit it"
_CAST = "fp32 rows take twice the shared memory"

_LARGE = (
    *_tile(128, 256, 8, 3, _WIDE, sm_90=100, sm_100=67),
    *_tile(128, 128, 8, 3, _EIGHT, sm_80=100, half_rate=100, gfx942=100),
)
_MIDDLE = (
    *_tile(128, 128, 8, 3, _HALVED, sm_90=80, sm_100=50),
    *_tile(64, 128, 4, 3, _HALVED, sm_80=89, half_rate=100, sm_90=67, sm_100=33, gfx942=89),
)
_FEW_ROWS = _tile(64, 64, 4, 4, _FEW, sm_80=67, half_rate=100, sm_90=50, sm_100=25, gfx942=67)
_ONE_IMAGE = (
    *_tile(32, 64, 4, 4, _ONE, sm_80=44, half_rate=89),
    *_tile(32, 64, 2, 4, "one image: two waves of 32 x 32", gfx942=44),
    *_tile(64, 32, 4, 4, _WGMMA, sm_90=33, sm_100=17),
)
_TF32 = (
    *_tile(128, 128, 8, 3, _ROUNDED, TF32, sm_80=66, half_rate=100, sm_90=57, sm_100=33),
    *_tile(64, 128, 4, 3, _HALVED, TF32, sm_80=64, half_rate=100, sm_90=40, sm_100=20),
    *_tile(64, 64, 4, 3, _FEW, TF32, sm_80=39, sm_120=94, half_rate=81, sm_90=33, sm_100=17),
    *_tile(32, 64, 4, 3, _ONE, TF32, sm_80=36, sm_120=88, half_rate=73),
    *_tile(64, 32, 4, 3, _WGMMA, TF32, sm_90=25, sm_100=12),
)
_FP32 = (
    *_tile(64, 64, 4, 3, _SPLIT, 32, sm_80=97, half_rate=100, sm_90=67, sm_100=33, gfx942=100),
    *_tile(32, 64, 4, 3, _ONE, 32, sm_80=80, half_rate=100, gfx942=100),
    *_tile(64, 32, 4, 3, _WGMMA, 32, sm_90=49, sm_100=26),  # 45 where A is normalised, else 54
)
_MIXED_LARGE = (
    *_tile(128, 256, 8, 3, _WIDE, MIXED, sm_90=80, sm_100=50),
    *_tile(128, 128, 8, 3, _EIGHT, MIXED, sm_80=62, half_rate=100),
    *_tile(128, 128, 8, 2, _CAST, MIXED, gfx942=62),
)
_MIXED_FEW = (
    *_tile(64, 64, 4, 4, _FEW, MIXED, sm_80=44, half_rate=89, sm_90=33, sm_100=17),
    *_tile(64, 64, 4, 3, _CAST, MIXED, gfx942=44),
)
_MIXED = (
    *_MIXED_LARGE,
    *_tile(128, 128, 8, 3, _HALVED, MIXED, sm_90=57, sm_100=33),
    *_tile(64, 128, 4, 3, _HALVED, MIXED, sm_80=57, half_rate=100, sm_90=50, sm_100=25),
    *_MIXED_FEW,
    *_tile(32, 64, 4, 4, _ONE, MIXED, sm_80=29, half_rate=57),
    *_tile(64, 32, 4, 4, _WGMMA, MIXED, sm_90=20, sm_100=10),
)

# A is normalised by fp32 lanes on its way, which limits small tiles.
_TWICE = "normalising A twice, once for each half of the columns, would fill its 64 fp32 lanes"
_NORMED = (
    *_tile(128, 256, 8, 3, _WIDE, sm_90=84, sm_100=47),
    *_aligned(_tile(128, 128, 4, 3, _TWICE, sm_80=93, gfx942=93)),  # 86 in fp16, 100 in bf16
    *_tile(128, 128, 8, 3, _EIGHT, half_rate=100),
    *_tile(64, 64, 4, 4, _FEW, sm_80=47, half_rate=100, sm_90=36, sm_100=15, gfx942=47),
    *_tile(128, 256, 8, 3, _WIDE, MIXED, sm_90=66, sm_100=33),
    *_tile(64, 128, 4, 3, _CAST, MIXED, sm_80=50, half_rate=100),
    *_tile(64, 128, 4, 2, _CAST, MIXED, gfx942=50),
    *_tile(64, 64, 4, 4, _FEW, MIXED, sm_80=35, half_rate=72, sm_90=25, sm_100=12),
    *_tile(64, 64, 4, 3, _CAST, MIXED, gfx942=35),
    *_tile(128, 128, 8, 3, _ROUNDED, TF32, sm_80=60, half_rate=100, sm_90=45, sm_100=25),
    *_tile(64, 64, 4, 3, _FEW, TF32, sm_80=42, half_rate=83, sm_90=28, sm_100=12),
    *_tile(32, 64, 4, 3, _ONE, TF32, sm_80=36, half_rate=71),
    *_tile(64, 32, 4, 3, _WGMMA, TF32, sm_90=20, sm_100=8),
)

# The rows of a gradient and of x are transposed on their way.
_SHARES = "instead of shares of the rows"
_TWO_STAGES = "a third stage costs instructions that the tensor cores need"
_TRANSPOSED = "64 x 64 per warp: transposed operands take the shared memory's whole rate"
_UNSPILT = "no spills with odd sizes"  # on sm_90 57 % of its peak; 128 x 256 with spills 25 %
_GATHERED = (
    *_aligned(_tile(128, 256, 8, 3, _WIDE, sm_90=100)),
    *_tile(128, 256, 8, 3, _WIDE, sm_100=67),
    *_aligned(_tile(128, 128, 4, 3, _TRANSPOSED, sm_80=100, gfx942=100)),
    *_tile(128, 128, 8, 3, _UNSPILT, sm_80=80, half_rate=100, sm_90=80, gfx942=80),
    *_aligned(_tile(64, 128, 4, 3, _SHARES, sm_80=80, half_rate=100, sm_90=67, sm_100=33,
                    gfx942=80)),
)  # fmt: skip
_REST = (*_FEW_ROWS, *_ONE_IMAGE, *_TF32, *_FP32, *_MIXED)
_ALL = (*_LARGE, *_MIDDLE, *_REST)
# Where K is odd (the 2730 hidden channels of EVA-02 L), 64 x 128 spills 87 to 134 instructions in
# the loop and 128 x 256 314 on sm_90: a ceiling of 22 %, where 128 x 128 has 36 %. On sm_100 they
# spill 131 to 137, with 8 and 17 % where 128 x 128 has 20 %.
# On sm_86, 89 and 120 128 x 128 spills 33 with steps of 64: all tiles for odd K, whose steps must
# be the same, have 32. Of sm_89's none spills, and their ceilings are those with 64.
_ODD = "steps of 32: 64 would spill"
_ODD_STEPS = tuple(
    row._replace(blocks={**row.blocks, "BK": 32})
    for row in (
        *_tile(128, 128, 8, 3, _ODD, half_rate=100),
        *_tile(64, 64, 4, 4, _ODD, half_rate=73),
        *_tile(32, 64, 4, 4, _ODD, half_rate=50),
    )
)
_RESIDUAL = (
    *_aligned(_tile(128, 256, 8, 3, _WIDE, sm_90=100, sm_100=67)),
    *_tile(128, 128, 8, 3, _EIGHT, sm_80=100, gfx942=100),
    *_tile(128, 128, 8, 3, _HALVED, sm_90=80, sm_100=50),
    *_aligned(_tile(128, 128, 8, 3, _EIGHT, half_rate=100)),
    *_aligned(_tile(64, 128, 4, 3, _HALVED, sm_80=89, half_rate=100, sm_90=67, sm_100=33)),
    *_tile(64, 128, 4, 3, _HALVED, gfx942=89),
    *_aligned(_tile(64, 64, 4, 4, _FEW, half_rate=100)),
    *_aligned(_tile(32, 64, 4, 4, _ONE, half_rate=89)),
    *_ODD_STEPS,
    *_REST,
)
TILES: dict[str, tuple[Row, ...]] = {
    "norm_linear": (*_NORMED, *_FP32),
    "folded_linear": _ALL,
    "linear_residual": _RESIDUAL,
    "input_gradient": (
        *_tile(128, 256, 8, 3, _WIDE, sm_90=94, sm_100=58),  # 88 to 100, 50 to 67
        *_aligned(_tile(128, 128, 8, 3, _EIGHT, sm_80=93)),  # 86 where it reads fp32, else 100
        *_tile(128, 128, 8, 3, _EIGHT, half_rate=100),
        *_tile(128, 128, 8, 2, "a third stage spills with GELU, in all of 64 KB", gfx942=100),
        *_tile(64, 64, 4, 4, _FEW, sm_80=62, sm_90=44, sm_100=20),  # 57, 40, 16 if it reads fp32
        # sm_80: 47 with an activation, up to 73 without; then 46 to 72
        *_tile(128, 128, 8, 3, _ROUNDED, TF32, sm_80=60, half_rate=100),
        *_tile(64, 128, 4, 3, _HALVED, TF32, sm_80=59, half_rate=100),
        # 66 with an activation, up to 81 without; on sm_120 90 to 96
        *_tile(64, 64, 4, 3, _FEW, TF32, sm_120=93, half_rate=74),
        *_tile(128, 256, 8, 3, _WIDE, MIXED, sm_100=45),  # 40 with an activation
        *_FEW_ROWS, *_TF32, *_FP32, *_MIXED_LARGE,
        *_tile(64, 64, 4, 4, _FEW, MIXED, half_rate=84),  # 80 to 89
        *_MIXED_FEW,
    ),
    "weight_gradient": (
        *_GATHERED,
        *_aligned(_tile(128, 256, 8, 3, _WIDE, MIXED, sm_90=67)),
        *_tile(128, 256, 8, 3, _WIDE, MIXED, sm_100=40),
        *_aligned(_tile(128, 128, 4, 3, _TRANSPOSED, MIXED, sm_80=80)),
        *_tile(128, 128, 8, 3, _UNSPILT, MIXED, sm_80=62, sm_90=44),
        *_tile(128, 128, 8, 2, "112 KB in three stages, of 99 KB", MIXED, half_rate=100),
        *_aligned(_tile(64, 128, 4, 3, _SHARES, MIXED, sm_80=62, half_rate=100, sm_90=40,
                        sm_100=20)),
        *_tile(64, 64, 4, 2, _TWO_STAGES, 32, sm_80=81, half_rate=100, sm_90=46, sm_100=33,
               gfx942=100),
        *_tile(64, 64, 4, 2, _TWO_STAGES, TF32, sm_80=50, sm_90=25, sm_100=12),
    ),
}  # fmt: skip


def fitting(kernel: str, arch: str, bits: int, odd: bool = False) -> tuple[Row, ...]:
    """All tiles of this kernel, architecture and dtype; fp32's or 16 bits' where it has none.

    `odd`: a side of the weight is no multiple of 16. Of rows of one shape the first is taken.
    """
    rows: dict[tuple[int, int], Row] = {}
    for row in TILES[kernel]:
        if arch in row.archs and bits in row.bits and odd <= row.upto.get("odd", odd):
            rows.setdefault((row.blocks["BM"], row.blocks["BN"]), row)
    if rows or bits in (16, 32):
        return tuple(rows.values())
    return fitting(kernel, arch, 16 if bits == MIXED else 32, odd)


def most(arch: str) -> int:
    """How many tiles the GEMM with the most of them has; a weight gradient's count twice."""
    kinds = (16, TF32, 32, MIXED)
    found = [len(fitting(kernel, arch, bits)) for kernel in TILES for bits in kinds]
    return max(*found, *(len(sharings(arch, bits, False)) for bits in kinds))


# ---- the choice ----------------------------------------------------------------------------------


def programs(row: Row, M: int, N: int) -> int:
    """Tiles of an (M, N) result."""
    return -(-M // row.blocks["BM"]) * -(-N // row.blocks["BN"])


def waves(row: Row, M: int, N: int, processors: int) -> int:
    """Tiles that the busiest processor computes; several at once share its rate."""
    return -(-programs(row, M, N) // processors)


def filled(row: Row, M: int, N: int, processors: int) -> float:
    """Share of the processors' time in which they work on elements of the result."""
    area = row.blocks["BM"] * row.blocks["BN"]
    return M * N / (max(1, waves(row, M, N, processors)) * processors * area)


def clocks(row: Row, arch: str, bits: int, M: int, N: int, processors: int) -> float:
    """Clocks of one step along K: what the tensor cores take, or L2, whichever is longer.

    A tile is multiplied at the share of the tensor cores' peak that its instructions allow (the
    row's `rate`); every tile reads its rows of both operands from L2, which all processors share.
    """
    BM, BN = row.blocks["BM"], row.blocks["BN"]
    multiply = 2 * BM * BN / (row.rate * hardware.flops(arch, 16 if bits == MIXED else bits))
    left, right = {16: (2, 2), MIXED: (4, 2)}.get(bits, (4, 4))
    read = (BM * left + BN * right) / hardware.CHIPS[arch].l2
    return max(waves(row, M, N, processors) * multiply, programs(row, M, N) / processors * read)


@functools.lru_cache(maxsize=4096)
def choose(
    kernel: str,
    arch: str,
    bits: int,
    M: int,
    N: int,
    processors: int | None = None,
    odd: bool = False,
) -> Row:
    """The row with the fewest clocks; of equal ones the fullest, then the largest."""
    count = processors or hardware.CHIPS[arch].processors

    def order(row: Row) -> tuple[float, float]:
        return clocks(row, arch, bits, M, N, count), -filled(row, M, N, count)

    return min(fitting(kernel, arch, bits, odd), key=order)


# ---- weight gradients ----------------------------------------------------------------------------

# A weight's gradient is a sum over all rows of a batch. Shares of them in programs of their own
# fill a GPU that has more processors than the weight has tiles, but each share is written and read
# in fp32, and joined by one more launch.
_LEAST_STEPS = 4  # of a share
_JOIN = 2000.0  # clocks of one more launch, about 1.5 us
_FROM_L2 = 4  # L2 is so many times as fast as DRAM, where shares of many layers go


class Shared(NamedTuple):
    """How a weight gradient is computed: its tile, and among how many programs its rows are."""

    row: Row
    shares: int


def sharings(arch: str, bits: int, odd: bool) -> tuple[Shared, ...]:
    """One of each binary there is: every tile, whole and in shares."""
    rows = fitting("weight_gradient", arch, bits, odd)
    return tuple(Shared(row, shares) for row in rows for shares in (1, 2))


@functools.lru_cache(maxsize=4096)
def share(
    arch: str,
    bits: int,
    M: int,
    N: int,
    K: int,
    processors: int | None = None,
    odd: bool = False,
) -> Shared:
    """The tile and the shares with the fewest clocks for an (N, K) weight and M rows."""
    chip = hardware.CHIPS[arch]
    count = processors or chip.processors

    def cost(each: Shared) -> float:
        row, shares = each
        # A share is as if the result had more columns: they are programs of the same launch.
        columns = -(-K // row.blocks["BN"]) * row.blocks["BN"] * shares
        steps = rows_each(M, each)
        time = steps * clocks(row, arch, bits, N, columns, count)
        if shares > 1:
            time += _JOIN + 2 * 4 * shares * N * K * _FROM_L2 / (chip.l2 * count)
        return time

    rows = fitting("weight_gradient", arch, bits, odd)
    return min(
        (
            Shared(row, shares)
            for row in rows
            for shares in range(1, 1 + max(1, M // (_LEAST_STEPS * row.blocks["BK"])))
            if shares == 1 or shares * programs(row, N, K) <= 2 * count
        ),
        key=cost,
    )


def rows_each(M: int, shared: Shared) -> int:
    """Rows of a share: whole steps."""
    step = shared.row.blocks["BK"]
    return -(-M // (shared.shares * step)) * step
