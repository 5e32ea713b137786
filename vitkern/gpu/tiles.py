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

from . import hardware
from .configs import Row

TF32 = 19  # bits of an fp32 operand that a tf32 matmul uses: it has tiles of its own

# ---- the tiles, the largest first ----------------------------------------------------------------

# `rate` is the row's static ceiling as docs/gpu_kernels.md has it (`make gpu-check` compares). AMD
# has no ceilings yet: gfx942 is given those of sm_80, whose shared memory and tensor cores have the
# same rates. wgmma and tcgen05 (sm_90, sm_100) want 64 rows, fewer would be mma.sync.
_HALF_RATE = ("sm_86", "sm_89", "sm_120")  # of sm_80's tensor cores: operands arrive in time


def _tile(
    BM: int, BN: int, num_warps: int, num_stages: int, why: str, bits: int = 16, **rates: int
) -> tuple[Row, ...]:
    """A row for each group of architectures, with its `rate` in percent."""
    blocks = {"BM": BM, "BN": BN, "BK": 64 if bits == 16 else 32, "GROUP": 8}
    return tuple(
        Row(
            blocks, num_warps, num_stages, why, _HALF_RATE if arch == "half_rate" else (arch,),
            (bits,), rate=rate / 100,
        )
        for arch, rate in rates.items()
    )  # fmt: skip


_WIDE = "operands come from shared memory: 64 x 256 per instruction halves a 128-wide tile's reads"
_SPLIT = "three tf32 matmuls a step leave registers for 64 x 64 only"
_LARGE = (
    *_tile(128, 256, 8, 3, _WIDE, sm_90=100, sm_100=67),
    *_tile(128, 128, 8, 3, "no spills in the epilogue", sm_80=100, half_rate=100, gfx942=100),
)
_MIDDLE = (
    *_tile(128, 128, 8, 3, "half of the wide tile", sm_90=80, sm_100=50),
    *_tile(
        64, 128, 4, 3, "32 x 64 of it per warp: half of 128 x 128",
        sm_80=89, half_rate=100, sm_90=67, sm_100=33, gfx942=89,
    ),
)  # fmt: skip
_FEW_ROWS = _tile(
    64, 64, 4, 4, "a few images: four times as many programs",
    sm_80=67, half_rate=100, sm_90=50, sm_100=25, gfx942=67,
)  # fmt: skip
_ONE_IMAGE = (
    *_tile(32, 64, 4, 4, "one image", sm_80=44, half_rate=89),
    *_tile(32, 64, 2, 4, "one image: two waves of 32 x 32", gfx942=44),
    *_tile(64, 32, 4, 4, "one image: wgmma has 64 rows", sm_90=33, sm_100=17),
)
_FP32 = (
    *_tile(64, 64, 4, 3, _SPLIT, 32, sm_80=97, half_rate=100, sm_90=67, sm_100=33, gfx942=100),
    *_tile(32, 64, 4, 3, "one image", 32, sm_80=80, half_rate=100, gfx942=100),
    *_tile(64, 32, 4, 3, "one image: wgmma has 64 rows", 32, sm_90=54, sm_100=26),
)
_TF32 = (
    *_tile(
        128, 128, 8, 3,
        "one matmul a step: half of 64 x 64's reads of L2 and of its roundings, which limit it",
        TF32, sm_80=60, half_rate=100, sm_90=57, sm_100=33,
    ),
    *_tile(64, 128, 4, 3, "half of it", TF32, sm_80=60, half_rate=100, sm_90=40, sm_100=20),
    *_tile(64, 64, 4, 3, "a few images", TF32, sm_80=39, half_rate=77, sm_90=33, sm_100=17),
    *_tile(32, 64, 4, 3, "one image", TF32, sm_80=36, half_rate=73),
    *_tile(64, 32, 4, 3, "one image: wgmma has 64 rows", TF32, sm_90=25, sm_100=12),
)  # fmt: skip
_NORMED = (  # A is normalised by fp32 lanes on its way, which limits small tiles
    *_tile(128, 256, 8, 3, _WIDE, sm_90=84, sm_100=47),
    *_tile(
        128, 128, 4, 3,
        "normalising A twice, once for each half of the columns, would fill its 64 fp32 lanes",
        sm_80=100, gfx942=100,
    ),
    *_tile(128, 128, 8, 3, "no spills in the epilogue", half_rate=100),
    *_tile(64, 64, 4, 4, "few rows", sm_80=42, half_rate=100, sm_90=36, sm_100=15, gfx942=42),
)  # fmt: skip
_ALL = (*_LARGE, *_MIDDLE, *_FEW_ROWS, *_ONE_IMAGE, *_TF32, *_FP32)
TILES: dict[str, tuple[Row, ...]] = {
    "norm_linear": (*_NORMED, *_FP32),
    "folded_linear": _ALL,
    "linear_residual": _ALL,
    "input_gradient": (*_LARGE, *_FEW_ROWS, *_TF32, *_FP32),
}


def fitting(kernel: str, arch: str, bits: int) -> tuple[Row, ...]:
    """All tiles of this kernel, architecture and dtype; tf32 has fp32's where it has none."""
    rows = tuple(row for row in TILES[kernel] if arch in row.archs and bits in row.bits)
    return rows if rows or bits == 32 else fitting(kernel, arch, 32)


def most(arch: str) -> int:
    """How many tiles the GEMM with the most of them has."""
    return max(len(fitting(kernel, arch, bits)) for kernel in TILES for bits in (16, TF32, 32))


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
    return M * N / (waves(row, M, N, processors) * processors * area)


def clocks(row: Row, arch: str, bits: int, M: int, N: int, processors: int) -> float:
    """Clocks of one step along K: what the tensor cores take, or L2, whichever is longer.

    A tile is multiplied at the share of the tensor cores' peak that its instructions allow (the
    row's `rate`); every tile reads its rows of both operands from L2, which all processors share.
    """
    BM, BN = row.blocks["BM"], row.blocks["BN"]
    multiply = 2 * BM * BN / (row.rate * hardware.flops(arch, bits))
    read = (BM + BN) * (2 if bits == 16 else 4) / hardware.CHIPS[arch].l2
    return max(waves(row, M, N, processors) * multiply, programs(row, M, N) / processors * read)


@functools.lru_cache(maxsize=4096)
def choose(kernel: str, arch: str, bits: int, M: int, N: int, processors: int | None = None) -> Row:
    """The row with the fewest clocks; of equal ones the first, which is the largest tile."""
    processors = processors or hardware.CHIPS[arch].processors
    rows = fitting(kernel, arch, bits)
    return min(rows, key=lambda row: clocks(row, arch, bits, M, N, processors))
