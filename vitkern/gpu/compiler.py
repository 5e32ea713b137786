"""Compiles one kernel with Triton: the same ahead of time and at a first call, without a GPU.

Kernels are compiled from their variant, not through Triton's own binder (`kernel[grid](...)`). The
binder makes a constant of every integer that is 1 and looks into tuples whatever their
`do_not_specialize` says: variants that no build would list and no test would run. Nor does anything
here ask Triton's driver, which would need a C compiler to start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import re
import struct
import tempfile
import threading
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import constexpr
from triton.runtime.jit import JITFunction

from .configs import TARGETS
from .launch import ALIGNMENT, Variant, grouped

OPTIONS = {"enable_fp_fusion": True}  # explicit: the default of later Tritons may be another
# gfx950: where Triton 3.7 chooses the shape of MFMA instructions, LLVM's scheduler ends the process
# in attention's backward ("Dead defs should have no uses"). 16 x 16 compiles, and fits every tile.
_OPTIONS_FOR = {"gfx950": {"matrix_instr_nonkdim": 16}}


def target_of(arch: str) -> GPUTarget:
    """Triton's name of an architecture; ValueError for one that vitkern has no settings for."""
    if arch not in TARGETS:
        raise ValueError(f"unknown architecture {arch!r}; known: {', '.join(TARGETS)}")
    return target_named(arch)


def target_named(arch: str) -> GPUTarget:
    """The same for whatever chip there is, such as one that uses an elder's settings."""
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 32 if arch.startswith("gfx1") else 64)
    return GPUTarget("cuda", int(arch[3:]), 32)


