"""What Triton's compiler is given for a variant: the same ahead of time and at a first call.

Kernels are compiled from their variant, not through Triton's own binder (`kernel[grid](...)`). The
binder makes a constant of every integer that is 1 and looks into tuples whatever their
`do_not_specialize` says: variants that no build would list and no test would run.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from .configs import TARGETS
from .launch import ALIGNMENT, Variant, grouped

OPTIONS = {"enable_fp_fusion": True}  # explicit: the default of later Tritons may be another
# gfx950: where Triton 3.7 chooses the shape of MFMA instructions, LLVM's scheduler ends the process
# in attention's backward ("Dead defs should have no uses"). 16 x 16 compiles, and fits every tile.
_OPTIONS_FOR = {"gfx950": {"matrix_instr_nonkdim": 16}}


def target_of(arch: str) -> GPUTarget:
    """Triton's name of an architecture; ValueError for one that vitkern has no settings for."""
    if arch not in TARGETS:
        raise ValueError(f"unknown architecture {arch!r}; known: {', '.join(TARGETS)}")
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 32 if arch.startswith("gfx1") else 64)
    return GPUTarget("cuda", int(arch[3:]), 32)


def input_of(variant: Variant, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """What triton.compile takes for a variant: its source, and its options."""
    names, promise = variant.kernel.arg_names, [["tt.divisibility", ALIGNMENT]]
    paths = [path.split(".") for path in variant.divisible]
    source = ASTSource(
        variant.kernel,
        {name: "constexpr" for name in names} | grouped(variant.signature),
        dict(variant.constants),
        {(names.index(name), *map(int, element)): promise for name, *element in paths},
    )
    settings = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return source, settings | OPTIONS | _OPTIONS_FOR.get(str(target.arch), {})


def compile_here(variant: Variant) -> Any:
    """The kernel for the current device, from Triton's cache if it is there.

    `kernel[grid](*arguments)` starts it, with every argument of its source in order.
    """
    target = driver.active.get_current_target()
    source, options = input_of(variant, target)
    return triton.compile(source, target=target, options=options)
