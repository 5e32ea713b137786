"""Kernels that no folder of binaries has: compiled at their first use, and kept for the next time.

In the user's cache a kernel is two files, the binary and what a manifest would say of it:

    <folder>/<Triton's version>/sm_90/<kernel>-<hash of the code>.cubin
    <folder>/<Triton's version>/sm_90/<kernel>-<hash of all that made it>.json

Both are written beside their place and moved there, the binary first, so that processes need no
lock: at worst two compile the same. What is damaged is compiled again. The folder is that of the
environment variable VITKERN_CACHE, else `vitkern/kernels` in the user's cache; it stays below the
size that VITKERN_CACHE_SIZE says (eviction.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import triton

from .. import manifest
from ..compiler import compile_variant, key_of, source_of
from ..launch import Variant
from . import eviction, workers
from .binary import BinaryError, Entry, entry_from
from .eviction import FOLDER, default_folder

LARGEST_ENTRY = 1 << 20  # bytes of a .json, which has one or two thousand
LONG = 15.0  # seconds of compiling after which a log hears of it


class Cache:
    """The compiled kernels of one architecture and of this Triton."""

    def __init__(self, arch: str, folder: str | os.PathLike | None = None) -> None:
        self.arch, self.compiled = arch, 0  # kernels that this process compiled
        self._memory: dict[str, Entry] = {}  # by key: what could not be written
        self._warned = False
        self._seconds = self._said = 0.0
        self._most = eviction.limit()
        self.folder: pathlib.Path | None = None
        try:
            place = pathlib.Path(folder) if folder is not None else default_folder()
            self.folder = place / re.sub(r"[^\w.+-]", "_", triton.__version__)
        except RuntimeError as error:
            self._homeless = str(error)

    def find(self, variant: Variant) -> Entry | None:
        """The kernel with its binary, or None if it is not there or not whole."""
        key = key_of(variant, self.arch)
        if self.folder is None or key in self._memory:
            return self._memory.get(key)
        try:
            path = manifest.place(self.folder, self._name(variant, key, "cubin"))
            path = path.with_suffix(".json")
            row = json.loads(manifest.content(path, LARGEST_ENTRY).decode("utf-8"))
            entry = entry_from(row, self.folder)
            if (row.get("key"), entry.id, entry.arch) != (key, variant.name, self.arch):
                return None
            whole = dataclasses.replace(entry, code=manifest.binary(entry.file, entry.sha256))
            eviction.used(path, entry.file)
            return whole
        except (OSError, ValueError, RecursionError, BinaryError):
            return None

    def compile(self, variant: Variant, place: str = "") -> Entry:
        """Compile a kernel and keep it; `place` ("3 of 12") is for those who wait."""
        start = time.monotonic()
        self._say(f"compiling {variant.kernel.__name__} for {self.arch}{place and f', {place}'}")
        try:
            binary = compile_variant(variant, self.arch)
        except Exception as error:
            raise self._failure(variant, f"{type(error).__name__}: {error}") from error
        finally:
            self._seconds += time.monotonic() - start
            self._say("")
        self.compiled += 1
        return self.keep(variant, binary.facts, binary.code)

    def compile_all(self, variants: Sequence[Variant]) -> None:
        """Compile several kernels and keep them, in as many processes as pay."""
        left, jobs, count = list(variants), workers.wanted(len(variants)), len(variants)
        if jobs:
            start, before = time.monotonic(), self._seconds
            said = f"compiling {count} kernels for {self.arch} in {jobs} processes"
            self._say(said)
            try:
                for variant, made in workers.compile_all(variants, self.arch, jobs):
                    if made.failure:
                        raise self._failure(variant, made.failure)
                    left.remove(variant)
                    self.compiled += 1
                    self.keep(variant, made.facts, made.code)
                    self._seconds = before + time.monotonic() - start
                    self._say(f"{said}, {count - len(left)} done")
            finally:
                self._say("")
        for i, variant in enumerate(left, count - len(left) + 1):  # that no process took
            self.compile(variant, f"{i} of {count}")

    def _failure(self, variant: Variant, why: str) -> RuntimeError:
        return RuntimeError(
            f"vitkern: Triton {triton.__version__} cannot compile {variant.name} for {self.arch} "
            f"({why}): set model.path = 'reference', and please report this"
        )

    def keep(self, variant: Variant, facts: dict[str, Any], code: bytes) -> Entry:
        """Put a compiled kernel into the cache; `facts`: what a manifest says of it."""
        key, sha256 = key_of(variant, self.arch), hashlib.sha256(code).hexdigest()
        suffix = "hsaco" if self.arch.startswith("gfx") else "cubin"
        made = {
            "file": self._name(variant, sha256, suffix),
            "sha256": sha256,
            "source": source_of(variant.kernel),
            "key": key,
        }
        row = json.loads(json.dumps(facts | made))  # as it will be read
        entry = dataclasses.replace(entry_from(row, pathlib.Path("in memory")), code=code)
        try:
            if self.folder is None:
                raise OSError(self._homeless)
            path = manifest.place(self.folder, row["file"])
            path.parent.mkdir(parents=True, exist_ok=True)
            manifest.write_whole(path, code)
            text = json.dumps(row, indent=1).encode()
            manifest.write_whole(self.folder / self._name(variant, key, "json"), text)
        except (OSError, ValueError) as error:  # ValueError: a link leads there
            self._memory[key] = entry
            self._warn(str(error))
            return entry
        eviction.trim(self.folder.parent, self._most)
        return dataclasses.replace(entry, file=path)

    def _name(self, variant: Variant, key: str, suffix: str) -> str:
        return f"{self.arch}/{variant.kernel.__name__}-{key[:16]}.{suffix}"

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"vitkern: compiled kernels cannot be kept ({why}): every process compiles them "
                f"again. Let {FOLDER} name a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )

    def _say(self, what: str) -> None:
        """What is going on: on a terminal while it does, in a log when it takes long."""
        if sys.stderr is None:
            return
        if sys.stderr.isatty():
            text = what and f"vitkern: {what} (`vitkern warmup` does it ahead of time)"
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif what and self._seconds - self._said >= LONG:
            self._said = self._seconds
            done = f"compiled {self.compiled} kernels in {self._seconds:.0f} s"
            print(f"vitkern: {done}, {what}", file=sys.stderr, flush=True)
