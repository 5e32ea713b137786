"""All facts that `vitkern doctor` shows, section by section, as plain values."""

from __future__ import annotations

from typing import Any

from ..measure.machine import torch_runs_bf16
from . import graphics, processor, software


def examine(seconds: float = 0.1) -> dict[str, Any]:
    """Facts of this machine and this process; `seconds` for the rate of each precision, 0: none."""
    extension = software.extension()
    built = not extension["problem"]
    sets = processor.instruction_sets() if built else []
    chosen = next((row["name"] for row in sets if row["state"] == "in use"), None)
    amx = processor.amx() if built else {"state": "unknown"}
    settings = software.settings()
    hidden = amx["state"] == "works, leaf hidden" and "ONEDNN_MAX_CPU_ISA" not in settings
    torch_bf16 = None
    if hidden and seconds:  # a process of its own, which may die
        torch_bf16 = "works" if torch_runs_bf16() else "dies"
    facts: dict[str, Any] = {
        "versions": software.versions(),
        "processor": processor.processor(),
        "threads": processor.threads(),
        "instruction_sets": sets,
        "instruction_set": chosen,
        "forced_set": processor.forced_set(),
        "amx": amx,
        "torch_bf16": torch_bf16,
        "measured": bool(seconds and chosen),
        "precisions": processor.precisions(chosen, seconds) if built else {},
        "gpus": graphics.gpus(),
        "driver": graphics.driver(),
        "torch_is_built_for": graphics.torch_is_built_for(),
        "triton": graphics.triton(),
        "kernel_cache": graphics.kernel_cache(),
        "binaries": graphics.binaries(),
        "extension": extension,
        "openmp": software.openmp(),
        "extras": software.extras(),
        "settings": settings,
    }
    return facts
