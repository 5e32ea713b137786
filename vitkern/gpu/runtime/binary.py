"""Kernels compiled ahead of time: reading their folder, and launching them through C++.

A folder holds `manifest.json` and one file per binary (`gpu/aot/build.py` writes both). A binary
is found by the launch's variant and the architecture, so a launch with other dtypes, constants or
alignment never meets it. The C++ launcher (`csrc/cuda`) checks what only the numbers of a call can
break: the promised multiples of 16, ranges and the grid.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ... import _C
from ..aot import folder as aot_folder
from ..aot.folder import MANIFEST
from ..launch import Launch, Variant


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
    arguments: tuple[tuple[str, str, bool], ...]  # name, type, promised to be a multiple of 16
    constants: dict[str, object] = dataclasses.field(hash=False)
    source: str = ""  # a hash of the kernel's source; "" where the manifest has none

    def image(self) -> bytes:
        """The file's bytes, which must be those that were built."""
        try:
            image = aot_folder.content(self.file, aot_folder.LARGEST_BINARY)
        except OSError as error:
            why = error.strerror or error
            raise BinaryError(
                f"vitkern: binary {self.file} cannot be read ({why}): build again"
            ) from error
        if hashlib.sha256(image).hexdigest() != self.sha256:
            raise BinaryError(
                f"vitkern: binary {self.file} is not the one in {MANIFEST} "
                f"(its SHA-256 differs, {len(image)} bytes): it is damaged or replaced, build again"
            )
        return image


class Store:
    """The binaries of a folder; files are read when they are first needed."""

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)
        manifest = self._read()
        self.vitkern: str = manifest["vitkern"]
        self.triton: str = manifest["triton"]
        self._entries: dict[tuple[str, str], Entry] = {}
        for row in manifest["kernels"]:
            entry = self._entry(row)
            if self._entries.setdefault((entry.id, entry.arch), entry) is not entry:
                raise BinaryError(
                    f"vitkern: {self.folder / MANIFEST} lists kernel {entry.id} for {entry.arch} "
                    "twice: build again"
                )

    def __iter__(self):
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
            return aot_folder.read_manifest(self.folder)
        except OSError as error:
            raise BinaryError(
                f"vitkern: {self.folder} is no folder of compiled kernels: "
                f"{MANIFEST} cannot be read ({error.strerror or error})"
            ) from error
        except ValueError as error:
            raise BinaryError(f"vitkern: {self.folder / MANIFEST} {error}: build again") from error

    def _entry(self, row: dict) -> Entry:
        try:
            aot_folder.check_entry(row)
            file = aot_folder.place(self.folder, row["file"])
        except ValueError as error:
            name = aot_folder.shown(row.get("id")) if isinstance(row, dict) else "?"
            raise BinaryError(
                f"vitkern: {self.folder / MANIFEST} describes kernel {name} wrongly "
                f"({error}): build again"
            ) from error
        for scratch in ("global_scratch", "profile_scratch"):
            if row[scratch][0] != 0:
                raise BinaryError(
                    f"vitkern: kernel {row['id']} needs {row[scratch][0]} bytes of {scratch}, "
                    "which the launcher does not provide: build it without tensor descriptors made "
                    "on the device and without Triton's profiler"
                )
        same = ("id", "kernel", "arch", "sha256", "num_warps", "warp_size", "num_stages", "shared")
        return Entry(
            arguments=tuple(tuple(argument) for argument in row["arguments"]),
            file=file,
            constants=row["constants"],
            source=row.get("source", ""),
            **{name: row[name] for name in same},
        )


@functools.lru_cache
def default_driver() -> _C.Driver:
    """The driver of the GPUs that this PyTorch is built for."""
    return _C.Driver("hip" if torch.version.hip else "cuda")


