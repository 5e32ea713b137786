"""The facts and findings of a machine as one page of text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..terminal import Paint
from .findings import ERROR, NOTE, WARNING, Finding

_WIDTH = 100
_COLUMN = 14
_LEVELS = {ERROR: ("red", "bold"), WARNING: ("yellow", "bold"), NOTE: ("cyan",)}
_MARKS = {
    "in use": ("*", "green"),
    "usable": ("+", "green"),
    "slower": ("+", "green"),
    "missing": ("-", "dim"),
    "not built": ("!", "yellow"),
    "refused": ("!", "yellow"),
}
_AMX = {
    "unknown": "unknown: the extension is not built",
    "absent": "this CPU has none",
    "refused": "the CPU has it, the operating system refuses the tile registers",
    "works": "works: tiles are granted, CPUID leaf 0x1D describes them",
    "works, leaf hidden": "works; CPUID leaf 0x1D is hidden, which vitkern does not need",
}


def page(facts: Mapping[str, Any], found: Sequence[Finding], paint: Paint) -> str:
    sections = {
        "Processor": _processor(facts),
        "Instruction sets, best first": _sets(facts, paint),
        "Precisions": _precisions(facts),
        "GPU": _gpu(facts),
        "Software": _software(facts),
    }
    versions = facts["versions"]
    lines = [
        paint(f"Doctor: vitkern {versions['vitkern']}", "bold")
        + f", Python {versions['python']}, {versions['system']}"
    ]
    for title, rows in sections.items():
        lines += ["", paint(title, "bold"), *rows]
    return "\n".join([*lines, "", *_findings(found, paint)])


def _row(name: str, text: str) -> str:
    """A name and what there is to say of it, in lines that fit."""
    return "\n".join(
        textwrap.wrap(
            text or "-",
            _WIDTH,
            initial_indent=f"  {name:<{_COLUMN}}",
            subsequent_indent=" " * (_COLUMN + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _processor(facts: Mapping[str, Any]) -> list[str]:
    cpu, threads = facts["processor"], facts["threads"]
    name = f"{cpu['name']}, {cpu['cores']} CPUs" + (", a virtual machine" if cpu["virtual"] else "")
    caches = ", ".join(f"{level} {bytes_text(size)}" for level, size in cpu["caches"].items())
    rows = [_row("name", name), _row("caches", caches)]
    if cpu["memory_bytes"]:
        free = f", {bytes_text(cpu['available_bytes'])} available" if cpu["available_bytes"] else ""
        nodes = f", {cpu['numa_nodes']} NUMA nodes" if (cpu["numa_nodes"] or 1) > 1 else ""
        rows.append(_row("memory", f"{bytes_text(cpu['memory_bytes'])}{free}{nodes}"))
    quota = f"a CPU quota of {threads['quota']:g}" if threads["quota"] else "no CPU quota"
    said = f"OMP_NUM_THREADS={threads['OMP_NUM_THREADS']}, " if threads["OMP_NUM_THREADS"] else ""
    ours = f"vitkern {threads['vitkern']}, " if threads["vitkern"] else ""
    rows.append(
        _row(
            "threads",
            f"{ours}PyTorch {threads['torch']} ({said}affinity {threads['mask']}, {quota})",
        )
    )
    return rows


def _sets(facts: Mapping[str, Any], paint: Paint) -> list[str]:
    forced, rows = facts["forced_set"], []
    for one in facts["instruction_sets"]:
        mark, colour = _MARKS[one["state"]]
        rows.append(f"  {paint(mark, colour)} {one['name']:<{_COLUMN - 2}}{_why(one, forced)}")
    return [*rows, _row("AMX", _AMX[facts["amx"]["state"]])]


def _why(one: Mapping[str, Any], forced: str) -> str:
    state, missing = one["state"], ", ".join(one["missing"])
    if state == "in use":
        return "in use: forced by VITKERN_ISA" if forced else "in use: the best that this CPU has"
    if state == "missing":
        return f"not here: no {missing}"
    return {
        "usable": "usable",
        "slower": f"usable, but no faster than {one['base']} on this CPU",
        "not built": "this CPU could, but it is not in this build of the extension",
        "refused": "the operating system refuses AMX's tile registers",
    }[state]


def _precisions(facts: Mapping[str, Any]) -> list[str]:
    rows, rates = [], {n: row["gflops"] for n, row in facts["precisions"].items()}
    for name, row in facts["precisions"].items():
        rate = rates[name]
        if rate and row["how"] != "as fp32":
            times = f" ({rate / rates['fp32']:.1f}x fp32)" if name != "fp32" else ""
            rows.append(_row(name, f"{row['how']:<28}{rate:>8.0f} GFLOPS{times}"))
        else:
            rows.append(_row(name, row["how"]))
    if facts["measured"]:
        threads = facts["threads"]["vitkern"]
        rows.append(_row("", f"multiply-adds on data in L1, {threads} threads, measured just now"))
    return rows


def _gpu(facts: Mapping[str, Any]) -> list[str]:
    built = facts["torch_is_built_for"]
    rows = [
        _row(
            f"cuda:{index}",
            f"{gpu['name']}, capability {'.'.join(map(str, gpu['capability']))},"
            f" {gpu['processors']} multiprocessors, {bytes_text(gpu['memory_bytes'])};"
            f" kernels: {gpu['kernels']}",
        )
        for index, gpu in enumerate(facts["gpus"])
    ]
    if not rows:
        rows.append(_row("device", f"none that PyTorch can use (it is built for {built})"))
    triton, cache = facts["triton"], facts["kernel_cache"]
    rows += [
        _row("driver", facts["driver"] or "none"),
        _row("Triton", _with_problem(triton["version"], triton["problem"])),
        _row("kernel cache", _cache(cache)),
        _row("binaries", _binaries(facts["binaries"])),
    ]
    return rows


def _with_problem(version: str | None, problem: str) -> str:
    if version is None:
        return problem
    return f"{version}: {problem}" if problem else version


def _cache(cache: Mapping[str, Any]) -> str:
    if cache["folder"] is None:
        return cache["problem"]
    if not cache["kernels"]:
        return f"empty ({cache['folder']})"
    kinds = ", ".join(f"{count} of {name}" for name, count in cache["kernels"].items())
    most = bytes_text(cache["most"])
    return f"{kinds}; {bytes_text(cache['bytes'])} of at most {most} in {cache['folder']}"


def _binaries(found: Mapping[str, Any]) -> str:
    if not found["folder"]:
        return found["text"]
    return f"{found['kernels']} kernels for {', '.join(found['archs'])}: {found['text']}"


def _software(facts: Mapping[str, Any]) -> list[str]:
    shown = {n: v for n, v in facts["versions"].items() if n not in ("vitkern", "python", "system")}
    there = ", ".join(f"{name} {version}" for name, version in shown.items() if version)
    extension = facts["extension"]
    rows = [_row("versions", there), _row("package", extension["package"])]
    rows.append(_row("extension", extension["file"] or f"not loaded: {extension['problem']}"))
    rows.append(_row("OpenMP", ", ".join(facts["openmp"]) or "not to be seen here"))
    extras = facts["extras"]
    if extras:
        whole = ", ".join(name for name, lacks in extras.items() if not lacks)
        parts = [f"{name} (lacks {', '.join(lacks)})" for name, lacks in extras.items() if lacks]
        rows.append(_row("extras", whole or "none"))
        if parts:
            rows.append(_row("not installed", f"{'; '.join(parts)}: pip install 'vitkern[NAME]'"))
    else:
        rows.append(_row("extras", "unknown: vitkern is not installed, only found on the path"))
    chosen = ", ".join(f"{name}={value}" for name, value in facts["settings"].items())
    return [*rows, _row("environment", chosen)]


def _findings(found: Sequence[Finding], paint: Paint) -> list[str]:
    if not found:
        return [paint("Nothing to mend.", "green", "bold")]
    lines = []
    for one in found:
        head = textwrap.wrap(f"{one.level}: {one.what}", _WIDTH, break_on_hyphens=False)
        head[0] = paint(f"{one.level}:", *_LEVELS[one.level]) + head[0].removeprefix(
            f"{one.level}:"
        )
        remedy = textwrap.wrap(
            f"do: {one.remedy}", _WIDTH - 2, initial_indent="  ", subsequent_indent="      ",
            break_on_hyphens=False,
        )  # fmt: skip
        lines += [*head, *remedy]
    return lines
