"""A variant's label in tables and messages: what makes it another than its kernel's other ones."""

from __future__ import annotations

import re

from ..launch import Variant


def label_of(variant: Variant) -> str:
    """Kernel, dtypes in order of first use, what is on, blocks, settings."""
    kinds = {"*fp32": "fp32", "*fp16": "fp16", "*bf16": "bf16", "*u8": "uint8"}
    dtypes = dict.fromkeys(kinds[kind] for _, kind in variant.signature if kind in kinds)
    options, blocks = [], []
    for name, value in variant.constants:
        if value in (None, "none") or name == "GROUP" or name.endswith("UNIT"):
            continue
        if name == "PRECISION" and {"fp16", "bf16"} & dtypes.keys():
            continue  # ignored for 16-bit operands
        if isinstance(value, tuple):
            options.append(f"{name} {'/'.join(map(str, value))}")
        elif isinstance(value, bool):
            options += [name.lower()] if value else []
        elif isinstance(value, str):
            options.append(value)
        elif re.fullmatch("B[A-Z]", name):
            blocks.append(f"{name} {value}")
        elif value:
            options.append(f"{name} {value}")
    if not is_promised(variant):
        options.append("odd sizes")
    counts = {"warp": variant.num_warps, "stage": variant.num_stages}
    settings = ", ".join(f"{n} {what}{'s' if n > 1 else ''}" for what, n in counts.items())
    parts = (variant.kernel.__name__, "/".join(dtypes), *options, " ".join(blocks), settings)
    return ", ".join(part for part in parts if part)


def is_promised(variant: Variant) -> bool:
    """Whether every pointer and specialised size is promised to be a multiple of ALIGNMENT."""
    free = {p.name for p in variant.kernel.params if p.do_not_specialize}
    found = [n for n, kind in variant.signature if kind[0] in "*i"]
    sizes = [n for n in found if n.partition(".")[0] not in free]
    return set(sizes) <= set(variant.divisible)
