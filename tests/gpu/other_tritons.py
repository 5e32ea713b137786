"""Other Tritons beside the tested one: installed once into the user's cache, run in a process.

Without an index of packages `run_with` raises NotInstalled for those that are not there yet.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import triton

ROOT = pathlib.Path(__file__).parents[2]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitkern/triton"
VERSIONS = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
TOO_OLD = ("3.2.0", "3.3.1")  # of torch 2.6 and 2.7


class NotInstalled(Exception):
    """pip could not install a version; the message is what it said."""


def folder_of(version: str) -> pathlib.Path:
    """Where this Triton is, installed now if it was not."""
    place = CACHE / version
    if (place / "triton").is_dir():
        return place
    CACHE.mkdir(parents=True, exist_ok=True)
    beside = tempfile.mkdtemp(dir=CACHE)  # moved when it is whole
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    pip += ["--no-deps", "--no-compile", "--target", beside, f"triton=={version}"]
    ran = subprocess.run(pip, capture_output=True, text=True)
    if ran.returncode:
        shutil.rmtree(beside)
        raise NotInstalled(f"triton {version} cannot be installed: {ran.stderr.strip()[-200:]}")
    try:
        os.rename(beside, place)
    except OSError:  # another process was faster
        shutil.rmtree(beside)
    return place


# Triton 3.4 links AMD's binaries with ROCm's linker, which its wheel does not have: nothing is
# loaded here, so the object file stands in.
LINKER = """#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in -flavor) shift ;; -o) shift; out="$1" ;; -*) ;; *) in="$1" ;; esac
  shift
done
[ -z "$out" ] || cp "$in" "$out"  # asked for its version: nothing
"""


def linker() -> str:
    path = CACHE / "ld.lld"
    if not path.is_file() or path.read_text() != LINKER:
        path.write_text(LINKER)
        path.chmod(0o755)
    return str(path)


def run_with(version: str, *command: str) -> subprocess.CompletedProcess:
    """Python with this Triton, in the place of the installed one if that is another."""
    folders = [str(ROOT)]
    if version != triton.__version__:
        folders.insert(0, str(folder_of(version)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    if version == "3.4.0":
        environment["TRITON_HIP_LLD_PATH"] = linker()
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True
    )
