"""All that a GPU benchmark asks of the GPU itself: its clock, its graphs, its memory, its facts."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vitkern.measure.machine import describe_gpu, find_gpu
from vitkern.measure.timing import EventClock

GRAPH_WARM_UPS = 3  # calls before a capture: compilers, libraries and allocators settle
# What empties a cache of unknown size: AMD's last one (256 MiB on MI300X) is not told.
UNKNOWN_CACHE = 256 << 20


class NotInstalled(ImportError):
    """A competitor's package is not there: the report says just that."""


class LeftOut(ValueError):
    """A competitor does not do this, or was not asked to; the text says which."""


class DeviceLost(RuntimeError):
    """After such an error every later call fails too: the run must end."""


class Device:
    """A GPU as the benchmarks see it; `cuda` is torch.cuda or what stands in for it in a test."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = device, cuda
        cuda.set_device(device)
        self.properties = cuda.get_device_properties(device)
        self._clocks: dict[bool, EventClock] = {}

    def clock(self, cold: bool) -> EventClock:
        """`cold` empties the L2 cache before every call, as an operator between others finds it."""
        if cold not in self._clocks:
            cache = 0 if torch.version.hip else getattr(self.properties, "L2_cache_size", 0)
            size = 2 * (cache or UNKNOWN_CACHE) if cold else 0
            with torch.inference_mode(False):  # such a tensor could not be written in training
                scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
                self._clocks[cold] = EventClock(self.cuda, scratch if cold else None)
        return self._clocks[cold]

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def free(self) -> None:
        """Give back what nobody holds any more, so that the next competitor starts with all."""
        gc.collect()
        self.cuda.empty_cache()

    def graph(self, function: Callable[[], object]) -> Callable[[], object]:
        """`function` captured once; each call replays it and returns the same, refilled result."""
        stream, here = self.cuda.Stream(), self.cuda.current_stream()
        stream.wait_stream(here)
        with self.cuda.stream(stream):
            for _ in range(GRAPH_WARM_UPS):
                function()
        here.wait_stream(stream)
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph):
            result = function()

        def replay() -> object:
            graph.replay()
            return result

        return replay

    def reason(self, error: BaseException) -> str:
        """Why something was left out, in one line; DeviceLost where nothing can go on."""
        if out_of_memory(error):
            return "out of memory"
        if isinstance(error, NotInstalled | LeftOut):
            return "not installed" if isinstance(error, NotInstalled) else str(error)
        first = f"{type(error).__name__}: {error}".strip().splitlines()[0].split(". ")[0][:200]
        try:
            self.synchronize()  # an error that stays shows here again
        except RuntimeError:
            raise DeviceLost(f"the device stopped working: {first}") from error
        return first

    def compile(self, function: Callable, mode: str) -> Callable:
        """torch.compile for this one shape."""
        return torch.compile(function, mode=None if mode == "default" else mode, dynamic=False)

    @functools.cached_property
    def arch(self) -> str:
        """ "sm_80" or "gfx942"."""
        return str(self.facts()["capability"])

    def facts(self) -> dict[str, object]:
        return describe_gpu(self.properties)


def open_device(name: str) -> Device:
    """The GPU of that name, ready; a ValueError in one line where there is none."""
    return Device(find_gpu(name))


@contextlib.contextmanager
def computing_in(precision: str) -> Iterator[None]:
    """fp32 matmuls in TF32 or not, in PyTorch and vitkern alike, as `precision` says."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"  # convolutions: True by default
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def out_of_memory(error: BaseException) -> bool:
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        "out of memory" in said or "alloc_failed" in said  # graphs and cuBLAS say it this way
    )
