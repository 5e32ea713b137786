"""GPUs, their driver, Triton, and the compiled kernels that are on disk."""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any

from . import software

_NVIDIA = pathlib.Path("/proc/driver/nvidia/version")
_AMD = pathlib.Path("/sys/module/amdgpu")


def gpus() -> list[dict[str, Any]]:
    """Every device that PyTorch can use: name, architecture, memory, what starts kernels there."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "memory_bytes": properties.total_memory,
                "processors": properties.multi_processor_count,
                "kernels": _kernels(index),
            }
        )
    return found


def _kernels(index: int) -> str:
    import torch

    try:
        from ..gpu.runtime import device

        return device.executor(torch.device("cuda", index)).status()
    except (ImportError, RuntimeError, ValueError) as error:
        return f"PyTorch's references only ({error})"


def torch_is_built_for() -> str:
    """ "cpu", "cuda 12.8" or "rocm 6.4"."""
    import torch

    if torch.version.cuda:
        return f"cuda {torch.version.cuda}"
    return f"rocm {torch.version.hip}" if torch.version.hip else "cpu"


def driver() -> str | None:
    """The GPU driver of the system, whether or not PyTorch can use it."""
    try:
        first = _NVIDIA.read_text().splitlines()[0]
        return first.removeprefix("NVRM version:").strip()
    except (OSError, IndexError):
        pass
    if _AMD.is_dir():
        try:
            return f"amdgpu {(_AMD / 'version').read_text().strip()}"
        except OSError:  # the kernel's own has no version but the kernel's
            return "amdgpu of the kernel"
    return None


def triton() -> dict[str, Any]:
    """Its version, and why it cannot compile the kernels; "" where it can."""
    found = software.version("triton") or software.version("pytorch-triton-rocm")
    if found is None:
        return {"version": None, "problem": "not installed"}
    try:
        import triton as module

        from ..gpu import triton_version

        triton_version.require(module.__version__)
    except ImportError as error:
        return {"version": found, "problem": str(error)}
    return {"version": module.__version__, "problem": ""}


def kernel_cache() -> dict[str, Any]:
    """The user's cache of compiled kernels: where, how many of each kind, whether it can grow."""
    from ..gpu.runtime import eviction

    try:
        folder = eviction.default_folder()
        most: int | None = eviction.limit()
        problem = ""
    except (RuntimeError, ValueError) as error:  # a user without a home; a limit that is no number
        return {"folder": None, "kernels": {}, "bytes": 0, "most": None, "problem": str(error)}
    kept = eviction.contents(folder)
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if not (there.is_dir() and os.access(there, os.W_OK)):
        problem = f"{there} cannot be written: every process compiles its kernels again"
    return {
        "folder": str(folder),
        "kernels": {name: count for name, (count, _) in kept.items()},
        "bytes": sum(size for _, size in kept.values()),
        "most": most,
        "problem": problem,
    }


def binaries() -> dict[str, Any]:
    """The folder of kernels compiled ahead of time that a GPU would use here, or why there is none.

    text: one line for people.
    """
    none: dict[str, Any] = {"folder": None, "kernels": 0, "archs": [], "problem": ""}
    try:
        from ..gpu.runtime import device

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the text says the same
            found = device.binaries()
    except ImportError as error:
        return {**none, "text": f"none: {error}"}
    except (RuntimeError, OSError, ValueError) as error:
        return {**none, "text": f"none: {error}", "problem": str(error)}
    if found.store is None:
        unfit = found.text if "is not used" in found.text else ""
        return {**none, "text": f"none: {found.text}", "problem": unfit}
    archs = list(found.store.archs)
    folder = str(found.store.folder)
    return {**none, "folder": folder, "kernels": len(found.store), "archs": archs,
            "text": found.text}  # fmt: skip
