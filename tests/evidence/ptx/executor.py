"""Running a compiled kernel on host memory: by hand, and as an executor of vitkern's launches."""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
import tempfile
from collections import Counter

import numpy as np
import torch
import triton
from triton import knobs

from vitkern.gpu.compiler import input_of, target_of
from vitkern.gpu.launch import Executor, Launch, Variant

from .machine import CLASSES, DTYPES, Machine
from .memory import GlobalMemory
from .parser import Program, PtxError, parse
from .proxy import AsyncProxy
from .shared import SharedMemory
from .warpgroup import Flight, InFlightError, uses_wgmma


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
    serialised: bool = False,
) -> Counter[str]:
    """Execute `entry`; `params` are numbers, None (a null pointer), torch tensors or numpy arrays.

    Returns how many instructions of CLASSES its warps executed.

    Their types are those that the PTX declares. Tensors are read and written in place, and only if
    the kernel ends; only those whose name is in `writes` (all, if it is None) may be written.
    `serialised` is warpgroup.InFlightError's.
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
    if uses_wgmma(program):
        machine.shared.proxy, machine.flight = AsyncProxy(machine), Flight(machine, serialised)
    machine.toward_zero = toward_zero
    machine.run()
    memory.close()
    return machine.executed


def _pack(value: float, kind: str) -> bytes:
    if kind[0] == "f":
        return np.array([value], DTYPES[kind]).tobytes()
    return (int(value) & (256 ** DTYPES[kind].itemsize - 1)).to_bytes(
        DTYPES[kind].itemsize, "little"
    )


class PtxExecutor(Executor):
    """Compiles each launch as the ahead-of-time build does, and emulates its PTX.

    `with executing(PtxExecutor()): forward(...)` on CPU tensors. `arch` is any but sm_100, whose
    tcgen05 is not emulated; `toward_zero` is matrix.py's. `serialised` are the launches whose wgmma
    ptxas runs one by one.
    """

    def __init__(self, arch: str = "sm_80", toward_zero: bool = False) -> None:
        self.arch, self.toward_zero = arch, toward_zero
        self.launches: list[Launch] = []
        self.serialised: list[Launch] = []
        self.executed: Counter[str] = Counter()  # instructions of all launches, by CLASSES

    def run(self, launch: Launch) -> None:
        self.launches.append(launch)
        program, shared_bytes = compiled(launch.variant, self.arch)
        scratch = [None, None]  # global_scratch, profile_scratch
        start = functools.partial(
            run_ptx,
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
        try:
            executed = start()
        except InFlightError:
            if not is_serialised(program):
                raise
            self.serialised.append(launch)
            executed = start(serialised=True)
        self.executed += executed

    def classes(self) -> dict[str, set[str]]:
        """Kernels that ran, by the classes of instructions that their programs hold."""
        found: dict[str, set[str]] = {name: set() for name in CLASSES}
        for launch in self.launches:
            program, _ = compiled(launch.variant, self.arch)
            for name in {
                name for i in program.instructions for name in CLASSES if CLASSES[name](i)
            }:
                found[name].add(launch.variant.name)
        return found


def is_serialised(program: Program) -> bool:
    """Whether ptxas waits for every wgmma of a program by itself; it says so."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernel.ptx")
        source.write_text(program.text)
        target = re.search(r"\.target (\w+)", program.text).group(1)
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target}", source, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return "wgmma.mma_async instructions are serialized" in said


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
