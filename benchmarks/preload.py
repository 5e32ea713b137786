"""`--preload LIBRARY`, of the commands that time peers: LD_PRELOAD of them, never of vitkern.

`--preload auto` is what `make bench-amx` asks for: where a virtual machine hides CPUID leaf 0x1D,
without which peers cannot use AMX, amx_cpuid.c is compiled and preloaded; elsewhere nothing is.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
from collections.abc import Mapping

SOURCE = pathlib.Path(__file__).with_name("amx_cpuid.c")
BUILT = SOURCE.parents[1] / "build" / "amx_cpuid.so"
AUTO = pathlib.Path("auto")


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preload", type=pathlib.Path, metavar="LIBRARY",
        help="LD_PRELOAD of the peers (never of vitkern), where a virtual machine hides from them"
        " what its CPU can do; auto: benchmarks/amx_cpuid.c if this one hides AMX's tiles",
    )  # fmt: skip


def chosen(library: pathlib.Path | None, cpu: Mapping[str, object]) -> pathlib.Path | None:
    """What to preload, compiled if need be, or None; ValueError: it cannot be.

    cpu: what vitkern knows of this CPU (`vitkern.measure.machine.features`).
    """
    if library == AUTO:
        return compiled() if tiles_are_hidden(cpu) else None
    if library is not None and not library.is_file():
        raise ValueError(f"--preload {library}: no such file")
    return library


def tiles_are_hidden(cpu: Mapping[str, object]) -> bool:
    """Whether there is AMX, and no CPUID leaf that says how large its tiles are."""
    flags = cpu.get("flags")
    has_tiles = isinstance(flags, Mapping) and bool(flags.get("amx_tile"))
    return has_tiles and not cpu.get("amx_palettes")


def compiled(to: pathlib.Path = BUILT) -> pathlib.Path:
    """The library of amx_cpuid.c, built anew if its source is newer."""
    if to.is_file() and to.stat().st_mtime >= SOURCE.stat().st_mtime:
        return to
    compiler = shutil.which("cc")
    if not compiler:
        raise ValueError(f"--preload auto: {SOURCE.name} needs a C compiler: none is called cc")
    to.parent.mkdir(parents=True, exist_ok=True)
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    command = [compiler, *flags, "-o", str(to), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"--preload auto: {SOURCE.name} does not compile: {done.stderr.strip()}")
    return to
