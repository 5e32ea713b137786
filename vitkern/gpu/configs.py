"""The launch table: block sizes, warps and pipeline stages per kernel, architecture and shape.

No autotuning at run time: a launch takes the first row that fits (the GEMMs, gpu/tiles.py, the tile
of the fewest clocks), so results are reproducible and the ahead-of-time build knows every binary
that can be asked for. Each row has its reason. No row has been timed on a GPU yet: the reasons are
what the machine code shows (registers, shared memory, instruction mix: docs/gpu_kernels.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
# Architectures that all kernels compile for with another's settings: nobody has looked at their
# machine code (docs/gpu.md). RDNA's warps (gfx11, gfx12) have 32 threads, CDNA's 64.
BORROWED = {"gfx90a": "gfx942", "gfx950": "gfx942", "gfx1100": "gfx942"}
TARGETS = (*ARCHS, *BORROWED)  # what can be built for ahead of time


class Row(NamedTuple):
    """Settings of one kernel for a bucket of shapes on some architectures."""

    blocks: Mapping[str, Any]  # the kernel's tl.constexpr block sizes
    num_warps: int
    num_stages: int
    why: str
    archs: tuple[str, ...] = ARCHS
    bits: tuple[int, ...] = (16, 32)  # of the matrices' elements; tiles.py has more
    upto: Mapping[str, int] = {}  # the bucket: the largest sizes it serves, by axis letter
    rate: float = 1.0  # of a GEMM's tile: the share of the tensor cores' peak it can reach


# kernel -> its rows, the special ones first; the last row must fit everything
TABLE: dict[str, tuple[Row, ...]] = {}


# ---- GEMMs: their tiles are in gpu/tiles.py ----

_WGMMA = ("sm_90", "sm_100")  # wgmma and tcgen05 read shared memory themselves
TABLE["join_gradients"] = (
    Row({"BM": 4, "BN": 256}, 4, 2, "one pass over the shares, 16 bytes a thread"),
)

# ---- layernorm, sums, elementwise: bound by memory ----

TABLE["layernorm_forward"] = (
    Row({"BM": 4}, 4, 1, "a row of 512 in 16 registers of a warp", upto={"D": 512}),
    Row({"BM": 2}, 4, 1, "two rows of 2048 in 32 registers a thread", upto={"D": 2048}),
    Row({"BM": 1}, 8, 1, "one long row over eight warps"),
)
TABLE["heads_norm"] = (Row({"BM": 32}, 4, 1, "16 elements a thread of heads of 64 channels"),)
TABLE["rotary"] = (Row({"BM": 32}, 4, 1, "16 elements a thread of heads of 64 channels"),)
TABLE["layernorm_backward"] = (
    Row({"BM": 4}, 4, 1, "as the forward", upto={"D": 512}),
    Row({"BM": 1}, 4, 1, "x, grad and two sums of 2048 in 64 registers a thread", upto={"D": 2048}),
    Row({"BM": 1}, 8, 1, "one long row over eight warps"),
)
TABLE["sum_parts"] = (Row({"BP": 32, "BL": 128}, 4, 1, "512 bytes of each of 32 parts at once"),)
TABLE["elementwise"] = (Row({"BM": 16, "BN": 128}, 4, 1, "16 elements a thread, 128-bit accesses"),)

# ---- patch_embed ----

TABLE["patch_embed_forward"] = (
    Row(
        {"BM": 64, "BN": 32, "BK": 64},
        4,
        4,
        "one or two images: 96 programs for 196 patches of ViT-B; wgmma has 64 rows",
        _WGMMA,
        (16,),
        {"M": 512},
    ),
    Row(
        {"BM": 32, "BN": 64, "BK": 64},
        4,
        3,
        "one or two images: 84 programs for 196 patches of ViT-B",
        ARCHS,
        (16,),
        {"M": 512},
    ),
    Row(
        {"BM": 64, "BN": 64, "BK": 64},
        4,
        3,
        "a few images: four times the programs of 128 x 128 tiles",
        ARCHS,
        (16,),
        {"M": 2048},
    ),
    Row(
        {"BM": 128, "BN": 128, "BK": 64},
        8,
        3,
        "two warpgroups of 64 x 128; pixels are converted by 256 threads",
        _WGMMA,
        (16,),
    ),
    Row({"BM": 128, "BN": 128, "BK": 32}, 4, 2, "64 KB hold fp32 pixels, too", ("gfx942",), (16,)),
    Row(
        {"BM": 128, "BN": 128, "BK": 64},
        8,
        3,
        "half of sm_80's tensor rate: 64 x 32 per warp does, and bytes do not spill",
        ("sm_86", "sm_89", "sm_120"),
        (16,),
    ),
    Row(
        {"BM": 128, "BN": 128, "BK": 32},
        4,
        4,
        "two programs a processor, one stores while one multiplies; BK = 64 spills with bytes",
        ARCHS,
        (16,),
    ),
    Row(
        {"BM": 64, "BN": 64, "BK": 32},
        4,
        3,
        "three tf32 matmuls a step leave registers for 64 x 64 only",
        ARCHS,
        (32,),
    ),
)
TABLE["patch_embed_weight_gradient"] = (
    Row(
        {"BM": 64, "BN": 128, "BP": 128, "PROGRAMS": 256},
        8,
        3,
        "four wgmma a step behind the index arithmetic of its 64 rows",
        _WGMMA,
        (16,),
    ),
    Row(
        {"BM": 32, "BN": 128, "BP": 128, "PROGRAMS": 256},
        8,
        3,
        "128 registers: two programs a processor; 64 rows a step need 149",
        ARCHS,
        (16,),
    ),
    Row({"BM": 32, "BN": 64, "BP": 64, "PROGRAMS": 256}, 4, 3, "as the forward", ARCHS, (32,)),
)
TABLE["patch_embed_image_gradient"] = (
    Row(
        {"BM": 128, "BN": 128, "BK": 32},
        8,
        3,
        "addresses of pixels in the epilogue: 4 warps spill with 14 x 14 patches",
        ARCHS,
        (16,),
    ),
    Row({"BM": 64, "BN": 64, "BK": 32}, 4, 3, "as the forward", ARCHS, (32,)),
)
TABLE["patch_embed_token_sums"] = (
    Row({"BB": 16, "BN": 256}, 4, 1, "64 bytes a thread on their way, 8 programs a processor"),
)

# ---- attention ----

# E is the padded head dim, `programs` their count with 128 rows each, `waste` what such tiles lose
# over tiles of 64, in percent, `extra` 1 with a bias or dropout (gpu/attention.py row_for). Rows
# that `programs` tells apart have the same BN, so that a sample's result does not depend on its
# batch. BT is the tail's width.
_SMALL_SHARED = ("sm_86", "sm_89", "sm_120")  # 99 KiB a block
_SYNC = ("sm_80", "sm_86", "sm_89", "sm_120")  # mma.sync only
_AMD = ("gfx942",)
_NVIDIA = (*_SYNC, *_WGMMA)


def _walk(BM: int, BN: int) -> dict[str, int]:
    return {"BM": BM, "BN": BN, "BT": 16}


def _plain(*rows: Row) -> tuple[Row, ...]:
    """Rows that leave no registers for a bias or dropout."""
    return tuple(row._replace(upto={**row.upto, "extra": 0}) for row in rows)


_EXTRA = "a tile of scores more in registers"
_FEW = "few programs: tiles of 64 rows use twice the multiprocessors"
_SPLIT = "three tf32 matmuls: each operand is held twice, so smaller tiles"
TABLE["attention_forward"] = (
    *_plain(
        Row(_walk(64, 64), 4, 3, _FEW, ("sm_80",), (16,), {"E": 80, "programs": 128}),
        Row(
            _walk(128, 64), 4, 3, "32 rows a warp: 40 ldmatrix feed 128 mma, tensor-bound",
            ("sm_80",), (16,), {"E": 80, "waste": 6},
        ),
        Row(_walk(64, 64), 2, 3, "the same per warp, half the tile", ("sm_80",), (16,), {"E": 80}),
        Row(_walk(128, 32), 4, 3, "64 keys would spill", ("sm_80",), (16,), {"E": 96}),
        Row(_walk(64, 64), 4, 3, _FEW, ("sm_80",), (16,), {"E": 128, "programs": 128}),
        Row(_walk(128, 64), 8, 3, "32 rows a warp would spill", ("sm_80",), (16,), {"E": 128}),
        Row(
            _walk(64, 64), 4, 2, "tensor cores at half of sm_80's rate: 16 rows a warp suffice",
            _SMALL_SHARED, (16,), {"E": 128},
        ),
        Row(_walk(64, 64), 4, 3, _FEW, _WGMMA, (16,), {"E": 128, "programs": 128}),
        Row(_walk(128, 64), 4, 3, "exp2 bound, two blocks", _WGMMA, (16,), {"E": 96}),
        Row(_walk(128, 64), 8, 3, "32 rows a warp would spill", _WGMMA, (16,), {"E": 128}),
    ),
    Row(_walk(64, 64), 4, 2, _EXTRA, _NVIDIA, (16,), {"E": 128}),
    Row(_walk(128, 64), 8, 2, "192 KiB at E = 256", _WGMMA, (16,)),
    Row(_walk(128, 64), 4, 1, "four waves of 32 rows", _AMD, (16,), {"E": 128}),
    Row(_walk(64, 32), 4, 1, "64 KiB of shared memory", _AMD),
    Row(_walk(64, 32), 4, 2, "two blocks without spills", _SYNC, (16,), {"E": 160}),
    Row(_walk(128, 32), 8, 2, "no spills", _SYNC, (16,), {"E": 192}),
    Row(_walk(64, 16), 4, 2, "no spills, 50 KiB at E = 256", _SYNC, (16,)),
    Row(_walk(64, 32), 4, 2, _SPLIT, ("sm_90",), (32,), {"E": 96}),
    Row(_walk(64, 32), 8, 2, _SPLIT, ("sm_100",), (32,), {"E": 96}),
    Row(_walk(64, 32), 4, 2, _SPLIT, _SYNC, (32,), {"E": 64}),
    Row(_walk(64, 16), 4, 2, _SPLIT, ("sm_90", *_SYNC), (32,), {"E": 96}),
    Row(_walk(64, 16), 4, 2, _SPLIT, ("sm_90",), (32,), {"E": 128}),
    Row(_walk(32, 16), 2, 2, _SPLIT, ARCHS, (32,), {"E": 192}),
    Row(_walk(32, 16), 2, 1, "fits 99 KiB at E = 256", ARCHS, (32,)),
)  # fmt: skip

_TWO_SUMS = "two sums of E channels for 16 rows a warp: E registers"
_BACKWARD_FP32 = (
    Row(_walk(32, 16), 4, 1, "64 KiB of shared memory", _AMD, (32,)),
    Row(_walk(32, 16), 8, 2, _SPLIT, ("sm_100",), (32,), {"E": 64}),
    Row(_walk(32, 16), 4, 2, _SPLIT, ARCHS, (32,), {"E": 128}),
    Row(_walk(16, 16), 8, 1, "fits 99 KiB at E = 256", ARCHS, (32,)),
)
TABLE["attention_backward_queries"] = (
    *_plain(
        Row(_walk(64, 64), 4, 2, _TWO_SUMS, ("sm_80",), (16,), {"E": 80}),
        Row(_walk(64, 64), 4, 3, _TWO_SUMS, _SMALL_SHARED, (16,), {"E": 64}),
        Row(_walk(32, 32), 2, 2, "64 keys would spill", _SMALL_SHARED, (16,), {"E": 80}),
        Row(_walk(64, 32), 4, 2, "64 keys would spill", _SYNC, (16,), {"E": 128}),
        Row(_walk(64, 64), 4, 2, _TWO_SUMS, ("sm_90",), (16,), {"E": 96}),
        Row(_walk(128, 64), 8, 2, "all matmuls at the tensor cores' rate", ("sm_90",), (16,),
            {"E": 128}),
        Row(_walk(128, 64), 4, 2, "sums in tensor memory", ("sm_100",), (16,), {"E": 80}),
        Row(_walk(64, 64), 4, 2, "the tensor memory's limit", ("sm_100",), (16,), {"E": 128}),
    ),
    Row(_walk(64, 32), 4, 2, _EXTRA, _NVIDIA, (16,), {"E": 128}),
    Row(_walk(32, 32), 4, 2, "two warps share a row's channels", _SYNC, (16,)),
    Row(_walk(64, 32), 8, 2, "two warpgroups share a row's channels", ("sm_90",), (16,)),
    Row(_walk(64, 32), 4, 2, "152 KiB at E = 256", ("sm_100",), (16,)),
    Row(_walk(128, 32), 4, 1, "four waves of 32 rows", _AMD, (16,), {"E": 128}),
    Row(_walk(64, 32), 4, 1, "512 registers at E = 256", _AMD, (16,)),
    *_BACKWARD_FP32,
)  # fmt: skip
TABLE["attention_backward_keys"] = (
    *_plain(
        Row(_walk(64, 64), 4, 2, _TWO_SUMS, ("sm_80",), (16,), {"E": 96}),
        Row(_walk(64, 64), 4, 2, _TWO_SUMS, _SMALL_SHARED, (16,), {"E": 64}),
        Row(_walk(32, 32), 2, 2, "64 queries would spill", _SMALL_SHARED, (16,), {"E": 80}),
        Row(_walk(64, 32), 4, 2, "64 queries would spill", _SMALL_SHARED, (16,), {"E": 96}),
        Row(_walk(128, 32), 8, 2, "64 rows on four warps would spill", _SYNC, (16,), {"E": 128}),
        Row(_walk(64, 64), 4, 2, _TWO_SUMS, ("sm_90",), (16,), {"E": 96}),
        Row(_walk(128, 64), 8, 2, "all matmuls at the tensor cores' rate", ("sm_90",), (16,),
            {"E": 128}),
        Row(_walk(128, 64), 8, 2, "sums in tensor memory", ("sm_100",), (16,), {"E": 64}),
        Row(_walk(64, 64), 4, 2, "the tensor memory's limit", ("sm_100",), (16,), {"E": 128}),
    ),
    Row(_walk(64, 32), 4, 2, _EXTRA, _NVIDIA, (16,), {"E": 96}),
    Row(_walk(32, 32), 4, 2, _EXTRA, _NVIDIA, (16,), {"E": 128}),
    Row(_walk(32, 16), 4, 2, "two warps share a row's channels", _SYNC, (16,)),
    Row(_walk(64, 32), 8, 2, "two warpgroups share a row's channels", ("sm_90",), (16,)),
    Row(_walk(64, 32), 4, 2, "176 KiB at E = 256", ("sm_100",), (16,)),
    Row(_walk(64, 32), 4, 1, "few registers left beside the sums", _AMD, (16,)),
    Row(_walk(32, 32), 4, 2, _SPLIT, _NVIDIA, (32,), {"E": 64}),
    *_BACKWARD_FP32,
)  # fmt: skip
TABLE["attention_backward_bias"] = (
    Row({"BM": 64, "BN": 32}, 4, 1, "64 KiB of shared memory", _AMD),
    Row({"BM": 64, "BN": 32}, 4, 2, "bound by reading q, k, v, dy; 64 x 64 spills", ARCHS, (16,)),
    Row({"BM": 64, "BN": 32}, 4, 1, _SPLIT, _WGMMA, (32,), {"E": 128}),
    Row({"BM": 32, "BN": 16}, 4, 1, _SPLIT, ARCHS, (32,), {"E": 128}),
    Row({"BM": 16, "BN": 16}, 4, 1, _SPLIT, ARCHS, (32,)),
)


def pick(kernel: str, arch: str, bits: int, **sizes: int) -> Row:
    """The first row for this kernel that serves the architecture, the dtype and the sizes."""
    for row in TABLE[kernel]:
        if (
            arch in row.archs
            and bits in row.bits
            and all(sizes[axis] <= limit for axis, limit in row.upto.items())
        ):
            return row
    raise LookupError(f"gpu/configs.py has no row for {kernel} on {arch} with {sizes}")


def nearest_arch(arch: str) -> str:
    """The table's architecture for a device: itself, else the newest older one of its family.

    sm_87 uses sm_86's settings, sm_121 those of sm_120, any other AMD chip those of gfx942.
    """
    if arch in ARCHS:
        return arch
    if not arch.startswith("sm_"):
        return BORROWED.get(arch, "gfx942")
    older = [a for a in ARCHS if a.startswith("sm_") and int(a[3:]) <= int(arch[3:])]
    return older[-1] if older else "sm_80"


# "fp32" multiplies each element as two tf32 halves (three matmuls, errors near fp32's own), which
# tensor cores do faster than the FMA units do plain fp32. AMD's matrix cores multiply fp32 itself,
# and Triton takes "tf32" there for gfx942 alone, "tf32x3" nowhere. 16-bit operands are multiplied
# exactly whatever is asked, but what is asked must be known to the backend: "ieee" is to all.
def dot_precision(arch: str, bits: int, allow_tf32: bool = False) -> str:
    """Triton's input_precision for operands of so many bits."""
    if bits < 32 or arch.startswith("gfx"):
        return "ieee"
    return "tf32" if allow_tf32 else "tf32x3"