class BinaryExecutor:
    """Launches a folder's binaries on one device, in order with PyTorch's own work there.

    `stream` returns the handle of the stream to launch on (PyTorch's current one by default);
    tensors must be on `memory` (the device itself by default).
    """

    def __init__(
        self,
        store: Store,
        device_index: int,
        arch: str,
        driver: _C.Driver | None = None,
        stream: Callable[[], int] | None = None,
        memory: torch.device | None = None,
    ) -> None:
        self.store, self.device_index, self.arch = store, device_index, arch
        self.driver = driver or default_driver()
        self.stream = stream or self._current_stream
        self.memory = memory or torch.device("cuda", device_index)
        self._kernels: dict[Variant, _C.Kernel] = {}

    def run(self, launch: Launch) -> None:
        values = [self.value(name, value) for name, value in launch.run_time().items()]
        self.kernel(launch.variant).launch(launch.grid, self.stream(), values)

    def has(self, launch: Launch) -> bool:
        """Whether there is a binary for it."""
        return self.store.find(launch.variant, self.arch) is not None

    def kernel(self, variant: Variant) -> _C.Kernel:
        """The loaded binary for a variant; raises LookupError if there is none."""
        if variant not in self._kernels:
            entry = self.store.find(variant, self.arch)
            if entry is None:
                raise LookupError(
                    f"vitkern: no binary for {variant.name} on {self.arch} in {self.store.folder}, "
                    f"which has {len(self.store)} binaries for {', '.join(self.store.archs)}"
                )
            self._kernels[variant] = self._load(entry, variant)
        return self._kernels[variant]

    def plan(self, launches: Iterable[Launch], slots: Sequence[Tensor] = ()) -> Plan:
        """All of `launches` as one call; tensors inside the memory of a slot follow that slot."""
        return Plan(self, launches, slots)

    def value(self, name: str, value: object) -> int | float:
        """What the C++ launcher takes: an address for a tensor, a number as it is."""
        if not isinstance(value, Tensor):
            return value
        if value.device != self.memory:
            raise ValueError(
                f"vitkern: {name} is on {value.device}, but the kernel runs on {self.memory}: "
                "move all tensors to one device"
            )
        return value.data_ptr()

    def _load(self, entry: Entry, variant: Variant) -> _C.Kernel:
        wanted = tuple((n, kind, n in variant.divisible) for n, kind in variant.signature)
        if entry.arguments != wanted:
            raise BinaryError(
                f"vitkern: {MANIFEST} says that {entry.id} takes {entry.arguments}, but it is "
                f"launched with {wanted}: build again"
            )
        if entry.source and entry.source != variant.kernel.cache_key:
            raise BinaryError(
                f"vitkern: {entry.id} in {self.store.folder} was built from another version of its"
                " source: build again"
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
        )

    def _current_stream(self) -> int:
        return torch.cuda.current_stream(self.device_index).cuda_stream


class Plan:
    """Launches that one C++ call starts, for tensors that may be others at each call (the slots).

    It keeps the other tensors alive. `run` only launches, so it can be captured in a CUDA graph,
    and may be called from several threads, each on its own stream and with its own slots; tensors
    between the launches are shared, so calls on different streams must wait for each other.
    """

    def __init__(
        self, executor: BinaryExecutor, launches: Iterable[Launch], slots: Sequence[Tensor]
    ) -> None:
        self._executor, self._plan = executor, _C.Plan()
        self._layouts = [_layout(slot) for slot in slots]
        self._kept: list[Tensor] = []
        self._used: set[int] = set()
        ranges = [_addresses(slot) for slot in slots]
        for launch in launches:
            values = [self._value(name, value, ranges) for name, value in launch.run_time().items()]
            self._plan.add(executor.kernel(launch.variant), launch.grid, values)
        unused = sorted(set(range(len(slots))) - self._used)
        if unused:
            raise ValueError(f"vitkern: no launch of the plan uses slots {unused}")

    def _value(self, name: str, value: object, ranges: list[range]) -> int | float | _C.Slot:
        number = self._executor.value(name, value)
        if not isinstance(value, Tensor):
            return number
        for i, addresses in enumerate(ranges):
            if number in addresses:
                self._used.add(i)
                return _C.Slot(i, number - addresses.start)
        self._kept.append(value)
        return number

    @property
    def launches(self) -> int:
        return self._plan.launches

    def run(self, *slots: Tensor) -> None:
        """Start all launches; `slots` are laid out as those that the plan was made with."""
        if [_layout(slot) for slot in slots] != self._layouts:
            raise ValueError(
                f"vitkern: the plan was made for {self._layouts} (shape, strides, dtype), not "
                f"{[_layout(slot) for slot in slots]}"
            )
        addresses = [self._executor.value(f"slot {i}", slot) for i, slot in enumerate(slots)]
        self._plan.run(self._executor.stream(), addresses)


def _layout(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _addresses(tensor: Tensor) -> range:
    """The bytes from the tensor's first element to its last."""
    if tensor.numel() == 0:
        return range(0)
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size())
