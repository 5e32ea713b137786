"""What this machine can do at most, measured: multiply-adds in L1, and reads from each memory.

`vitkern.cpu.calibrate` runs loops of the instruction set and the threads that the kernels use, so
that a kernel's rate is a share of what was reached here, and not of a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable

L2_BYTES = 1 << 20  # for each thread; half of today's smaller L2 caches of servers
L3_BYTES = 32 << 20  # for all threads
MEMORY_BYTES = 512 << 20  # past any L3 a virtual machine is really given


def precisions() -> list[str]:
    """Those of every device that differ on this machine: tf32 is fp32 without AMX."""
    from .. import cpu
    from ..precision import CHOICES

    return [p for p in CHOICES if p != "tf32" or cpu.has_tiles(cpu.isa())]


def best_rate(run: Callable[[], float], seconds: float) -> float:
    """The best of repeated measurements: limits are what the quietest moment shows."""
    best, stop = run(), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        best = max(best, run())
    return best


def multiply_gflops(precision: str, seconds: float) -> float:
    """Multiply-adds on data in L1 as the engine makes them at a precision, two flops each."""
    from .. import cpu

    return round(best_rate(lambda: cpu.calibrate(precision), seconds) / 1e9, 1)


def read_gbs(size: int, seconds: float) -> float:
    """Reads of `size` bytes over and over, each thread its own part."""
    import torch

    from .. import cpu

    data = torch.ones(size // 4)
    return round(best_rate(lambda: cpu.calibrate(data=data), seconds) / 1e9, 1)


def read_sizes() -> dict[str, int]:
    """How many bytes are read to measure each level of memory."""
    import torch

    return {"L2": L2_BYTES * torch.get_num_threads(), "L3": L3_BYTES, "memory": MEMORY_BYTES}
