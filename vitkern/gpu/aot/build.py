"""Compiles kernels ahead of time, without a GPU: a folder of binaries and their manifest.

`build` compiles what it is given (engines/trace.py knows what the models need), a few at a time in
processes of their own, and writes `manifest.json` last and in one step: whoever reads the folder
meanwhile, or after an interrupted build, finds the earlier one whole. Binaries are named by a hash
of everything that made them, so a later build compiles only what changed. 0.4 to 2 s a kernel.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import io
import itertools
import multiprocessing
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..compiler import (
    Binary,
    compile_variant,
    from_fields,
    function_named,
    key_of,
    source_of,
    target_named,
    to_fields,
)
from ..configs import ARCHS
from ..launch import Variant
from . import disassembly, folder, machine_code
from .label import is_promised, label_of


class Checked(NamedTuple):
    """A kernel's machine code and what is wrong with it."""

    label: str  # the variant for people
    id: str
    report: machine_code.Report
    broken: list[str]  # gates
    absent: tuple[str, ...] = ()  # tensors that this variant has none of


class Failure(NamedTuple):
    """A kernel that could not be compiled, or not be analysed."""

    id: str
    arch: str
    reason: str


@dataclasses.dataclass
class Result:
    """What a build did."""

    folder: pathlib.Path
    entries: list[dict] = dataclasses.field(default_factory=list)  # of this build, in its order
    checked: list[Checked] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    built: int = 0
    kept: int = 0  # of earlier builds, and still in the manifest
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.entries)


Progress = Callable[[int, int, str], None]  # done, of how many, the newest
Verdict = Callable[[Checked | Failure], None]  # of a kernel, as soon as it is known


def check(variant: Variant, binary: Binary, listing: str | None = None) -> Checked:
    """Analyse the machine code and apply the gates; `listing` is its SASS, if it is known."""
    facts = binary.facts
    report = machine_code.analyse(
        facts["kernel"], facts["arch"], binary.assembly or binary.code,
        facts["num_warps"], facts["shared"], binary.ttir, binary.tensor_columns, listing,
    )  # fmt: skip
    label = label_of(variant)
    absent = tuple(name for name, value in variant.constants if value is None)
    named = f"{label}, without {' '.join(absent)}"
    broken = machine_code.gates(report, is_promised(variant), named)
    return Checked(label, variant.name, report, broken, absent)


# ---- many at once --------------------------------------------------------------------------------


class _Task(NamedTuple):
    """One kernel for a worker, as values that can be sent to another process."""

    id: str  # Variant.name
    function: str  # "module:name" of the kernel
    variant: tuple  # Variant's fields but the kernel
    arch: str
    key: str
    write: str  # the folder that the binary goes to; "" when it is there already
    check: bool

    @property
    def name(self) -> str:
        return f"{self.function.rpartition(':')[2]} {self.arch}"


class _Done(NamedTuple):
    entry: dict | None = None
    checked: Checked | None = None
    failure: Failure | None = None


def _task(variant: Variant, arch: str, key: str, write: str, check: bool) -> _Task:
    return _Task(variant.name, *to_fields(variant), arch, key, write, check)


def is_current(entry: dict) -> bool:
    """Whether an earlier build's kernel would be compiled from the same source today."""
    module = entry["function"].partition(":")[0]  # of anybody's: only vitkern's own are imported
    known = module in sys.modules or module.startswith("vitkern.gpu.")
    try:
        return known and source_of(function_named(entry["function"])) == entry["source"]
    except Exception:  # whatever keeps its module from being imported
        return False


def _work(tasks: Sequence[_Task]) -> list[_Done]:
    """Compile, write and analyse kernels of one architecture; in a worker."""
    done = [_Done()] * len(tasks)
    gated: dict[int, tuple[Variant, Binary]] = {}
    for i, task in enumerate(tasks):
        try:
            variant = from_fields((task.function, task.variant))
            with contextlib.redirect_stdout(io.StringIO()):  # ptxas's errors
                binary = compile_variant(variant, task.arch)
            done[i] = _Done(_write(task, binary) if task.write else None)
            if task.check:
                gated[i] = variant, binary
        except Exception as error:
            done[i] = _Done(failure=_failure(task, error))
    for (i, (variant, binary)), listing in zip(gated.items(), _listings(gated, tasks), strict=True):
        try:
            done[i] = done[i]._replace(checked=check(variant, binary, listing))
        except Exception as error:
            done[i] = done[i]._replace(failure=_failure(tasks[i], error))
    return done


def _listings(
    gated: Mapping[int, tuple[Variant, Binary]], tasks: Sequence[_Task]
) -> list[str | None]:
    """The SASS of NVIDIA's kernels, by one call; None where `check` is to find it, or fail."""
    codes = [binary.code for _, binary in gated.values() if not binary.assembly]
    if len(codes) == len(gated):
        with contextlib.suppress(RuntimeError):  # one that cannot be read hides the others
            return [*disassembly.sass(codes, tasks[0].arch)]
    return [None] * len(gated)


