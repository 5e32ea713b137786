"""What deserves attention in the facts of `examine`, and what to do about each.

Judged from the facts alone, so that a machine that nobody has at hand can be judged in a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ERROR, WARNING, NOTE = "error", "warning", "note"
_OLDEST_CAPABILITY = [8, 0]
_TORCH = ((2, 6), (3, 0))  # of pyproject.toml: from, below
_BUSY = 0.5  # of a CPU taken by others: rates then say less


class Finding(NamedTuple):
    """error: vitkern cannot do its work; warning: something is slower or wrong; note: to know."""

    level: str
    what: str
    remedy: str


def findings(facts: Mapping[str, Any]) -> list[Finding]:
    """The gravest first."""
    found = [
        *_extension(facts),
        *_instruction_sets(facts),
        *_amx(facts),
        *_threads(facts),
        *_libraries(facts),
        *_gpu(facts),
        *_measured(facts),
    ]
    return sorted(found, key=lambda one: (ERROR, WARNING, NOTE).index(one.level))


def _extension(facts: Mapping[str, Any]) -> Iterator[Finding]:
    extension = facts["extension"]
    if extension["problem"]:
        yield Finding(
            ERROR,
            f"the native extension cannot be loaded ({extension['problem']}): none of vitkern's"
            " kernels can run, on the CPU or on a GPU",
            "pip install --force-reinstall --no-deps vitkern, or in a clone `make setup`",
        )
    elif extension["newer"]:
        first, more = extension["newer"][0], len(extension["newer"]) - 1
        others = f" and {more} more" if more else ""
        yield Finding(
            WARNING,
            f"{first}{others} changed after the extension was built: what runs is older",
            "make setup, or python setup.py build_ext --inplace",
        )


def _instruction_sets(facts: Mapping[str, Any]) -> Iterator[Finding]:
    sets, forced = facts["instruction_sets"], facts["forced_set"]
    names = [row["name"] for row in sets]
    used = [row["name"] for row in sets if row["state"] == "in use"]
    usable = [row["name"] for row in sets if row["state"] in ("in use", "usable")]
    if forced and sets and not used:
        state = next((row for row in sets if row["name"] == forced), None)
        if state is None:
            why = f"there is no such set, but {', '.join(names)}"
        elif state["missing"]:
            why = f"this CPU has no {', '.join(state['missing'])}"
        else:
            why = f"it is {state['state']} here"
        yield Finding(
            ERROR,
            f"VITKERN_ISA={forced} cannot run: {why}. Every call of a kernel fails",
            f"unset VITKERN_ISA, or choose one of {', '.join(usable)}",
        )
    elif forced and used and used[0] != usable[0]:
        yield Finding(
            WARNING,
            f"VITKERN_ISA={forced} holds the kernels below {usable[0]}, which this CPU has",
            "unset VITKERN_ISA",
        )
    better = [row["name"] for row in sets if row["state"] == "not built"]
    best = names.index(used[0]) if used else len(names)
    lost = [name for name in better if names.index(name) < best]
    if lost:
        yield Finding(
            WARNING,
            f"this CPU can run {', '.join(lost)}, which this build of the extension leaves out",
            "build on this machine, or install a wheel: it has every instruction set",
        )


def _amx(facts: Mapping[str, Any]) -> Iterator[Finding]:
    state = facts["amx"].get("state")
    if state == "refused":
        yield Finding(
            WARNING,
            "the CPU has AMX, but the operating system refuses the tile registers to this process",
            "Linux 5.16 or newer, and no seccomp filter that forbids arch_prctl"
            " (ARCH_REQ_XCOMP_PERM)",
        )
    if state == "works, leaf hidden" and not _held_below_amx(facts["settings"]):
        crashed = facts.get("torch_bf16")
        does = {
            None: "PyTorch's bf16 matmul and other users of oneDNN may die with SIGILL",
            "dies": "PyTorch's bf16 matmul dies with SIGILL here (tried)",
            "works": "PyTorch's bf16 matmul works here all the same (tried)",
        }[crashed]
        yield Finding(
            NOTE if crashed == "works" else WARNING,
            f"the virtual machine hides CPUID leaf 0x1D, which describes AMX's tiles: {does};"
            " vitkern's kernels do not read it",
            "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before Python starts",
        )


def _held_below_amx(settings: Mapping[str, str]) -> bool:
    held = settings.get("ONEDNN_MAX_CPU_ISA") or settings.get("DNNL_MAX_CPU_ISA") or ""
    return bool(held) and "AMX" not in held.upper() and held.upper() not in ("ALL", "DEFAULT")


def _threads(facts: Mapping[str, Any]) -> Iterator[Finding]:
    threads = facts["threads"]
    torchs, available, quota = threads["torch"], threads["available"], threads["quota"]
    if torchs > available:
        limit = f"a CPU quota of {quota:g}" if quota and quota < threads["mask"] else "affinity"
        ours = threads["vitkern"]
        bounded = f"; vitkern's kernels take {ours}" if ours and ours < torchs else ""
        yield Finding(
            WARNING,
            f"PyTorch has {torchs} threads, but {limit} leaves this process {available}:"
            f" they wait for each other{bounded}",
            f"export OMP_NUM_THREADS={available}, or torch.set_num_threads({available})",
        )
    elif torchs < available // 2:
        yield Finding(
            NOTE,
            f"PyTorch, and with it vitkern, uses {torchs} of {available} CPUs",
            f"OMP_NUM_THREADS or torch.set_num_threads({available}), if that is not meant",
        )
    nodes = facts["processor"].get("numa_nodes") or 1
    if nodes > 1:
        yield Finding(
            NOTE,
            f"{nodes} NUMA nodes: threads are not pinned, and some reads are remote",
            "one process per node, under numactl --cpunodebind=N --membind=N",
        )


def _libraries(facts: Mapping[str, Any]) -> Iterator[Finding]:
    runtimes = facts["openmp"]
    if len(runtimes) > 1:
        names = ", ".join(runtimes)
        yield Finding(
            WARNING,
            f"{len(runtimes)} OpenMP runtimes are loaded ({names}): each has threads of its own,"
            " which compete for the CPUs",
            "install PyTorch and vitkern from one source (all by pip, or all by conda), and"
            " remove an LD_PRELOAD of another runtime",
        )
    torchs = _numbers(facts["versions"].get("torch"))
    if torchs and not _TORCH[0] <= torchs < _TORCH[1]:
        yield Finding(
            WARNING,
            f"PyTorch {facts['versions']['torch']} is outside of what vitkern is tested with",
            "pip install 'torch>=2.6,<3'",
        )


def _numbers(version: str | None) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return tuple(map(int, found.groups())) if found else ()


def _gpu(facts: Mapping[str, Any]) -> Iterator[Finding]:
    gpus, triton = facts["gpus"], facts["triton"]
    if facts["driver"] and not gpus:
        built = facts["torch_is_built_for"]
        what = "this PyTorch is built for the CPU only" if built == "cpu" else "PyTorch sees no GPU"
        how = "install PyTorch's CUDA or ROCm build" if built == "cpu" else "see nvidia-smi"
        yield Finding(WARNING, f"there is a GPU driver ({facts['driver']}), but {what}", how)
    for gpu in gpus:
        if facts["torch_is_built_for"].startswith("cuda") and (
            list(gpu["capability"]) < _OLDEST_CAPABILITY
        ):
            have = ".".join(map(str, gpu["capability"]))
            yield Finding(
                WARNING,
                f"{gpu['name']} has compute capability {have}: the kernels need 8.0, so that"
                " PyTorch's references run there",
                "a GPU of 2020 or newer (A100, RTX 30), or the CPU",
            )
    if triton["problem"] and (gpus or triton["version"]):
        yield Finding(
            WARNING if gpus else NOTE,
            f"Triton cannot compile the GPU kernels: {triton['problem']}",
            "pip install 'vitkern[gpu]', or a newer PyTorch, which brings its own",
        )
    for name in ("kernel_cache", "binaries"):
        if facts[name]["problem"]:
            yield Finding(
                WARNING if gpus else NOTE,
                facts[name]["problem"].removeprefix("vitkern: "),
                "let VITKERN_CACHE name a folder that can be written, VITKERN_CACHE_SIZE a number"
                " of MiB"
                if name == "kernel_cache"
                else "build the folder again with vitkern aot, or unset VITKERN_BINARIES",
            )


def _measured(facts: Mapping[str, Any]) -> Iterator[Finding]:
    load, cores = facts["processor"].get("load"), facts["processor"].get("cores") or 1
    if facts["measured"] and load is not None and load > _BUSY * cores:
        yield Finding(
            NOTE,
            f"load average {load:.1f} on {cores} CPUs: others ran while the rates were measured",
            "repeat it when the machine is quiet",
        )
