"""Kernels that do not pass a gate of machine_code.py, each with its reason and its limit.

All kernels of NVIDIA's architectures have been gone through.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Excuse(NamedTuple):
    """A rule that some kernels need not keep."""

    # How "label, without its absent tensors on architecture" begins, as a regular expression.
    kernels: str
    rule: str
    why: str
    most: int = 0  # instructions that spill in the hot loops: the worst that was compiled


_SPLIT = "three tf32 matmuls hold each operand twice: sums of more than 64 channels leave no room"
_WIDE = "two sums of 192 or 256 channels: smaller tiles would leave the tensor cores idle"
_BIASED = "a tile of the bias beside the scores: no smaller tile was tried"
_EXTRA = "few, most with dropout: no smaller tile was tried"
_EIGHTY_EIGHT = "no smaller tile was tried"
_ONCE = "a program's only store, from the layout of its matmul"
_TWO = "two instructions"
_PIXELS = "fp32 pixels are rounded: a ceiling of 18 % with and without"
_SIX = "a few, with a ceiling of 33 %"
_HALVES = "a ceiling of 86 to 94 %: the next smaller tile has 42 %"
_NO_POSITIONS = "a ceiling of 86 %: 91 % in tiles of 64 x 64, twice as many"
_ONLY = "a ceiling of 70 % instead of 80: the only tile for odd sizes"
_NEARLY = "a ceiling of 94 to 100 %"
_UNALIGNED = "rows of a bias have as many elements as there are tokens: aligned to nothing"
_WITH_BIAS, _WITH_SEED = (rf"(?!.* without .*\b{name}\b)" for name in ("bias", "seed"))
EXCUSED: tuple[Excuse, ...] = (
    Excuse(r"attention_\w+, fp32, .*HEAD (72|80|88|96|128|160|192|256)/", "spills", _SPLIT, 801),
    Excuse(r"attention_\w+, (bf16|fp16).*HEAD (192|256)/", "spills", _WIDE, 1756),
    Excuse(rf"attention_\w+, (bf16|fp16).*HEAD (96|128)/{_WITH_BIAS}", "spills", _BIASED, 264),
    Excuse(rf"attention_\w+,{_WITH_BIAS}", "loads", _UNALIGNED),
    Excuse(
        r"attention_backward_\w+, (bf16|fp16).*HEAD (96|128)/.* on sm_(86|89|90|120)",
        "spills", _EXTRA, 16,
    ),
    Excuse(rf"attention_\w+, fp32, HEAD 64/{_WITH_BIAS}", "spills", _BIASED, 264),
    Excuse(rf"attention_\w+, fp32, HEAD 64/{_WITH_SEED}", "spills", _EXTRA, 16),
    Excuse(r"attention_forward, (bf16|fp16), HEAD (72|80)/.* on sm_80", "spills", _EXTRA, 1),
    Excuse(r"attention_forward, (bf16|fp16).*HEAD (128|160)/.* on sm_120", "spills", _EXTRA, 16),
    Excuse(r"attention_\w+, (bf16|fp16)/fp32, HEAD 88/.* on sm_90", "spills", _EIGHTY_EIGHT, 20),
    Excuse(r"attention_backward_bias, (fp32, HEAD 128|bf16/fp32, HEAD 256)", "stores", _ONCE),
    Excuse(
        r"norm_linear_forward, (bf16|fp16)/fp32.*BM 128 BN 128 .* on sm_80", "spills", _HALVES, 42
    ),
    Excuse(r"weight_gradient_kernel, .*odd sizes, BM 128 BN 128 .* on sm_80", "spills", _ONLY, 8),
    Excuse(r"weight_gradient_kernel, .*BM 128 BN 128 .* 4 warps.* on sm_80", "spills", _NEARLY, 9),
    Excuse(
        r"patch_embed_forward, bf16, PATCH 3/16/16, planes.*BM 32 .* on sm_80", "spills", _TWO, 2
    ),
    Excuse(
        r"patch_embed_forward, fp32/\w+, PATCH 3/8/8, planes.*BM 128 BN 128 .* on sm_80",
        "spills", _PIXELS, 484,
    ),
    Excuse(
        r"patch_embed_forward, (bf16|fp16)/fp32, PATCH 3/8/8, planes.*BM 128 BN 128 .* on sm_80",
        "spills", _SIX, 6,
    ),
    Excuse(
        r"patch_embed_forward, uint8/fp32, PATCH 3/14/14, .* on sm_120", "spills", _NEARLY, 12
    ),
    Excuse(
        r"norm_linear_forward, fp32/(bf16|fp16).*BM 64 BN 128 .* on sm_120", "spills", _NEARLY, 12
    ),
    Excuse(r"input_gradient_kernel, fp32.* odd sizes.* on sm_120", "spills", _NEARLY, 12),
    Excuse(
        r"linear_residual_forward, fp32, .*tf32x3, odd sizes.* on sm_120", "spills", _NEARLY, 12
    ),
    Excuse(
        r"patch_embed_forward, bf16/fp32, .*/16/16, planes.*BM 128 .*\bposition\b.* on sm_8[69]",
        "spills", _NO_POSITIONS, 70,
    ),
    Excuse(
        r"linear_residual_forward, fp32, .*tf32, .*BM 64 BN 128 .* on sm_8[069]",
        "spills", _TWO, 2,
    ),
    Excuse(r"layernorm_backward, fp16/fp32, ROWS 64.* on sm_90", "spills", _TWO, 2),
)  # fmt: skip


def excuses(named: str, rule: str, excused: Sequence[Excuse] = EXCUSED) -> list[Excuse]:
    """Those of a kernel, "label, without its absent tensors on architecture", for a rule."""
    return [one for one in excused if one.rule == rule and re.match(one.kernels, named)]
