"""The executor of a GPU that is not there: Triton's compiler and vitkern's launcher are real.

Only the vendor's driver is a stand-in (tests/evidence/fake_cuda), which reads the binaries that
Triton made, and Triton's own driver refuses to be asked: starting it needs a C compiler. So every
Triton that can be installed is tried as a user's first forward would try it, on every architecture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
import tempfile
import types
from collections.abc import Iterator
from typing import NoReturn

import torch
from triton.runtime.driver import driver

from tests.evidence.fake_cuda import build, fake_cuda
from vitkern import _C
from vitkern.gpu.configs import nearest_arch
from vitkern.gpu.hardware import CHIPS
from vitkern.gpu.runtime.cache import Cache
from vitkern.gpu.runtime.device import DeviceExecutor

# Bytes of shared memory that a block can have on AMD's chips, as their driver reports it.
SHARED = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840, "gfx1100": 65536}


class NoDriver:
    """In the place of Triton's driver."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"Triton's driver was asked for {name}, which needs a C compiler")


def _put(driver_of_triton: object) -> object:
    """This in the place of Triton's driver; returns what was there."""
    name = "_active" if "_active" in vars(driver) else "active"  # of Triton before 3.5
    before = vars(driver)[name]
    setattr(driver, name, driver_of_triton)
    return before


_folder = tempfile.TemporaryDirectory(prefix="fake_hip")  # goes when Python ends


@functools.cache
def _hip() -> ctypes.CDLL:
    path = build("fake_hip.cpp", pathlib.Path(_folder.name, "libamdhip64.so"))
    return ctypes.CDLL(str(path))


def vendors_driver(arch: str) -> _C.Driver:
    """The stand-in with one device of this architecture."""
    if arch.startswith("sm_"):
        fake_cuda().reset(int(arch[3:]))
        return _C.Driver("cuda", fake_cuda().path)
    _hip().fake_device(arch.encode(), ctypes.c_size_t(SHARED[arch]))
    return _C.Driver("hip", _hip()._name)


@contextlib.contextmanager
def pretended(arch: str, cache: str | None = None) -> Iterator[DeviceExecutor]:
    """The executor that a user's GPU of this architecture would have; tensors are the CPU's.

    Kernels are kept in the folder `cache`, or in one of its own.
    """
    count = CHIPS[nearest_arch(arch)].processors
    properties = types.SimpleNamespace(
        gcnArchName=f"{arch}:sramecc+:xnack-", multi_processor_count=count
    )
    if arch.startswith("sm_"):
        properties.major, properties.minor = divmod(int(arch[3:]), 10)
    replaced = {
        (torch.cuda, "get_device_properties"): lambda device: properties,
        (torch.version, "hip"): None if arch.startswith("sm_") else "6.4",
    }
    earlier = {place: getattr(*place) for place in replaced}
    before = _put(NoDriver())
    try:
        for (where, name), value in replaced.items():
            setattr(where, name, value)
        with tempfile.TemporaryDirectory() as own:
            kept = Cache(arch, cache or own)
            made = DeviceExecutor(torch.device("cuda", 0), None, kept, vendors_driver(arch))
            made.native.memory, made.native.stream = torch.device("cpu"), lambda: 0
            yield made
    finally:
        _put(before)
        for (where, name), value in earlier.items():
            setattr(where, name, value)
