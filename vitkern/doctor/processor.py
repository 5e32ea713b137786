"""The processor: its name, caches and memory, every instruction set and why it serves or does not,
AMX, and how many threads a call takes.
"""

from __future__ import annotations

import os
import pathlib
import platform
from typing import Any

from .. import cpu_limits
from ..measure.machine import cpu_name

_CACHES = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")
_NODES = pathlib.Path("/sys/devices/system/node")
_MEMORY = pathlib.Path("/proc/meminfo")

# What makes each precision's multiply-adds, by what the set in use is (docs/numerics.md).
_MULTIPLIES = {
    "amx_fp16": {
        "fp32": "2 fp16 terms in AMX tiles",
        "tf32": "fp16 in AMX tiles",
        "bf16": "bf16 in AMX tiles",
        "int8": "8-bit integers in AMX tiles",
    },
    "amx": {
        "fp32": "3 bf16 terms in AMX tiles",
        "tf32": "2 bf16 terms in AMX tiles",
        "bf16": "bf16 in AMX tiles",
        "int8": "8-bit integers in AMX tiles",
    },
    "integers": {
        "fp32": "fp32 multiply-adds",
        "tf32": "as fp32",
        "bf16": "16-bit integers",
        "int8": "8-bit integers",
    },
    "pairs": {
        "fp32": "fp32 multiply-adds",
        "tf32": "as fp32",
        "bf16": "pairs of bf16",
        "int8": "8-bit integers",
    },
    "floats": {
        "fp32": "fp32 multiply-adds",
        "tf32": "as fp32",
        "bf16": "as fp32",
        "int8": "8-bit integers",
    },
}


def processor() -> dict[str, Any]:
    """Name, cores, caches, memory; None for what the system does not tell."""
    return {
        "name": cpu_name(),
        "machine": platform.machine(),
        "virtual": "hypervisor" in _first_flags() if _first_flags() else None,
        "cores": os.cpu_count(),
        "caches": _caches(),
        "numa_nodes": len(list(_NODES.glob("node[0-9]*"))) or None,
        "memory_bytes": _memory("MemTotal"),
        "available_bytes": _memory("MemAvailable"),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def instruction_sets() -> list[dict[str, Any]]:
    """Every set of csrc/cpu/isas.inc, best first, with its state in words.

    state: "in use", "usable", "slower" (it runs, but its base is as fast), "not built" (the CPU
    could run it), "missing" (features that the CPU lacks).
    """
    from .. import _C

    facts = _C.cpu_facts()
    flags: dict[str, bool] = facts["flags"]
    rows = _C.instruction_sets()
    chosen = chosen_set(rows)
    found = []
    for row in rows:
        needs = row["needs"].split()
        missing = [name for name in needs if not flags.get(name)]
        if row["machine"] not in ("any", platform.machine()):
            missing = [f"an {row['machine']} processor"]
        one = {"name": row["name"], "base": row["base"], "needs": needs, "missing": missing}
        found.append({**one, "state": _state(row, missing, chosen, facts["amx_usable"])})
    return found


def _state(row: dict[str, Any], missing: list[str], chosen: str | None, granted: bool) -> str:
    if row["name"] == chosen:
        return "in use"
    if missing:
        return "missing"
    if not row["built"]:
        return "not built"
    if not row["runs_here"]:  # it has all that it needs but the tiles
        return "refused" if not granted else "missing"
    return "usable" if row["pays"] else "slower"


def forced_set() -> str:
    """What VITKERN_ISA says; "" where it says nothing."""
    return os.environ.get("VITKERN_ISA", "")


def chosen_set(rows: list[dict[str, Any]]) -> str | None:
    """The set in use; None where VITKERN_ISA names one that cannot run here."""
    forced = forced_set()
    if forced:
        return next((r["name"] for r in rows if r["name"] == forced and r["runs_here"]), None)
    return next((r["name"] for r in rows if r["runs_here"] and r["pays"]), "portable")


def amx() -> dict[str, Any]:
    """Whether AMX is there, granted, and told of in CPUID leaf 0x1D."""
    from .. import _C

    facts = _C.cpu_facts()
    advertised = bool(facts["flags"].get("amx_tile") and facts["flags"].get("amx_bf16"))
    if not advertised:
        state = "absent"
    elif not facts["amx_usable"]:
        state = "refused"
    else:
        state = "works" if facts["amx_palettes"] else "works, leaf hidden"
    return {
        "state": state,
        "advertised": advertised,
        "granted": facts["amx_usable"],
        "palettes": facts["amx_palettes"],
    }


def precisions(chosen: str | None, seconds: float) -> dict[str, dict[str, Any]]:
    """How matmuls are computed at each precision and, if `seconds` is not 0, at which rate."""
    from .. import cpu
    from ..measure import limits

    of_sets = {"amx_fp16": "amx_fp16", "amx": "amx", "avx512_bf16": "pairs"}
    integers = "integers" if any(part in (chosen or "") for part in ("vnni", "int16")) else "floats"
    kind = of_sets.get(chosen or "", integers)
    how = dict(_MULTIPLIES[kind])
    if cpu.has_tiles(kind) and not cpu.has_tiles(cpu.engine_isa("fp32")):
        how["fp32"] = _MULTIPLIES["floats"]["fp32"]
    found: dict[str, dict[str, Any]] = {
        name: {"how": how[name], "gflops": None} for name in cpu.PRECISIONS
    }
    if seconds and chosen is not None:
        for name, row in found.items():  # fp32 comes first
            as_fp32 = row["how"] == "as fp32"
            of_fp32 = found["fp32"]["gflops"]
            row["gflops"] = of_fp32 if as_fp32 else limits.multiply_gflops(name, seconds)
    return found


def threads() -> dict[str, Any]:
    """The CPUs that the process may use, and the threads that PyTorch and vitkern take of them."""
    import torch

    try:
        from .. import cpu_threads

        taken: int | None = cpu_threads.threads()
    except ImportError:
        taken = None
    return {
        "mask": cpu_limits.mask(),
        "quota": cpu_limits.quota(),
        "available": cpu_limits.available(),
        "torch": torch.get_num_threads(),
        "vitkern": taken,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _caches() -> dict[str, int]:
    """{"L1d": 32768, ...}: bytes of the caches that CPU 0 reaches."""
    found = {}
    for folder in sorted(_CACHES.glob("index*")):
        kind, size = _text(folder / "type"), _text(folder / "size")
        if kind in ("Data", "Unified") and size.endswith("K"):
            name = f"L{_text(folder / 'level')}{'d' if kind == 'Data' else ''}"
            found[name] = 1024 * int(size[:-1])
    return found


def _memory(field: str) -> int | None:
    for line in _text(_MEMORY).splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    return None


def _first_flags() -> set[str]:
    for line in _text(pathlib.Path("/proc/cpuinfo")).splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
