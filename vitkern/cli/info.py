"""Show versions, CPU features, the instruction set in use, threads and paths."""

from __future__ import annotations

import argparse
import json
import os
import pathlib


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


_VITKERNS = (
    "VITKERN_ISA",
    "VITKERN_BINARIES",
    "VITKERN_CACHE",
    "VITKERN_CACHE_SIZE",
    "VITKERN_CUDA_GRAPHS",
)


def facts() -> dict[str, object]:
    """What decides how vitkern runs here, name by name."""
    import vitkern

    from ..measure.machine import describe, features

    found: dict[str, object] = {"vitkern": vitkern.__version__, **describe()}
    try:
        from .. import _C

        found["extension"] = _C.__file__
        found["features"] = features()
    except ImportError as error:
        found["extension"] = f"not built ({error}): install vitkern where a C++ compiler is"
    found["package"] = str(pathlib.Path(vitkern.__file__).parent)
    found["gpu"] = _gpu()
    found["binaries"] = _binaries()
    found["environment"] = {
        name: os.environ[name]
        for name in (*_VITKERNS, "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")
        if name in os.environ
    }
    return found


def _gpu() -> str:
    """The GPU in use and what starts the kernels there."""
    import torch

    if not torch.cuda.is_available():
        return "none that PyTorch can use"
    try:
        from ..gpu.runtime import device

        status = device.executor(torch.device("cuda")).status()
    except (ImportError, RuntimeError) as error:
        status = f"PyTorch's references only ({error})"
    return f"{torch.cuda.get_device_name()}: {status}"


def _binaries() -> str:
    """The folder of compiled kernels that a GPU would use here, or why there is none."""
    try:
        from ..gpu.runtime import device

        found = device.binaries()
    except (ImportError, RuntimeError) as error:
        return f"none: {error}"
    return found.text if found.store is not None else f"none: {found.text}"


def run(given: argparse.Namespace) -> int:
    found = facts()
    if given.json:
        print(json.dumps(found, indent=1, default=str))
        return 0
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k}={_short(v)}" for k, v in value.items()) or "-"
        print(f"{name:<12} {value}")
    return 0


def _short(value: object) -> str:
    """A list of names joined by +; of {name: bool}, the names that hold."""
    if isinstance(value, dict):
        value = [name for name, holds in value.items() if holds]
    return "+".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
