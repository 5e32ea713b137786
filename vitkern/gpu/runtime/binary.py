"""Compiled kernels: reading a folder of them, and launching them through C++.

A folder holds `manifest.json` and one file per binary: `gpu/aot/build.py` writes both, and
`gpu/manifest.py` reads them. A binary is found by the launch's variant and the architecture, so a
launch with other dtypes, constants or alignment never meets it; what is in no folder comes from
`cache.py`, which compiles it once. The C++ launcher (`csrc/cuda`) checks what only the values of a
call can break: the promised multiples of 16, ranges and the grid.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from ... import _C
from .. import manifest
from ..compiler import source_of
from ..launch import Executor, Launch, Variant
from ..manifest import MANIFEST

if TYPE_CHECKING:
    from .cache import Cache


class BinaryError(RuntimeError):
    """A folder of compiled kernels that cannot be used as it is."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One binary of a manifest."""

    id: str  # Variant.name
    kernel: str  # the symbol in the file
    arch: str
    file: pathlib.Path
    sha256: str
    num_warps: int  # of a block, with those that Triton may have added
    warp_size: int
    num_stages: int
    shared: int  # bytes for a block
    hidden_parameters: int  # pointers after the arguments, which are null
    arguments: tuple[tuple[str, str, bool], ...]  # name, type, promised to be a multiple of 16
    constants: dict[str, Any] = dataclasses.field(hash=False)
    source: str = ""  # a hash of the kernel's source; "" where the manifest has none
    code: bytes | None = dataclasses.field(default=None, hash=False, repr=False)  # once it is read

    def image(self) -> bytes:
        """The file's bytes, which must be those that were built."""
        if self.code is not None:
            return self.code
        try:
            return manifest.binary(self.file, self.sha256)
        except OSError as error:
            why = error.strerror or error
            raise BinaryError(
                f"vitkern: binary {self.file} cannot be read ({why}): build again"
            ) from error
        except ValueError as error:
            raise BinaryError(
                f"vitkern: binary {self.file} is not the one in {MANIFEST} "
                f"({error}): it is damaged or replaced, build again"
            ) from error


class Store:
    """The binaries of a folder; files are read when they are first needed."""

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)
        found = self._read()
        self.vitkern: str = found["vitkern"]
        self.triton: str = found["triton"]
        self.sources = found.get("sources")  # of the kernels (manifest.sources); None: not said
        self._entries: dict[tuple[str, str], Entry] = {}
        for row in found["kernels"]:
            try:
                entry = entry_from(row, self.folder)
            except ValueError as error:
                name = manifest.shown(row.get("id")) if isinstance(row, dict) else "?"
                raise BinaryError(
                    f"vitkern: {self.folder / MANIFEST} describes kernel {name} wrongly "
                    f"({error}): build again"
                ) from error
            if self._entries.setdefault((entry.id, entry.arch), entry) is not entry:
                raise BinaryError(
                    f"vitkern: {self.folder / MANIFEST} lists kernel {entry.id} for {entry.arch} "
                    "twice: build again"
                )

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures there are binaries for."""
        return tuple(dict.fromkeys(arch for _, arch in self._entries))

    def arch_for(self, device: str) -> str | None:
        """The newest of them that a device of this architecture runs: "sm_86" for "sm_89"."""
        able = [arch for arch in self.archs if _C.runs_on(arch, device)]
        return max(able, key=lambda arch: (arch == device, len(arch), arch), default=None)

    def find(self, variant: Variant, arch: str) -> Entry | None:
        """The binary for a launch's variant, or None if there is none."""
        return self._entries.get((variant.name, arch))

    def verify(self) -> None:
        """Raise BinaryError unless every file is there and whole."""
        for entry in self:
            entry.image()

    def _read(self) -> dict:
        try:
            return manifest.read(self.folder)
        except OSError as error:
            raise BinaryError(
                f"vitkern: {self.folder} is no folder of compiled kernels: "
                f"{MANIFEST} cannot be read ({error.strerror or error})"
            ) from error
        except ValueError as error:
            raise BinaryError(f"vitkern: {self.folder / MANIFEST} {error}: build again") from error


