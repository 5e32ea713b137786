"""How every Triton kernel of vitkern is started: one function, whatever executes the launch.

A launcher (`vitkern/gpu/<operator>.py`) says kernel, grid, settings and arguments; the active
*executor* decides what becomes of that: the device's own (a compiled kernel through the C++
launcher), the interpreter of the tests, or a recorder that only writes launches down (plans, the
ahead-of-time list, traffic counts). So the launches that are
tested, compiled, counted and run are the same ones.

What belongs together is one argument of a kernel: a tuple of numbers, such as a tensor's strides.
The compiled kernel takes its elements one by one, under the names "strides.0", "strides.1", ...
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from . import triton_version
from .configs import Row

if TYPE_CHECKING:
    from .runtime.binary import BinaryExecutor

triton_version.require(triton.__version__)

# torch dtype -> Triton's name of a pointer to it
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
T = TypeVar("T")
ALIGNMENT = 16  # bytes of a pointer, or units of a size, that make 128-bit accesses possible


@dataclasses.dataclass(frozen=True)
class Variant:
    """What has to be compiled for a launch: everything about it but its sizes and addresses."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]  # run-time argument -> type: ("x", "*bf16")
    constants: tuple[tuple[str, object], ...]  # tl.constexpr arguments, and absent (None) ones
    divisible: tuple[str, ...]  # run-time arguments promised to be multiples of ALIGNMENT
    num_warps: int
    num_stages: int

    @functools.cached_property
    def name(self) -> str:
        """Unique among variants, and readable: scalars are i32 unless it says another type."""
        pointers = "_".join(kind[1:] for _, kind in self.signature if kind[0] == "*")
        scalars = [(n, kind) for n, kind in self.signature if kind[0] != "*" and kind != "i32"]
        pointers += "".join(f"_{n}:{kind}" for n, kind in scalars)
        constants = "_".join(f"{n}{_text(v)}" for n, v in self.constants)
        return (
            f"{self.kernel.__name__}-{pointers}-{constants}-d{self._promises()}"
            f"-w{self.num_warps}s{self.num_stages}"
        )

    def _promises(self) -> str:
        """One hexadecimal number: a bit per run-time argument that is promised to be divisible."""
        bits = sum(1 << i for i, (n, _) in enumerate(self.signature) if n in self.divisible)
        return f"{bits:x}"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel with its grid, settings and all arguments, in the kernel's order."""

    kernel: JITFunction
    grid: tuple[int, int, int]
    arguments: dict[str, Any]  # tensors, numbers, tuples of numbers, None, constants: by name
    writes: tuple[str, ...]  # the tensors among them that it writes; it reads all others
    num_warps: int
    num_stages: int

    @functools.cached_property
    def variant(self) -> Variant:
        signature, constants, divisible = [], [], []
        for parameter in self.kernel.params:
            name, value = parameter.name, self.arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                constants.append((name, value))
                continue
            for path, element in _elements(name, value):
                signature.append((path, _type_of(element)))
                if not parameter.do_not_specialize and _is_divisible(element):
                    divisible.append(path)
        return Variant(
            self.kernel,
            tuple(signature),
            tuple(constants),
            tuple(divisible),
            self.num_warps,
            self.num_stages,
        )

    def run_time(self) -> dict[str, Any]:
        """The arguments that a compiled kernel takes, in order; tuples element by element."""
        flat = dict(pair for item in self.arguments.items() for pair in _elements(*item))
        return {path: flat[path] for path, _ in self.variant.signature}


def _elements(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        yield from ((f"{name}.{i}", element) for i, element in enumerate(value))
    else:
        yield name, value


def grouped(flat: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The elements of each argument together again: {"S": s, "strides": (b, s)}."""
    found: dict[str, Any] = {}
    for path, value in flat:
        name, dot, _ = path.partition(".")
        found[name] = (*found.get(name, ()), value) if dot else value
    return found


def _text(constant: object) -> str:
    if isinstance(constant, tuple):
        return ".".join(map(str, constant))
    return "" if constant is None else str(constant)


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_divisible(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % ALIGNMENT == 0  # on the meta device: the offset in its storage
    return isinstance(value, int) and value % ALIGNMENT == 0


class Executor(abc.ABC):
    """What carries launches out; `arch` ("sm_80", "gfx942") chooses their settings."""

    arch: str
    tf32: bool | None = None  # how fp32 is multiplied; None: as torch's switches say
    processors: int | None = None  # multiprocessors; None: those of the architecture's usual board
    tile: int | None = None  # the tile of the table (tiles.py) for all GEMMs; None: by their sizes

    @property
    def native(self) -> BinaryExecutor | None:
        """What starts a plan's launches from C++; None: they are given to `run` one by one."""
        return None

    @abc.abstractmethod
    def run(self, launch: Launch) -> None: ...


class Recorder(Executor):
    """Writes launches down instead of running them; tensors may be on the meta device."""

    def __init__(
        self,
        arch: str,
        tf32: bool | None = None,
        processors: int | None = None,
        tile: int | None = None,
    ) -> None:
        self.arch, self.tf32, self.processors, self.tile = arch, tf32, processors, tile
        self.launches: list[Launch] = []

    def run(self, launch: Launch) -> None:
        self.launches.append(launch)


_active: contextvars.ContextVar[Executor | None] = contextvars.ContextVar(
    "vitkern_gpu_executor", default=None
)


@contextlib.contextmanager
def executing(executor: Executor) -> Iterator[Executor]:
    """All launches inside go to this executor."""
    token = _active.set(executor)
    try:
        yield executor
    finally:
        _active.reset(token)


def executor_of(tensor: Tensor) -> Executor:
    """The active executor, or that of the tensor's device."""
    found = _active.get()
    if found is None:
        from .runtime import device

        found = device.executor(tensor.device)
    return found


def arch_of(tensor: Tensor) -> str:
    """The architecture whose launch settings serve this tensor."""
    return executor_of(tensor).arch


def launch(
    kernel: JITFunction, grid: tuple[int, ...], row: Row, writes: tuple[str, ...], **arguments: Any
) -> None:
    """Start `kernel`; `arguments` are all that it takes but the block sizes, which `row` has.

    A grid with a zero in it starts nothing: there is nothing to compute.
    """
    if 0 in grid:
        return
    x, y, z = (*grid, 1, 1)[:3]
    given = {**{n: v for n, v in row.blocks.items() if n in kernel.arg_names}, **arguments}
    first = next(v for v in arguments.values() if isinstance(v, Tensor))
    executor_of(first).run(
        Launch(
            kernel,
            (x, y, z),
            {name: given[name] for name in kernel.arg_names},
            writes,
            row.num_warps,
            row.num_stages,
        )
    )


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
