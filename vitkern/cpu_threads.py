"""How many threads a native call takes."""

from __future__ import annotations

import os

import torch

from . import _C, cpu_limits

_CPUS = cpu_limits.available()
_C.set_cpus(_CPUS)
# torch's own choice is the mask's CPUs, or half of them where cores have two threads. Any other
# number was somebody's, even before this module was loaded.
_NOW = torch.get_num_threads()
_BY_TORCH = "OMP_NUM_THREADS" not in os.environ and _NOW in (
    cpu_limits.mask(),
    cpu_limits.mask() // 2,
)
_CHOSEN_BY_TORCH = _NOW if _BY_TORCH else None


def threads() -> int:
    """Of the next call: torch's number, which a container's quota bounds unless somebody set it.

    torch counts the CPUs of the affinity mask and knows no quota. OMP_NUM_THREADS and
    `torch.set_num_threads` are obeyed as they are, unless they say what torch chose itself. What
    PyTorch computes beside (training's GEMMs, a stem's convolutions) is not bounded.
    """
    count = torch.get_num_threads()
    return min(count, _CPUS) if count == _CHOSEN_BY_TORCH else count
