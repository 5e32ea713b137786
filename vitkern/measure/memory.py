"""What this process holds in memory, as the system counts it."""

from __future__ import annotations

import ctypes
import gc
import pathlib

STATUS = pathlib.Path("/proc/self/status")
CLEAR = pathlib.Path("/proc/self/clear_refs")


def resident(field: str) -> int:
    """VmRSS or VmHWM (the highest it has been) of this process, in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{STATUS} has no {field}")


def settle() -> int:
    """Give freed memory back, start the high-water mark anew; the resident set now."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what was freed
    if trim:
        trim(0)
    CLEAR.write_text("5")
    return resident("VmRSS")
