"""Running a compiled kernel on host memory: by hand, and as an executor of vitkern's launches."""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
from triton import knobs

from vitkern.gpu.compiler import input_of, target_of
from vitkern.gpu.launch import Launch, Variant

from .machine import DTYPES, Machine
from .memory import GlobalMemory
from .parser import Program, PtxError, parse
from .shared import SharedMemory


def run_ptx(
    ptx: str | Program,
    entry: str,
    grid: tuple[int, ...],
    threads: int,
    shared_bytes: int,
    params: list[object],
    *,
    names: list[str] | None = None,
    writes: frozenset[str] | None = None,
    toward_zero: bool = False,
) -> None:
    """Execute `entry`; `params` are numbers, None (a null pointer), torch tensors or numpy arrays.

    Their types are those that the PTX declares. Tensors are read and written in place; only those
    whose name is in `writes` (all, if it is None) may be written.
    """
    program = parse(ptx, entry) if isinstance(ptx, str) else ptx
    if len(params) != len(program.params):
        raise PtxError(f"{entry} has {len(program.params)} parameters, {len(params)} were given")
    names = names or [f"parameter {n}" for n in range(len(params))]
    memory, packed = GlobalMemory(), {}
    for (kind, symbol), value, name in zip(program.params, params, names, strict=True):
        if isinstance(value, (torch.Tensor, np.ndarray)):
            if kind != "u64":
                raise PtxError(f"{name} is a tensor, but {symbol} is .{kind}")
            value = memory.add(value, name, writes is None or name in writes)
        packed[symbol] = _pack(value or 0, kind)
    memory.open()
    machine = Machine(program, tuple([*grid, 1, 1][:3]), threads, packed)
    machine.globals, machine.shared = memory, SharedMemory(machine, shared_bytes)
    machine.toward_zero = toward_zero
    machine.run()
    memory.close()


def _pack(value: float, kind: str) -> bytes:
    if kind[0] == "f":
        return np.array([value], DTYPES[kind]).tobytes()
    return (int(value) & (256 ** DTYPES[kind].itemsize - 1)).to_bytes(
        DTYPES[kind].itemsize, "little"
    )


class PtxExecutor:
    """Compiles each launch as the ahead-of-time build does, and emulates its PTX.

    `with executing(PtxExecutor()): forward(...)` on CPU tensors. `arch` is sm_80 or another one
    whose tensor cores are driven by mma.sync (86, 89, 120); `toward_zero` is matrix.py's.
    """

    def __init__(self, arch: str = "sm_80", toward_zero: bool = False) -> None:
        self.arch, self.toward_zero = arch, toward_zero
        self.launches: list[Launch] = []

    def run(self, launch: Launch) -> None:
        self.launches.append(launch)
        program, shared_bytes = compiled(launch.variant, self.arch)
        scratch = [None, None]  # global_scratch, profile_scratch
        run_ptx(
            program,
            program.entry,
            launch.grid,
            32 * launch.num_warps,
            shared_bytes,
            [*launch.run_time().values(), *scratch],
            names=[*launch.run_time(), "scratch", "scratch"],
            writes=frozenset(launch.writes),
            toward_zero=self.toward_zero,
        )


@functools.lru_cache(maxsize=32)  # a parsed program takes 10 MB or so
def compiled(variant: Variant, arch: str) -> tuple[Program, int]:
    """(program, bytes of dynamic shared memory) of a kernel."""
    target = target_of(arch)
    source, options = input_of(variant, target)
    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = _without_ptxas
        kernel = triton.compile(source, target=target, options=options)
    return parse(kernel.asm["ptx"], kernel.metadata.name), kernel.metadata.shared


def _without_ptxas(*arguments: object) -> tuple[str, str]:
    """The compiler up to the PTX, in half the time: its binary is empty, and cached as such."""
    if arguments:
        arguments[1]["cubin"] = lambda ptx, metadata: b""
    return "ptx only", "ptx only"
