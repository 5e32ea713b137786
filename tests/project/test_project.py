"""The promises the project makes about itself."""

import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

import vitkern
from tests.conftest import ROOT

SKIPPED_FOLDERS = {".git", ".venv", ".ruff_cache", ".mypy_cache", ".pytest_cache", ".benchmarks"}
SKIPPED_FOLDERS |= {"__pycache__", "build", "dist", "vitkern.egg-info"}
TEXT = {".py", ".pyi", ".cpp", ".hpp", ".inc", ".h", ".md", ".toml", ".txt", ".in", ".cfg", ""}
TEXT |= {".yaml", ".yml", ".cff"}


def project_files() -> list[pathlib.Path]:
    """What the repository holds, without what tools put beside it."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        # In a worktree .git is a file.
        found += [pathlib.Path(folder, name) for name in files if name not in SKIPPED_FOLDERS]
    return sorted(found)


def relative(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


FILES = project_files()


# ---- Files -------------------------------------------------------------------


def test_files_are_small():
    code = [path for path in FILES if path.suffix in {".py", ".cpp", ".hpp", ".inc"}]
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in code}
    too_long = {name: count for name, count in lines.items() if count > 400}
    assert not too_long, f"over 400 lines, split them: {too_long}"


def test_names_say_what_is_inside():
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    bad = [relative(path) for path in FILES if vague & {path.stem, path.parent.name}]
    assert not bad, f"a name must say what is inside: {bad}"


# Written so that no pattern matches its own line.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~-])/(?:work|root|home|opt|mnt|Users)/\w",
    "a package registry's host": r"\b(?:pypi|pythonhosted|conda\.anaconda)[.](?:org|com)\b",
    "an unfinished part": r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_is_left_lying_about(what):
    pattern = re.compile(FORBIDDEN[what])
    texts = [path for path in FILES if path.suffix in TEXT and path.name != "LICENSE"]
    bad = []
    for path in texts:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line):
                bad.append(f"{relative(path)}:{number}: {line.strip()}")
    assert not bad, f"{what}:\n" + "\n".join(bad)


# ---- The package -------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh Python has loaded after this statement."""
    code = f"{statement}\nimport sys\nprint(*sorted(sys.modules), sep='\\n')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_triton_nor_the_extension():
    assert not loaded_by("import vitkern") & {"torch", "triton", "vitkern._C", "vitkern.gpu"}


def test_importing_the_model_loads_neither_triton_nor_the_extension():
    assert not loaded_by("from vitkern import ViT") & {"triton", "vitkern._C", "vitkern.gpu"}


def test_launching_loads_no_build_tools():
    pytest.importorskip("triton")
    loaded = loaded_by("import vitkern.gpu.runtime.device, vitkern.gpu.runtime.plan")
    assert not {name for name in loaded if name.startswith("vitkern.gpu.aot")}


def test_version_is_the_same_everywhere():
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert vitkern.__version__ == declared
    assert importlib.metadata.version("vitkern") == declared, "stale install: run `make setup`"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+)", changelog, re.M)
    assert not released or released[0] == declared, "CHANGELOG.md's newest release"


# ---- Native objects ----------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, True])
def test_per_isa_objects_hold_no_weak_symbols(tmp_path, whole):
    """The linker keeps one copy of a weak function: an AVX-512 copy would then run on every CPU.

    At -O0 nothing is inlined away, so each inline function that could become such a symbol shows.
    Three sets show what comes from the headers that all share; `whole` takes the others and int8.
    """
    cmake, nm = (shutil.which(name, path=TOOL_PATH) for name in ("cmake", "nm"))
    compiler = shutil.which("c++") or os.environ.get("CXX")
    if not (cmake and nm and compiler):
        pytest.skip("needs cmake, nm and a C++ compiler")
    configure = [cmake, "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja"]
    configure += ["-DVITKERN_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]
    x86 = platform.machine() in ("x86_64", "AMD64")
    rows = (ROOT / "csrc" / "cpu" / "isas.inc").read_text(encoding="utf-8")
    sets = re.findall(r"^VITKERN_INSTRUCTION_SET\((\w+), \w+, (\w+),", rows, re.M)
    isas = [isa for isa, machine in sets if x86 or machine == "any"]
    assert "portable" in isas
    if whole:
        isas += [f"{isa}_int8" for isa in isas]
    else:
        isas = [isa for isa in isas if isa in ("portable", "avx2", "amx")]
    build = [cmake, "--build", str(tmp_path), "--target", *(f"cpu_{isa}" for isa in isas)]
    for command in (configure, build):
        run = subprocess.run(command, capture_output=True, text=True, env=TOOL_ENVIRONMENT)
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    objects = [path for isa in isas for path in tmp_path.glob(f"**/cpu_{isa}.dir/**/*.o")]
    assert objects, "no per-ISA objects were built"
    weak = []
    for path in objects:
        command = [nm, "--defined-only", "--demangle", str(path)]
        for line in subprocess.check_output(command, text=True).splitlines():
            _, kind, symbol = line.split(maxsplit=2)
            # DW.ref.* is the exception table's pointer to the runtime: data, the same for each ISA.
            if kind in "WwVvu" and not symbol.startswith("DW.ref."):
                weak.append(f"{path.parent.parent.parent.name}/{path.name}: {symbol}")
    assert not weak, "put these into an unnamed namespace or out of the kernels:\n" + "\n".join(
        weak
    )


TOOL_PATH = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])
TOOL_ENVIRONMENT = {**os.environ, "PATH": TOOL_PATH}
