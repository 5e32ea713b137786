"""Which folder of binaries serves: the user's choice, else an installed package's.

In this order: what `use_binaries` was given; the environment variable VITKERN_BINARIES; the folder
of the package vitkern-kernels (gpu/aot/package.py). The first that says anything decides, also if
it says that there is none (None, or an empty variable). A folder that the user named is an error
if it is bad. A package may have been left behind by an update of vitkern or Triton: it is used only
if it was built from these kernels by this Triton, else a warning says what to do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import warnings
from typing import NamedTuple

import triton

from .. import manifest
from .binary import BinaryError, Store

FOLDER = "VITKERN_BINARIES"


class Found(NamedTuple):
    """The binaries to use, and for people where they are or why there are none."""

    store: Store | None
    text: str


def find(chosen: str | None) -> Found:
    """`chosen`: the folder that `use_binaries` was given, "" for none; None: it was not called."""
    named = os.environ.get(FOLDER) if chosen is None else chosen
    if named is None:
        return installed()
    if named:
        return Found(store(named), named)
    return Found(None, f"switched off by {FOLDER}" if chosen is None else "switched off")


@functools.lru_cache
def store(folder: str) -> Store:
    return Store(folder)


@functools.cache
def installed() -> Found:
    """Of the package, if there is one that fits."""
    name = manifest.PACKAGE
    if importlib.util.find_spec(name) is None:
        return Found(None, f"set {FOLDER} or install vitkern-kernels")
    try:
        folder = os.fspath(importlib.import_module(name).folder)
        there = Store(folder)
        reason = _foreign(there)
    except (ImportError, AttributeError, TypeError, BinaryError) as error:
        reason = str(error).removeprefix("vitkern: ")
    if not reason:
        return Found(there, f"{folder} of the package vitkern-kernels")
    text = f"vitkern-kernels is not used: {reason}"
    warnings.warn(f"vitkern: {text}; kernels are compiled at their first use", stacklevel=2)
    return Found(None, text)


def _foreign(there: Store) -> str:
    """Why binaries are not those of this vitkern and Triton; "" if they are."""
    here = importlib.metadata.version("vitkern")
    built = f"{there.folder} was built by vitkern {there.vitkern} and Triton {there.triton}"
    advice = "install or build the package again (vitkern aot --package)"
    if (there.vitkern, there.triton) != (here, triton.__version__):
        return f"{built}, here are {here} and {triton.__version__}: {advice}"
    if there.sources != manifest.sources():
        return f"{built} from other sources of the kernels: {advice}"
    return ""
