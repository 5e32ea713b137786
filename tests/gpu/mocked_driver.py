"""Triton's own way to a first launch on a GPU that is not there: its driver, mocked, and no more.

The compiler, its checks of shared memory and threads, and the objects that start a kernel are real;
binaries are loaded and launches end in the mock. So every Triton that can be installed is tried as
a user's first forward would try it, on every architecture.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from vitkern.gpu.runtime.device import DeviceExecutor

# Bytes of shared memory that a block can have, as the drivers report them.
SHARED = {
    "sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448,
    "sm_120": 101376, "gfx90a": 65536, "gfx942": 65536, "gfx950": 163840, "gfx1100": 65536,
}  # fmt: skip


class MockedDriver:
    """What CompiledKernel and triton.compile ask of a driver; launches are written down."""

    def __init__(self, arch: str) -> None:
        self.arch, self.launched = arch, []  # (kernel's source, grid, arguments)
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED[arch]},
            load_binary=lambda name, code, shared, device: (name, name, 0, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        if self.arch.startswith("sm_"):
            return GPUTarget("cuda", int(self.arch[3:]), 32)
        return GPUTarget("hip", self.arch, 32 if self.arch.startswith("gfx1") else 64)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments):
            self.launched.append((source, (x, y, z), arguments))

        return launch


def _put(mock: object) -> object:
    """The mock in the place of Triton's driver; returns what was there."""
    name = "_active" if "_active" in vars(driver) else "active"  # of Triton before 3.5
    before = vars(driver)[name]
    setattr(driver, name, mock)
    return before


@contextlib.contextmanager
def pretended(arch: str) -> Iterator[tuple[DeviceExecutor, MockedDriver]]:
    """The executor that a user's GPU of this architecture would have, and its driver."""
    properties = types.SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-")
    if arch.startswith("sm_"):
        properties.major, properties.minor = divmod(int(arch[3:]), 10)
    mock = MockedDriver(arch)
    replaced = {
        (torch.cuda, "get_device_properties"): lambda device: properties,
        (torch.cuda, "device"): contextlib.nullcontext,
        (torch.version, "hip"): None if arch.startswith("sm_") else "6.4",
    }
    earlier = {place: getattr(*place) for place in replaced}
    before = _put(mock)
    try:
        for (where, name), value in replaced.items():
            setattr(where, name, value)
        yield DeviceExecutor(torch.device("cuda", 0), None), mock
    finally:
        _put(before)
        for (where, name), value in earlier.items():
            setattr(where, name, value)
