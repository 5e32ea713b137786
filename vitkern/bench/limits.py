"""The machine's own limits as a row of a results file: what the roofline is drawn with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..measure import limits

KIND = "limits"


def best(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of two rows measured on one machine the higher rates."""
    rates = {
        name: {key: max(rate, other[name][key]) for key, rate in one[name].items()}
        for name in ("multiply_gflops", "read_gbs")
    }
    return {**one, **rates}


def row(precisions: Iterable[str], seconds: float) -> dict[str, Any]:
    """Multiply-adds of each precision and reads of each level of memory, measured now."""
    sizes = limits.read_sizes()
    return {
        "kind": KIND,
        "multiply_gflops": {p: limits.multiply_gflops(p, seconds) for p in precisions},
        "read_gbs": {place: limits.read_gbs(size, seconds) for place, size in sizes.items()},
        "read_bytes": sizes,
    }
