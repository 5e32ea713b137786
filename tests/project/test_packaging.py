"""The package installs for real: from its source archive, in a path with spaces, without torch."""

import os
import pathlib
import subprocess
import sys
import tarfile
import venv

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def run(*command: object, cwd: pathlib.Path, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in {"CMAKE_ARGS", "CXX"}}
    clean.pop("PYTHONPATH", None)
    command = [str(part) for part in command]
    return subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True
    )


def install(python: pathlib.Path, *arguments: str, cwd: pathlib.Path) -> None:
    """pip install without the dependencies: torch is needed to run, not to build.

    Compiled at -O0 for one instruction set: the way is tested here, not the kernels.
    """
    command = (python, "-m", "pip", "install", "--no-deps", *arguments)
    quick = "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DVITKERN_ISAS=portable"
    done = run(*command, cwd=cwd, CMAKE_ARGS=quick)
    report = done.stdout + done.stderr
    if done.returncode and "No matching distribution found for setuptools" in report:
        pytest.skip("an isolated build needs a package index, and none answers")
    assert done.returncode == 0, report[-6000:]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> pathlib.Path:
    """The project unpacked from its own source archive, as a user of that archive has it."""
    folder = tmp_path_factory.mktemp("a path with spaces")
    # egg_info elsewhere: an older list of files beside the tree would hide a gap in MANIFEST.in.
    command = ("setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "-d", folder)
    made = run(sys.executable, *command, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    (archive,) = folder.glob("vitkern-*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def python(tree) -> pathlib.Path:
    """An environment with nothing in it but pip."""
    folder = tree.parent / "an environment"
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


IMPORT = "import vitkern._C as c, vitkern; print(c.__file__); print(vitkern.__version__)"


@pytest.mark.full
def test_isolated_install_builds_the_extension(tree, python):
    install(python, ".", cwd=tree)
    imported = run(python, "-c", IMPORT, cwd=tree.parent)
    assert imported.returncode == 0, imported.stderr
    extension, version = imported.stdout.split("\n")[:2]
    assert "site-packages" in extension
    assert version == tree.name.removeprefix("vitkern-")


@pytest.mark.full
def test_editable_install_serves_the_tree(tree, python):
    install(python, "-e", ".", cwd=tree)
    imported = run(python, "-c", IMPORT, cwd=tree.parent)
    assert imported.returncode == 0, imported.stderr
    assert pathlib.Path(imported.stdout.split("\n")[0]).parent == (tree / "vitkern").resolve()


@pytest.mark.parametrize("compiler", ["", "no-such-compiler"], ids=["none", "CXX-wrong"])
def test_missing_compiler_says_what_to_install(tree, tmp_path, compiler):
    command = (sys.executable, "setup.py", "-q", "build_ext")
    done = run(*command, cwd=tree, PATH=str(tmp_path), CXX=compiler)
    assert done.returncode != 0
    assert "no C++ compiler found" in done.stderr
    assert "apt-get install g++" in done.stderr
    assert "Traceback" not in done.stderr
    assert not compiler or compiler in done.stderr


def test_failing_compiler_is_reported_with_its_command(tree, tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'this compiler is broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    copy = tmp_path / "copy of the tree"
    copy.mkdir()
    for name in ("setup.py", "CMakeLists.txt"):
        (copy / name).write_text((tree / name).read_text())
    done = run(sys.executable, "setup.py", "-q", "build_ext", cwd=copy, CXX=str(broken))
    assert done.returncode != 0
    assert "vitkern: this failed, with the reason above" in done.stderr
    assert "Traceback" not in done.stderr
