"""How many threads a native call takes."""

from __future__ import annotations

import os

import torch

from . import _C, cpu_limits

_CPUS = cpu_limits.available()
_C.set_cpus(_CPUS)
_CHOSEN_BY_TORCH = None if "OMP_NUM_THREADS" in os.environ else torch.get_num_threads()


def threads() -> int:
    """Of the next call: torch's number, which a container's quota bounds unless somebody set it.

    torch counts the CPUs of the affinity mask and knows no quota. OMP_NUM_THREADS and
    `torch.set_num_threads` are obeyed as they are.
    """
    count = torch.get_num_threads()
    return min(count, _CPUS) if count == _CHOSEN_BY_TORCH else count
