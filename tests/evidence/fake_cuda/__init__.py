"""A stand-in for the CUDA driver: builds it, and executes its launches in the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback

import pytest

SOURCES = pathlib.Path(__file__).parent
ILLEGAL_ADDRESS, MISALIGNED, FAILED = 700, 716, 719  # CUDA's numbers
FORMATS = {"i32": "<i", "i64": "<q", "fp32": "<f"}  # and pointers


def build(source: str, library: pathlib.Path) -> pathlib.Path:
    """Compile one of the stand-ins; skips the test where that is impossible."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if sys.platform != "linux" or not compiler:
        pytest.skip("the stand-in driver needs Linux and a C++ compiler")
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    command += [SOURCES / source, "-o", library]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return library


class Launch(ctypes.Structure):
    """fake_cuda.cpp's structure of the same name."""

    _fields_ = [
        ("image", ctypes.c_void_p),
        ("image_size", ctypes.c_uint64),
        ("kernel", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("offsets", ctypes.POINTER(ctypes.c_int)),
        ("sizes", ctypes.POINTER(ctypes.c_int)),
        ("parameters", ctypes.c_int),
        ("device", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint),
        ("shared", ctypes.c_uint),
    ]


class FakeCuda:
    """The driver library at `path`, with the sources of the binaries that it will be given."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        self.library.fake_journal.restype = ctypes.c_char_p
        self._sources = {}
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))(self._execute)
        self.library.fake_execute(self._callback)
        self.executed: list[tuple[int, str]] = []  # device, kernel
        self.reset()

    def reset(self, *capabilities: int) -> None:
        """Forget everything; the devices are of these compute capabilities (80)."""
        capabilities = capabilities or (80,)
        self.library.fake_reset(
            (ctypes.c_int * len(capabilities))(*capabilities), len(capabilities)
        )
        self.executed.clear()

    def register(self, image: bytes, kernel, arguments, constants) -> None:
        """Say what a binary was compiled from: `arguments` are (name, type, divisible)."""
        key = hashlib.sha256(image).digest()
        self._sources[key] = (kernel, tuple(arguments), dict(constants))

    def journal(self) -> list[str]:
        """The calls so far, with what came of them."""
        return self.library.fake_journal().decode().splitlines()

    def fail(self, call: str, status: int) -> None:
        """Let the next call of this function fail."""
        self.library.fake_fail(call.encode(), status)

    def pause(self, seconds: float) -> None:
        """Let each launch take so long before it reads its parameters."""
        self.library.fake_pause(int(seconds * 1e6))

    # ---- What a program besides the launcher does with the driver ---------------

    def call(self, name: str, *arguments) -> None:
        status = getattr(self.library, name)(*arguments)
        assert status == 0, f"{name}: {status}, {self.journal()[-1]}"

    def current_context(self) -> int | None:
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    @contextlib.contextmanager
    def context(self, device: int):
        """Make a device's context current, as PyTorch does."""
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield context.value
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(context))

    def stream(self) -> int:
        """A new stream of the current device."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 0)
        return stream.value

    @contextlib.contextmanager
    def capturing(self, stream: int):
        """Yields a list that holds the graph when the block ends."""
        graph, executable, result = ctypes.c_void_p(), ctypes.c_void_p(), []
        self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
        try:
            yield result
        finally:
            status = self.library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        assert status == 0, self.journal()[-1]
        self.call(
            "cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0)
        )
        result.append(executable.value)

    def replay(self, graph: int, stream: int) -> None:
        self.call("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    # ---- Executing a launch ------------------------------------------------------

    def _execute(self, pointer) -> int:
        launch = pointer.contents
        try:
            status, why = self._interpret(launch)
        except Exception:
            status, why = FAILED, traceback.format_exc()
        if status:
            self.library.fake_explain(why.encode())
        else:
            self.executed.append((launch.device, launch.kernel.decode()))
        return status

    def _interpret(self, launch: Launch) -> tuple[int, str]:
        image = ctypes.string_at(launch.image, launch.image_size)
        kernel, arguments, constants = self._sources[hashlib.sha256(image).digest()]
        sizes = launch.sizes[: launch.parameters]
        raw = [
            ctypes.string_at(launch.data + offset, size)
            for offset, size in zip(launch.offsets[: launch.parameters], sizes, strict=True)
        ]
        wanted = [struct.calcsize(FORMATS.get(kind, "<Q")) for _, kind, _ in arguments]
        if sizes != [*wanted, 8, 8]:
            return FAILED, f"parameters of {sizes} bytes, the source has {wanted} and two pointers"
        if any(raw[-2]) or any(raw[-1]):
            return FAILED, "the scratch pointers are not null"
        values = {}
        for (name, kind, divisible), data in zip(arguments, raw, strict=False):
            (number,) = struct.unpack(FORMATS.get(kind, "<Q"), data)
            if divisible and number % 16:
                return MISALIGNED, f"{name} = {number} breaks the promise of a multiple of 16"
            if kind[0] == "*" and number:
                if not self.library.fake_readable(ctypes.c_void_p(number)):
                    return ILLEGAL_ADDRESS, f"{name} = {number:#x} is no memory"
            values[name] = (kind, number)
        from tests.evidence.interpreter import Interpreter  # knows one Triton, the launcher any

        Interpreter().run_raw(kernel, tuple(launch.grid), values, constants)
        return 0, ""


_folder = tempfile.TemporaryDirectory(prefix="fake_cuda")  # goes when Python ends


@functools.cache
def fake_cuda() -> FakeCuda:
    """The one of this process."""
    return FakeCuda(build("fake_cuda.cpp", pathlib.Path(_folder.name, "libcuda.so.1")))