def entry_from(row: dict, folder: pathlib.Path) -> Entry:
    """The entry that a manifest's row describes; ValueError or BinaryError if it is wrong."""
    manifest.check(row)
    file = manifest.place(folder, row["file"])
    for scratch in ("global_scratch", "profile_scratch"):
        if row[scratch][0] != 0:
            raise BinaryError(
                f"vitkern: kernel {row['id']} needs {row[scratch][0]} bytes of {scratch}, "
                "which the launcher does not provide: build it without tensor descriptors made "
                "on the device and without Triton's profiler"
            )
    same = (
        "id", "kernel", "arch", "sha256", "num_warps", "warp_size", "num_stages", "shared",
        "hidden_parameters",
    )  # fmt: skip
    return Entry(
        arguments=tuple(tuple(argument) for argument in row["arguments"]),
        file=file,
        constants=row["constants"],
        source=row.get("source", ""),
        **{name: row[name] for name in same},
    )


def current_stream(index: int) -> int:
    """The handle of PyTorch's current stream on a GPU."""
    # torch.cuda.current_stream(index).cuda_stream makes an object, for 2 us.
    return torch._C._cuda_getCurrentRawStream(index)


@functools.lru_cache
def default_driver() -> _C.Driver:
    """The driver of the GPUs that this PyTorch is built for."""
    return _C.Driver("hip" if torch.version.hip else "cuda")