def _failure(task: _Task, error: Exception) -> Failure:
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    lines = [line.strip() for line in str(first).splitlines() if line.strip()]
    reason = f"{type(first).__name__}: {' '.join(lines[-3:])[-400:]}"
    return Failure(task.id, task.arch, reason)


def _write(task: _Task, binary: Binary) -> dict:
    """Put a binary into the folder; returns the manifest's entry."""
    name = f"{task.arch}/{binary.facts['kernel']}-{task.key[:16]}.{binary.suffix}"
    path = pathlib.Path(task.write, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder.write_whole(path, binary.code)
    return {
        **binary.facts,
        "file": name,
        "sha256": hashlib.sha256(binary.code).hexdigest(),
        "bytes": len(binary.code),
        "function": task.function,
        "source": source_of(function_named(task.function)),
        "key": task.key,
    }


def _run_all(tasks: Sequence[_Task], jobs: int) -> Iterator[tuple[_Task, _Done]]:
    """Work off all tasks, in any order; a compiler that crashes fails its own task only."""
    left = _together(tasks, jobs)
    if jobs == 1:
        for several in left:
            yield from zip(several, _work(several), strict=True)
        return
    while left:
        suspects = []
        with _pool(min(jobs, len(left))) as pool:
            futures = {pool.submit(_work, several): several for several in left}
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield from zip(futures[future], future.result(), strict=True)
                    left.remove(futures[future])
            except concurrent.futures.BrokenExecutor:  # some worker died; its neighbours with it
                suspects = left[: jobs + 1]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for several in suspects:
            left.remove(several)
            yield from ((task, _alone(task)) for task in several)


_TOGETHER = 16  # kernels that one call disassembles: its start is then a twentieth of their time


def _together(tasks: Sequence[_Task], jobs: int) -> list[list[_Task]]:
    """Tasks that one worker does at a time: several if gated, of one architecture."""
    found: list[list[_Task]] = []
    most = min(_TOGETHER, -(-len(tasks) // jobs))
    for _, group in itertools.groupby(tasks, lambda task: (task.arch, task.check)):
        several = list(group)
        size = most if several[0].check else 1
        found += [several[i : i + size] for i in range(0, len(several), size)]
    return found


def _alone(task: _Task) -> _Done:
    """One task in a process of its own, which may die."""
    with _pool(1) as pool:
        try:
            return pool.submit(_work, [task]).result()[0]
        except concurrent.futures.BrokenExecutor:
            return _Done(failure=Failure(task.id, task.arch, "the compiler crashed"))


def _pool(jobs: int) -> concurrent.futures.ProcessPoolExecutor:
    # spawn: a fork of a process that runs torch's and LLVM's threads may hang
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A worker whose build was killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait = parent.join
        threading.Thread(target=lambda: (wait(), os._exit(1)), daemon=True).start()


def build(
    variants: Mapping[str, Iterable[Variant]],
    out: str | os.PathLike,
    jobs: int | None = None,
    progress: Progress = lambda done, total, name: None,
    analyse: bool = False,
    verdict: Verdict = lambda one: None,
) -> Result:
    """Compile `variants` (by architecture) into the folder `out` and write its manifest.

    Kernels of earlier builds stay in the manifest while their source is the same. A kernel that
    fails is listed in the result, and the others are built. With `analyse` the gates of
    machine_code.py are applied to every one for an architecture of ARCHS. `verdict` hears of each
    kernel that was analysed or has failed: an interrupted build has said what it found.
    """
    begin, target = time.perf_counter(), folder.make(out, variants)
    earlier = {entry["key"]: entry for entry in folder.read(target)}
    result, tasks, wanted = Result(target), [], {}
    for arch, several in variants.items():
        target_named(arch)  # a ValueError for what is none
        for variant in several:
            key = key_of(variant, arch)
            if key in wanted:
                continue
            wanted[key] = variant
            mine = {"id": variant.name, "arch": arch}.items() <= earlier.get(key, {}).items()
            there = mine and folder.is_there(target, earlier[key])
            gated = analyse and arch in ARCHS  # others have no rates to hold them against
            if gated or not there:
                tasks.append(_task(variant, arch, key, "" if there else str(target), gated))
            if not there:
                earlier.pop(key, None)
    made: dict[str, dict] = {}
    checked: dict[str, Checked] = {}
    done = len(wanted) - len(tasks)
    for task, end in _run_all(tasks, jobs or _cores()):
        done += 1
        progress(done, len(wanted), task.name)
        if end.failure:
            result.failures.append(end.failure)
            verdict(end.failure)
        if end.entry:
            made[task.key] = end.entry
        if end.checked:
            checked[task.key] = end.checked
            verdict(end.checked)
    result.checked = [checked[key] for key in wanted if key in checked]
    result.built = len(made)
    result.entries = [e for key in wanted if (e := made.get(key) or earlier.get(key))]
    names = {(entry["id"], entry["arch"]) for entry in result.entries}
    kept = [
        entry
        for key, entry in earlier.items()
        if key not in wanted and (entry["id"], entry["arch"]) not in names
        if is_current(entry) and folder.is_there(target, entry)
    ]
    result.kept = len(kept)
    folder.finish(target, [*result.entries, *kept])
    result.seconds = time.perf_counter() - begin
    return result


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
