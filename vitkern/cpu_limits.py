"""How many CPUs this process may use: its affinity mask, and the CPU quota of its control groups.

A quota of 1.5 CPUs stops all threads of a process for the rest of each period once they have used
it up, however many there are: threads beyond it only wait for each other.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

_ROOT = pathlib.Path("/")
_V1_FOLDERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
_V2_FOLDERS = ("", "unified")  # the second beside v1


def available(root: pathlib.Path = _ROOT) -> int:
    """CPUs of the affinity mask, no more than the quota rounded to whole CPUs, and at least one."""
    allowed = quota(root)
    return mask() if allowed is None else max(1, min(mask(), round(allowed)))


def mask() -> int:
    """CPUs of the affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: pathlib.Path = _ROOT) -> float | None:
    """In CPUs: the least of this process's control group and those around it. None: no limit."""
    found = [limit for folder in _groups(root) for limit in _limits(folder)]
    return min(found, default=None)


def _groups(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folders of the control groups, from the process's own upwards.

    In a container the path of the process may be the host's, while only the container's own part
    of the tree is mounted: then the last folder, the root of the mount, is the one that counts.
    """
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in _V1_FOLDERS if controllers else _V2_FOLDERS:
            for depth in range(len(parts), -1, -1):
                yield mounted.joinpath(mount, *parts[:depth])


def _limits(folder: pathlib.Path) -> Iterator[float]:
    """cpu.max (v2): "max 100000" or "150000 100000"; v1: two files, -1 for no limit."""
    words = _text(folder / "cpu.max").split()
    if not words:
        words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        share, period = map(float, words)
    except ValueError:  # "max", or no such file
        return
    if share > 0 and period > 0:
        yield share / period


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such file, or not for us to read
        return ""
