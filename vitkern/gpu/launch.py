"""How every Triton kernel of vitkern is started: one function, whatever executes the launch.

A launcher (`vitkern/gpu/<operator>.py`) says kernel, grid, settings and arguments; the *executor*
in force decides what becomes of that: the device's own (a compiled binary through the C++ launcher,
or Triton's compiler when there is none), the interpreter of the tests, or a recorder that only
writes launches down (plans, the ahead-of-time list, traffic counts). So the launches that are
tested, compiled, counted and run are the same ones.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from .configs import Row

# torch dtype -> Triton's name of a pointer to it
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ALIGNMENT = 16  # bytes of a pointer, or units of a size, that make 128-bit accesses possible


@dataclasses.dataclass(frozen=True)
class Variant:
    """What has to be compiled for a launch: everything about it but its numbers and addresses."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]  # run-time argument -> type: ("x", "*bf16")
    constants: tuple[tuple[str, object], ...]  # tl.constexpr arguments, and absent (None) ones
    divisible: tuple[str, ...]  # run-time arguments promised to be multiples of ALIGNMENT
    num_warps: int
    num_stages: int

    @functools.cached_property
    def name(self) -> str:
        """Unique among variants, and readable."""
        pointers = "_".join(kind[1:] for _, kind in self.signature if kind[0] == "*")
        constants = "_".join(f"{n}{'' if v is None else v}" for n, v in self.constants)
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
    arguments: dict[str, object]  # tensors, numbers, None and constants by name
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
            signature.append((name, _type_of(value)))
            if not parameter.do_not_specialize and _is_divisible(value):
                divisible.append(name)
        return Variant(
            self.kernel,
            tuple(signature),
            tuple(constants),
            tuple(divisible),
            self.num_warps,
            self.num_stages,
        )

    def run_time(self) -> dict[str, object]:
        """The arguments that a compiled kernel takes, in order."""
        return {name: self.arguments[name] for name, _ in self.variant.signature}


def _type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_divisible(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % ALIGNMENT == 0  # on the meta device: the offset in its storage
    return isinstance(value, int) and value % ALIGNMENT == 0


class Executor(Protocol):
    """What carries launches out; `arch` ("sm_80", "gfx942") chooses their settings.

    An attribute `tf32` (True, False) decides how fp32 is multiplied; without it torch's setting.
    """

    arch: str

    def run(self, launch: Launch) -> None: ...


class Recorder:
    """Writes launches down instead of running them; tensors may be on the meta device."""

    def __init__(self, arch: str, tf32: bool | None = None) -> None:
        self.arch, self.tf32 = arch, tf32
        self.launches: list[Launch] = []

    def run(self, launch: Launch) -> None:
        self.launches.append(launch)


_in_force: contextvars.ContextVar[Executor | None] = contextvars.ContextVar(
    "vitkern_gpu_executor", default=None
)


@contextlib.contextmanager
def executing(executor: Executor) -> Iterator[Executor]:
    """All launches inside go to this executor."""
    token = _in_force.set(executor)
    try:
        yield executor
    finally:
        _in_force.reset(token)


def executor_of(tensor: Tensor) -> Executor:
    """The executor in force, or that of the tensor's device."""
    found = _in_force.get()
    if found is None:
        from .runtime import device

        found = device.executor(tensor.device)
    return found


def arch_of(tensor: Tensor) -> str:
    """The architecture whose launch settings serve this tensor."""
    return executor_of(tensor).arch


def launch(
    kernel: JITFunction, grid: tuple[int, ...], row: Row, writes: tuple[str, ...], **arguments
) -> None:
    """Start `kernel`; `arguments` are all that it takes but the block sizes, which `row` has.

    A grid with a zero in it starts nothing: there is nothing to compute.
    """
    if 0 in grid:
        return
    given = {**{n: v for n, v in row.blocks.items() if n in kernel.arg_names}, **arguments}
    first = next(v for v in arguments.values() if isinstance(v, Tensor))
    executor_of(first).run(
        Launch(
            kernel,
            tuple([*grid, 1, 1][:3]),
            {name: given[name] for name in kernel.arg_names},
            writes,
            row.num_warps,
            row.num_stages,
        )
    )


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