class BinaryExecutor(Executor):
    """Launches compiled kernels on one device, in order with PyTorch's own work there.

    Kernels come from a folder of binaries for `arch`, where it has them, else from the cache.
    `stream` returns the handle of the stream to launch on (PyTorch's current one by default);
    tensors must be on `memory` (the device itself by default).
    """

    def __init__(
        self,
        store: Store | None,
        device_index: int,
        arch: str,
        driver: _C.Driver | None = None,
        stream: Callable[[], int] | None = None,
        memory: torch.device | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.store, self.device_index, self.arch, self.cache = store, device_index, arch, cache
        self.driver = driver or default_driver()
        self.stream = stream or self._current_stream
        self.memory = memory or torch.device("cuda", device_index)
        self.launched = 0  # kernels so far
        self.loaded = {"binaries": 0, "cache": 0}  # kernels by where they came from
        self._kernels: dict[Variant, _C.Kernel] = {}
        self._loading = threading.RLock()
        self._variants: dict[int, _C.Variants] = {}  # by the id of a kernel
        self._sources: list[JITFunction] = []

    def run(self, launch: Launch) -> None:
        stream, known = self.stream(), self._variants.get(id(launch.kernel))
        warps, stages = launch.num_warps, launch.num_stages
        # A launch like an earlier one is packed and started in C++: a fifth of the time.
        if known is None or not known.start(launch.arguments, warps, stages, launch.grid, stream):
            kernel, values = self.kernel(launch.variant), list(self.values(launch).values())
            kernel.launch(launch.grid, stream, values)
            self._of(launch).add(launch.arguments, warps, stages, kernel)
        self.launched += 1

    def _of(self, launch: Launch) -> _C.Variants:
        """What C++ knows of a kernel's variants."""
        found = self._variants.get(id(launch.kernel))
        if found is None:
            letters = "".join(
                "c" if p.is_constexpr else "p" if p.do_not_specialize else "d"
                for p in launch.kernel.params
            )
            index = -1 if self.memory.type == "cpu" else self.device_index
            found = self._variants[id(launch.kernel)] = _C.Variants(Tensor, letters, index)
            self._sources.append(launch.kernel)  # whose id must stay its own
        return found

    def run_list(self, launches: _C.LaunchList | _C.Graph, slots: Sequence[Tensor]) -> None:
        """Start a plan's launches in one call."""
        launches.run(self.stream(), self._addresses(slots))
        self.launched += launches.launches

    def graph_of(self, launches: _C.LaunchList, slots: Sequence[Tensor]) -> _C.Graph:
        """A plan's launches as a CUDA graph; a DriverError where there can be none."""
        return _C.Graph(launches, self._addresses(slots))

    @property
    def native(self) -> BinaryExecutor:
        """What starts a plan from C++: itself."""
        return self

    def has(self, launch: Launch) -> bool:
        """Whether there is a binary for it."""
        return self._stored(launch.variant) is not None

    def prepare(self, launches: Iterable[Launch]) -> None:
        """Load the kernels of all these launches, and compile those that are nowhere."""
        variants = dict.fromkeys(launch.variant for launch in launches)
        missing = [v for v in variants if v not in self._kernels and self._stored(v) is None]
        if self.cache is not None and missing:
            with self._loading:
                self.cache.compile_all([v for v in missing if self.cache.find(v) is None])
        for variant in missing:
            self.kernel(variant)

    def kernel(self, variant: Variant) -> _C.Kernel:
        """The loaded kernel of a variant; raises LookupError if there is none and no cache."""
        found = self._kernels.get(variant)
        if found is None:
            with self._loading:  # of several threads one compiles
                found = self._kernels.get(variant)
                if found is None:
                    stored = self._stored(variant)
                    entry = stored or self._cached(variant)
                    found = self._kernels[variant] = self._load(entry, variant)
                    self.loaded["cache" if stored is None else "binaries"] += 1
        return found

    def _stored(self, variant: Variant) -> Entry | None:
        return None if self.store is None else self.store.find(variant, self.arch)

    def _cached(self, variant: Variant) -> Entry:
        if self.cache is not None:
            return self.cache.find(variant) or self.cache.compile(variant)
        store, where = self.store, "no folder of binaries was given"
        if store is not None:
            archs = ", ".join(store.archs)
            where = f"in {store.folder}, which has {len(store)} binaries for {archs}"
        raise LookupError(f"vitkern: no binary for {variant.name} on {self.arch} {where}")

    def values(self, launch: Launch) -> dict[str, int | float]:
        """What the C++ launcher takes: an address for a tensor, a number as it is."""
        return {
            name: self._address(name, value) if isinstance(value, Tensor) else value
            for name, value in launch.run_time().items()
        }

    def _addresses(self, slots: Sequence[Tensor]) -> list[int]:
        return [self._address("a slot", slot) for slot in slots]

    def _address(self, name: str, tensor: Tensor) -> int:
        if tensor.device != self.memory:
            raise ValueError(
                f"vitkern: {name} is on {tensor.device}, but the kernel runs on {self.memory}: "
                "move all tensors to one device"
            )
        return tensor.data_ptr()

    def _load(self, entry: Entry, variant: Variant) -> _C.Kernel:
        wanted = tuple((n, kind, n in variant.divisible) for n, kind in variant.signature)
        if entry.arguments != wanted:
            raise BinaryError(
                f"vitkern: {MANIFEST} says that {entry.id} takes {entry.arguments}, but it is "
                f"launched with {wanted}: build again"
            )
        if entry.source and entry.source != source_of(variant.kernel):
            by = "" if self.store is None else f" by Triton {self.store.triton}"
            raise BinaryError(
                f"vitkern: {entry.id} in {entry.file.parent.parent} was built{by} (here is "
                f"{triton.__version__}) or from another version of its source: build again"
            )
        return _C.Kernel(
            self.driver,
            self.device_index,
            entry.image(),
            entry.kernel,
            entry.arch,
            entry.num_warps,
            entry.warp_size,
            entry.shared,
            entry.arguments,
            entry.hidden_parameters,
        )

    def _current_stream(self) -> int:
        return current_stream(self.device_index)
