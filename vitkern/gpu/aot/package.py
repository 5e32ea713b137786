"""A folder of binaries as a Python package, vitkern-kernels, that pip installs.

    FOLDER/pyproject.toml
    FOLDER/vitkern_kernels/__init__.py      folder: where the binaries are
    FOLDER/vitkern_kernels/binaries/        manifest.json and the binaries (folder.py)

`runtime/lookup.py` finds it by its name wherever it is installed. It has no code of its own but the
path, and asks pip for nothing but vitkern: a requirement of one Triton could replace that of an
installed torch.
"""

from __future__ import annotations

import os
import pathlib

import triton

from ..manifest import PACKAGE
from . import folder

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "vitkern-kernels"
version = "{version}"
description = "GPU kernels of vitkern {version}, compiled by Triton {triton}"
requires-python = ">=3.10"
dependencies = ["vitkern=={version}"]

[tool.setuptools]
packages = ["{name}"]
include-package-data = false

[tool.setuptools.package-data]
{name} = ["binaries/manifest.json", "binaries/*/*.cubin", "binaries/*/*.hsaco"]
"""

MODULE = '''\
"""Compiled kernels for vitkern, which finds them by this package's name."""

import pathlib

folder = pathlib.Path(__file__).parent / "binaries"
'''


def make(out: str | os.PathLike) -> pathlib.Path:
    """Write all but the binaries; returns the folder that they go to."""
    root = folder.make(out)
    binaries = folder.make(root / PACKAGE / "binaries")
    facts = {"version": folder.version(), "triton": triton.__version__, "name": PACKAGE}
    folder.write_whole(root / "pyproject.toml", PROJECT.format(**facts).encode())
    folder.write_whole(root / PACKAGE / "__init__.py", MODULE.encode())
    return binaries
