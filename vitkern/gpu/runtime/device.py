"""The executor of a real GPU: binaries built ahead of time where there are any, else Triton's JIT.

`use_binaries(folder)` or the environment variable VITKERN_BINARIES names the folder that
`python -m vitkern aot` wrote, or the package vitkern-kernels has one (lookup.py). Without a
matching binary Triton compiles the same launch on its first call (seconds, then cached on disk);
`status` says which of the two served so far.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from .. import compiler
from ..configs import nearest_arch
from ..launch import Launch, Variant
from . import binary, lookup


class DeviceExecutor:
    """Runs launches on one CUDA or ROCm device, on PyTorch's current stream there."""

    def __init__(self, device: torch.device, store: binary.Store | None) -> None:
        self.device = device
        self.real_arch = arch_name(device)
        built_for = store.arch_for(self.real_arch) if store is not None else None
        self.arch = nearest_arch(built_for or self.real_arch)  # whose settings are used
        self.processors: int = torch.cuda.get_device_properties(device).multi_processor_count
        self._compiled = 0  # launches that Triton's compiler served
        self._kernels: dict[Variant, Any] = {}  # which it compiled
        self._binaries: binary.BinaryExecutor | None = None
        if store is not None and built_for is not None:
            self._binaries = binary.BinaryExecutor(store, device.index, built_for)
        self._foreign = store is not None and built_for is None

    def run(self, launch: Launch) -> None:
        if self._binaries is not None and self._binaries.has(launch):
            self._binaries.run(launch)
            return
        with torch.cuda.device(self.device):
            kernel = self._kernels.get(launch.variant)
            if kernel is None:
                kernel = self._kernels[launch.variant] = compiler.compile_here(launch.variant)
            kernel[launch.grid](*launch.arguments.values())
        self._compiled += 1

    def binaries_for(self, launch: Launch) -> binary.BinaryExecutor | None:
        """What starts a plan's launch from C++; None if there is no binary for it."""
        if self._binaries is None or not self._binaries.has(launch):
            return None
        return self._binaries

    def status(self) -> str:
        """One line for `explain()`: what starts the kernels here."""
        if self._foreign:
            source = f"compiled by Triton at first use (no binaries for {self.real_arch})"
        elif self._binaries is None:
            source = f"compiled by Triton at first use (no binaries: {binaries().text})"
        else:
            source = f"binaries of {self._binaries.store.folder} for {self._binaries.arch}"
            source += ", Triton's compiler where one is missing"
        launched = self._binaries.launched if self._binaries else 0
        counts = {"binaries": launched, "Triton's compiler": self._compiled}
        served = ", ".join(f"{count} by {name}" for name, count in counts.items() if count)
        return f"{source}; launches so far: {served or 'none'}"


def arch_name(device: torch.device) -> str:
    """ "sm_80" or "gfx942"."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


_executors: dict[torch.device, DeviceExecutor] = {}
_folder: str | None = None


def use_binaries(folder: str | os.PathLike | None) -> None:
    """Launch this folder's binaries from now on; None for Triton's compiler alone.

    A model that has run on a GPU keeps what it has until `model.repack()`.
    """
    global _folder
    chosen = "" if folder is None else os.fspath(folder)
    lookup.find(chosen)  # a bad folder is an error here, not in the middle of a forward
    _folder = chosen
    _executors.clear()


def binaries() -> lookup.Found:
    """The binaries that devices use from now on, and where they are or why there are none."""
    return lookup.find(_folder)


def executor(device: torch.device) -> DeviceExecutor:
    """The executor of a device, made at its first use."""
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    found = _executors.get(device)
    if found is None:
        found = _executors[device] = DeviceExecutor(device, binaries().store)
    return found
