"""A GPU for tests: torch.cuda's calls on CPU tensors, so that a benchmark for GPUs runs here.

As a plugin of pytest (`-p pretend_gpu`) it puts itself in the place of the real device.
"""

import contextlib
import time
import types

import pytest
import torch

from benchmarks.gpu import device, limits

NAME = "Pretended GPU"


class Event:
    def __init__(self, enable_timing=False):
        assert enable_timing, "an event without timing cannot be asked for a time"
        self.at = None

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        assert self.at is not None, "waiting for an event that was never recorded"

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class Stream:
    def wait_stream(self, other):
        assert isinstance(other, Stream)


class CUDAGraph:
    """Its results stay as they were captured: inputs do not change here."""

    captured = False

    def replay(self):
        assert self.captured, "replayed before it was captured"


class Cuda:
    """What of torch.cuda the benchmarks use, as an A100 would answer."""

    Event, Stream, CUDAGraph = Event, Stream, CUDAGraph

    def __init__(self):
        self.freed = 0
        self.properties = types.SimpleNamespace(
            name=NAME, major=8, minor=0, multi_processor_count=108, total_memory=40 << 30,
            L2_cache_size=1 << 16, clock_rate=1_410_000, memory_clock_rate=1_215_000,
            memory_bus_width=5120, uuid="",
        )  # fmt: skip

    def set_device(self, which):
        pass

    def get_device_properties(self, which):
        return self.properties

    def synchronize(self):
        pass

    def empty_cache(self):
        self.freed += 1

    def current_stream(self):
        return Stream()

    @contextlib.contextmanager
    def stream(self, stream):
        assert isinstance(stream, Stream)
        yield

    @contextlib.contextmanager
    def graph(self, graph):
        yield
        graph.captured = True


class Pretended(device.Device):
    """The real class with this torch.cuda; a compiler would take minutes."""

    def __init__(self):
        super().__init__(torch.device("cpu"), Cuda())

    def free(self):
        self.cuda.empty_cache()  # collecting garbage takes as long as a case here

    def compile(self, function, mode):
        return lambda *arguments: function(*arguments)


def install(monkeypatch=None):
    """In the place of the real device, and smaller matrices for the limits."""
    put = monkeypatch.setattr if monkeypatch else setattr
    put(device, "open_device", lambda name: Pretended())
    put(limits, "MATMUL_SIZES", (64,))
    put(limits, "COPIED_BYTES", 1 << 20)


@pytest.hookimpl(tryfirst=True)  # before the benchmarks open their device
def pytest_configure(config):
    install()
