"""Every Triton that a user's torch may bring, times every architecture: do the kernels compile?

Each Triton is installed beside the tested one, once, into the user's cache; without an index the
tests of it are skipped. `make test` tries the installed one alone.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap

import pytest

pytest.importorskip("triton")
import triton

from tests.gpu import version_matrix
from tests.gpu.test_compiler import OLD_TRITON

ROOT = pathlib.Path(__file__).parents[2]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitkern/triton"
VERSIONS = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
TOO_OLD = ("3.2.0", "3.3.1")  # of torch 2.6 and 2.7
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100")


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
        pytest.skip(f"triton {version} cannot be installed: {ran.stderr.strip()[-200:]}")
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
    """Python with this Triton in the place of the installed one."""
    environment = {**os.environ, "PYTHONPATH": f"{folder_of(version)}{os.pathsep}{ROOT}"}
    if version == "3.4.0":
        environment["TRITON_HIP_LLD_PATH"] = linker()
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("arch", ["sm_80", "gfx90a"])
def test_a_forward_compiles_with_the_installed_triton(arch):
    wanted = version_matrix.forward(arch, "Ti/16", "bf16")
    assert len(wanted) > 5 and not version_matrix.compile_all(arch, wanted)


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("model", ("Ti/16", "eva02_tiny_patch14_336"))
def test_every_kernel_compiles(model, version, arch):
    """Of a plain model, and of one with rotary positions and a gated MLP."""
    ran = run_with(version, "-m", "tests.gpu.version_matrix", arch, model, "bf16,fp32")
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert f"triton {version} {arch}: " in ran.stdout
    print(ran.stdout)


COUNT = """
from tests.gpu.aot_kernels import plain_variant
from vitkern.gpu.aot.build import compile_variant
print([compile_variant(plain_variant(arch), arch).facts["hidden_parameters"]
       for arch in ("sm_80", "gfx942")])
"""


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_the_build_counts_the_parameters_that_triton_appends(version):
    """3.4 has memory for all blocks together, later ones also some for the profiler."""
    ran = run_with(version, "-c", COUNT)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == ("[1, 1]" if version == "3.4.0" else "[2, 2]")


@pytest.mark.full
@pytest.mark.parametrize("version", TOO_OLD)
def test_the_references_run_with_an_older_one(version):
    """With the real one: what test_compiler.py shows with another version's number."""
    script = textwrap.dedent(OLD_TRITON).replace('triton.__version__ = "3.3.1"', "")
    ran = run_with(version, "-c", script)
    assert ran.returncode == 0, ran.stderr
    assert "the GPU backend is not available (the GPU kernels need Triton 3.4" in ran.stdout
    assert f"this is {version})" in ran.stdout


def test_the_installed_one_is_in_the_matrix():
    assert triton.__version__ in VERSIONS