def input_of(variant: Variant, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """What triton.compile takes for a variant: its source, and its options."""
    names, promise = variant.kernel.arg_names, [["tt.divisibility", ALIGNMENT]]
    paths = [path.split(".") for path in variant.divisible]
    source = ASTSource(
        variant.kernel,
        {name: "constexpr" for name in names} | grouped(variant.signature),
        dict(variant.constants),
        {(names.index(name), *map(int, element)): promise for name, *element in paths},
    )
    settings = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return source, settings | OPTIONS | _OPTIONS_FOR.get(str(target.arch), {})


class Binary(NamedTuple):
    """A compiled kernel."""

    code: bytes  # cubin or hsaco
    suffix: str
    facts: dict[str, Any]  # what the manifest says of it besides file and key
    assembly: str  # AMD's; "" for NVIDIA, whose cubin can be disassembled
    ttir: str  # Triton's first IR, which tells the matmuls in the source
    tensor_columns: int


def compile_variant(variant: Variant, arch: str) -> Binary:
    """Compile one kernel, or take it from Triton's cache; raises what Triton raises."""
    target = target_named(arch)
    made, code = _compile(*input_of(variant, target), target)
    found = made.metadata._asdict()
    facts = {
        "id": variant.name,
        "kernel": found["name"],
        "arch": arch,
        "num_warps": found["num_warps"],
        "warp_size": target.warp_size,
        "num_stages": variant.num_stages,
        "shared": found["shared"],
        **{
            f"{kind}_scratch": [found.get(f"{kind}_scratch_{n}") or n_ for n, n_ in _SCRATCH]
            for kind in ("global", "profile")
        },
        "hidden_parameters": _parameters(made.asm, found["name"]) - len(variant.signature),
        "arguments": [[n, kind, n in variant.divisible] for n, kind in variant.signature],
        "constants": {n: str(v) if isinstance(v, tuple) else v for n, v in variant.constants},
    }
    suffix = "hsaco" if "hsaco" in made.asm else "cubin"
    assembly = made.asm["amdgcn"] if suffix == "hsaco" else ""
    return Binary(code, suffix, facts, assembly, made.asm["ttir"], found.get("tmem_size") or 0)


_SCRATCH = (("size", 0), ("align", 1))
_COMPILING = threading.Lock()  # Triton's knobs are the process's


def _compile(source: ASTSource, options: dict[str, Any], target: GPUTarget) -> tuple[Any, bytes]:
    """Triton's result and its binary, whatever the state of Triton's own cache."""
    with (
        _COMPILING,
        knobs.compilation.scope(),
        knobs.cache.scope(),
        tempfile.TemporaryDirectory() as elsewhere,
    ):
        knobs.compilation.disable_line_info = True
        changes: list[tuple[Any, str, Any]] = [
            (knobs.compilation, "always_compile", True),  # an entry is damaged: write it again
            (knobs.cache, "dir", elsewhere),  # it cannot be written
        ]
        while True:
            try:
                made = triton.compile(source, target=target, options=options)
                return made, _whole(made.asm)
            except (OSError, ValueError, KeyError):
                if not changes:
                    raise
                setattr(*changes.pop(0))


def _parameters(asm: Mapping[str, Any], name: str) -> int:
    """How many parameters the compiled kernel takes.

    Triton appends pointers of its own to those of the source, how many depends on its version.
    """
    if "ptx" in asm:
        (listed,) = re.findall(rf"\.entry {re.escape(name)}\((.*?)\)", asm["ptx"], re.DOTALL)
        return listed.count(".param ")
    kinds = re.findall(r"^ *(?:- )?\.value_kind: +(\w+)$", asm["amdgcn"], re.MULTILINE)
    return sum(not kind.startswith("hidden_") for kind in kinds)  # HIP passes these by itself


def _whole(asm: Mapping[str, Any]) -> bytes:
    """The binary, if it is not cut short: an ELF file ends with its table of sections, or later."""
    code = asm["hsaco"] if "hsaco" in asm else asm["cubin"]
    if code[:4] != b"\x7fELF" or len(code) < 64:
        raise ValueError("not an ELF file")
    (start,), (size, count) = (
        struct.unpack_from("<Q", code, 40),
        struct.unpack_from("<HH", code, 58),
    )
    if len(code) < start + size * count:
        raise ValueError("an ELF file that is cut short")
    return code


_sources: dict[int, tuple[JITFunction, str]] = {}  # with its function, which keeps its id


def source_of(kernel: JITFunction) -> str:
    """A hash of a kernel's source, of all that it calls and of the constants that they name.

    Not Triton's `cache_key`: it leaves out the constants of a function that was not hashed before
    its caller, so that two processes that begin with other kernels disagree about the same one.
    """
    if id(kernel) not in _sources:
        parts: dict[tuple[str, str], tuple[Any, ...]] = {}
        _add_source(kernel, parts)
        hashed = hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()
        _sources[id(kernel)] = kernel, hashed
    return _sources[id(kernel)][1]


def _add_source(function: JITFunction, parts: dict[tuple[str, str], tuple[Any, ...]]) -> None:
    python = function.fn
    where = python.__module__, python.__qualname__
    if where in parts:
        return
    names = sorted(set(python.__code__.co_names))
    known = {name: python.__globals__[name] for name in names if name in python.__globals__}
    used = list(known.items())
    for module in (value for value in known.values() if isinstance(value, types.ModuleType)):
        used += [(name, getattr(module, name)) for name in names if hasattr(module, name)]
    constants = sorted((name, str(v)) for name, v in used if isinstance(v, (constexpr, int, float)))
    parts[where] = function.src, constants, getattr(function, "noinline", None)
    for _, value in used:
        if isinstance(value, JITFunction):
            _add_source(value, parts)


def key_of(variant: Variant, arch: str) -> str:
    """A hash of everything that a binary depends on."""
    parts = (
        source_of(variant.kernel), variant.signature, variant.constants, variant.divisible,
        variant.num_warps, variant.num_stages, arch, triton.__version__,
        sorted(input_of(variant, target_named(arch))[1].items()),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# ---- for other processes ----

Fields = tuple[str, tuple[Any, ...]]  # the kernel's function; the other fields of a Variant


def to_fields(variant: Variant) -> Fields:
    """A variant as values that can be sent to another process."""
    values = tuple(getattr(variant, field.name) for field in dataclasses.fields(variant))
    return function_of(variant), values[1:]


def from_fields(fields: Fields) -> Variant:
    function, values = fields
    return Variant(function_named(function), *values)


def function_of(variant: Variant) -> str:
    """Where a kernel is found again: "vitkern.gpu.layernorm:layernorm_forward"."""
    return f"{variant.kernel.fn.__module__}:{variant.kernel.fn.__qualname__}"


def function_named(function: str) -> Any:
    """The kernel that `function_of` named."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
