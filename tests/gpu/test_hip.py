"""The launcher's calls to AMD's HIP, which differ in names and in how a device is made current."""

import ctypes
import struct

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import build
from tests.evidence.fake_cuda import kernels as sample
from tests.evidence.fake_cuda.kernels import values_of
from vitkern import _C


class Record(ctypes.Structure):
    """fake_hip.cpp's structure of the same name."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("device", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("values", ctypes.c_uint64 * 8),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = build("fake_hip.cpp", tmp_path_factory.mktemp("fake") / "libamdhip64.so")
    library = ctypes.CDLL(str(path))
    library.fake_last.restype = ctypes.POINTER(Record)
    library.fake_kernel.restype = ctypes.c_char_p
    return library


@pytest.fixture
def launch():
    return sample.affine_launch(torch.zeros(10, 48), torch.zeros(10, 48))


def load(library, launch, **changes):
    variant = launch.variant
    manifest = {
        "image": sample.image_of(variant, "gfx942"),
        "name": "affine",
        "arch": "gfx942",
        "num_warps": 4,
        "warp_size": 64,
        "shared": sample.compiled(variant, "gfx942").metadata.shared,
        "parameters": sample.arguments_of(variant),
        "hidden": sample.HIDDEN,
    }
    return _C.Kernel(_C.Driver("hip", library._name), 1, **{**manifest, **changes})


def test_launch_reaches_hip(library, launch):
    values = values_of(launch)
    library.fake_parameters((ctypes.c_int * 8)(8, 8, 4, 4, 4, 4, 8, 8), 8)
    load(library, launch, shared=1024).launch((3, 2, 1), 77, values)
    last = library.fake_last().contents
    assert (tuple(last.grid), tuple(last.block), last.shared) == ((3, 2, 1), (256, 1, 1), 1024)
    assert (last.device, last.stream, library.fake_kernel()) == (1, 77, b"affine")
    (factor,) = struct.unpack("<I", struct.pack("<f", 0.5))
    assert list(last.values) == [*values[:2], factor, 10, 48, 48, 3 << 40, 0]
    device = ctypes.c_int()
    library.hipGetDevice(ctypes.byref(device))
    assert device.value == 0, "the caller's device is current again"


def test_devices_are_described(library):
    driver = _C.Driver("hip", library._name)
    wanted = {"name": "Stand-in Instinct", "arch": "gfx942", "shared_limit": 65536}
    assert (driver.api, driver.device_count, driver.device(0)) == ("hip", 2, wanted)
    with pytest.raises(_C.DriverError, match="hipGetDevicePropertiesR0600 failed with error 101"):
        driver.device(2)


def test_wrong_binaries_are_refused(library, launch):
    with pytest.raises(ValueError, match=r"compiled for gfx950, but GPU 1 .* is gfx942"):
        load(library, launch, arch="gfx950")
    with pytest.raises(ValueError, match="65537 bytes of shared memory"):
        load(library, launch, shared=65537)
    with pytest.raises(ValueError, match="is not for an AMD GPU"):
        load(library, launch, image=sample.image_of(launch.variant, "sm_80"))
    with pytest.raises(_C.DriverError, match=r"hipModuleGetFunction.*named symbol not found"):
        load(library, launch, name="missing")


def test_grids_are_counted_in_threads(library, launch):
    values = values_of(launch)
    with pytest.raises(ValueError, match="no GPU starts a grid"):
        load(library, launch).launch((2**24, 1, 1), 0, values)


def test_graphs_are_cudas(library, launch):
    """Plans fall back to their launches, and explain() gives this reason."""
    launches = _C.LaunchList()
    launches.add(load(library, launch), launch.grid, values_of(launch))
    with pytest.raises(_C.DriverError, match="graphs of launches are made on NVIDIA GPUs only"):
        _C.Graph(launches)
    launches.run(0)
    assert library.fake_kernel() == b"affine"
