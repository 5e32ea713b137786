"""What peers get preloaded, and that the library that tells them of AMX's tiles does so."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from benchmarks import preload
from benchmarks.cpu import __main__ as bench
from tests.conftest import ROOT
from tests.evidence.amx.test_amx import NATIVE
from vitkern import _C

HIDDEN = {"flags": {"amx_tile": True}, "amx_palettes": 0}
needs_cc = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64" or not shutil.which("cc"),
    reason="needs Linux on x86-64 and a C compiler called cc",
)

# Palettes that a process, its threads and its forks see; its own handler of faults still works.
ASKS = """
import faulthandler, os, threading
from vitkern import _C
seen = [_C.features()["amx_palettes"]]
thread = threading.Thread(target=lambda: seen.append(_C.features()["amx_palettes"]))
thread.start(), thread.join()
faulthandler.enable()
seen.append(_C.features()["amx_palettes"])
print(*seen, flush=True)
if os.fork() == 0:
    os._exit(_C.features()["amx_palettes"])
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
faulthandler._sigsegv()
"""


def asked(library: pathlib.Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", ASKS]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@needs_cc
def test_the_library_compiles_without_a_warning_and_once(tmp_path):
    built = preload.compiled(tmp_path / "build" / "amx_cpuid.so")
    first = built.stat().st_mtime_ns
    assert preload.compiled(built) == built and built.stat().st_mtime_ns == first
    os.utime(built, (0, 0))
    assert preload.compiled(built).stat().st_mtime > 0, "its source is newer"


@needs_cc
def test_the_library_changes_nothing_where_nothing_is_hidden(tmp_path):
    """Without AMX, or with its leaves; where AMX is hidden it says what is."""
    known = _C.features()["amx_palettes"]
    done = asked(preload.compiled(tmp_path / "amx_cpuid.so"))
    first, *_ = done.stdout.splitlines()
    assert first.split() == [str(1 if NATIVE else known)] * 3


@needs_cc
def test_the_library_answers_for_the_hidden_leaves(tmp_path):
    """As on a CPU with AMX, told so by a macro."""
    library = tmp_path / "always.so"
    command = ["cc", "-shared", "-fPIC", "-DWITHOUT_TILES", "-o", library, preload.SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    done = asked(library)
    if "CPUID cannot be made to fault" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.split() == ["1"] * 4
    assert "Fatal Python error: Segmentation fault" in done.stderr, "the handler that came later"


def test_auto_preloads_only_where_the_tiles_are_hidden(monkeypatch):
    monkeypatch.setattr(preload, "compiled", lambda: pathlib.Path("built.so"))
    assert preload.chosen(preload.AUTO, HIDDEN) == pathlib.Path("built.so")
    for other in ({}, HIDDEN | {"amx_palettes": 1}, HIDDEN | {"flags": {"amx_tile": False}}):
        assert preload.chosen(preload.AUTO, other) is None
    assert preload.chosen(None, HIDDEN) is None


def test_auto_without_a_compiler_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="none is called cc"):
        preload.compiled(tmp_path / "amx_cpuid.so")


def test_make_bench_amx_asks_for_it():
    makefile = (ROOT / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if "--preload auto" in line]
    words = line.split('ARGS="')[1].split("$(ARGS)")[0].split()
    given = bench.parse(words)
    assert given.preload == preload.AUTO
    assert given.machine_class is None, "a CPU whose AMX has fp16 is of another class"
