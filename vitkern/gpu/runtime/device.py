"""The executor of a real GPU: every kernel is a compiled one, started by the C++ launcher.

`use_binaries(folder)` or the environment variable VITKERN_BINARIES names the folder that
`python -m vitkern aot` wrote, or the package vitkern-kernels has one (lookup.py). A kernel that is
not there is compiled by Triton when it is first needed (seconds) and kept in the user's cache
(cache.py); `status` says what served so far.
"""

from __future__ import annotations

import os
import threading

import torch

from ... import _C
from ..configs import nearest_arch
from ..launch import Executor, Launch
from . import binary, lookup
from .cache import Cache


class DeviceExecutor(Executor):
    """Runs launches on one CUDA or ROCm device, on PyTorch's current stream there."""

    def __init__(
        self,
        device: torch.device,
        store: binary.Store | None,
        cache: Cache | None = None,
        driver: _C.Driver | None = None,
    ) -> None:
        self.device = device
        self.real_arch = arch_name(device)
        self._built_for = store.arch_for(self.real_arch) if store is not None else None
        self.arch = nearest_arch(self._built_for or self.real_arch)  # whose settings are used
        self.processors: int = torch.cuda.get_device_properties(device).multi_processor_count
        self._store, self._cache, self._driver = store, cache, driver
        self._native: binary.BinaryExecutor | None = None
        self._lock = threading.Lock()

    @property
    def native(self) -> binary.BinaryExecutor:
        """What starts kernels; made at the first launch, which needs the driver."""
        if self._native is None:
            with self._lock:
                self._native = self._native or self._make()
        return self._native

    def _make(self) -> binary.BinaryExecutor:
        cache = self._cache or Cache(self.real_arch)
        store, arch = self._store if self._built_for else None, self._built_for or self.real_arch
        return binary.BinaryExecutor(store, self.device.index, arch, self._driver, cache=cache)

    def run(self, launch: Launch) -> None:
        self.native.run(launch)

    def status(self) -> str:
        """One line for `explain()`: where the kernels come from here."""
        if self._store is None:
            source = f"compiled by Triton at first use (no binaries: {binaries().text})"
        elif not self._built_for:
            source = f"compiled by Triton at first use (no binaries for {self.real_arch})"
        else:
            source = f"binaries of {self._store.folder} for {self._built_for}"
            source += ", Triton's compiler where one is missing"
        made = self._native
        if made is None:
            return f"{source}; launches so far: none"
        kept = f" of {made.cache.folder}" if made.cache and made.cache.folder else ""
        compiled = made.cache.compiled if made.cache else 0
        counts = {
            "of binaries": made.loaded["binaries"],
            f"of the cache{kept}": made.loaded["cache"] - compiled,
            "compiled now": compiled,
        }
        served = ", ".join(f"{count} {where}" for where, count in counts.items() if count)
        return f"{source}; kernels: {served or 'none'}; launches so far: {made.launched or 'none'}"


def arch_name(device: torch.device) -> str:
    """ "sm_80" or "gfx942"."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


_executors: dict[torch.device, DeviceExecutor] = {}
_folder: str | None = None


def use_binaries(folder: str | os.PathLike | None) -> None:
    """Launch this folder's binaries from now on; None: none but those of the user's cache.

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
