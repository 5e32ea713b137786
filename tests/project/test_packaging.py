"""The package installs for real: from its source archive, in a path with spaces, without torch."""

import os
import pathlib
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

import vitkern
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def run(*command: object, cwd: pathlib.Path, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in {"CMAKE_ARGS", "CXX"}}
    clean.pop("PYTHONPATH", None)
    command = [str(part) for part in command]
    return subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True
    )


def pip(python: pathlib.Path, *arguments: str, cwd: pathlib.Path) -> None:
    """pip without the dependencies: torch is needed to run, not to build.

    Compiled at -O0 for one instruction set: the way is tested here, not the kernels.
    """
    command = (python, "-m", "pip", arguments[0], "--no-deps", *arguments[1:])
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


PACKAGED = ("*.py", "py.typed", "_C.pyi", "*.toml", "page/*", "pretrained/*")
IMPORT = "import vitkern._C as c, vitkern; print(c.__file__); print(vitkern.__version__)"


@pytest.mark.full
def test_isolated_install_builds_the_extension(tree, python):
    pip(python, "install", ".", cwd=tree)
    imported = run(python, "-c", IMPORT, cwd=tree.parent)
    assert imported.returncode == 0, imported.stderr
    extension, version = imported.stdout.split("\n")[:2]
    assert "site-packages" in extension
    assert version == tree.name.removeprefix("vitkern-")


@pytest.mark.full
def test_wheel_holds_the_package_and_nothing_else(tree, python, tmp_path):
    """What tests and benchmarks use, the kernels' interpreter among it, stays in the repository."""
    pip(python, "wheel", "-w", str(tmp_path), ".", cwd=tree)
    (wheel,) = tmp_path.glob("vitkern-*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = {pathlib.PurePosixPath(name) for name in content.namelist()}
    version = tree.name.removeprefix("vitkern-")
    assert {name.parts[0] for name in names} == {"vitkern", f"vitkern-{version}.dist-info"}
    inside = {name.relative_to("vitkern") for name in names if name.parts[0] == "vitkern"}
    (extension,) = (name for name in inside if name.match("_C.*.so"))
    package = ROOT / "vitkern"
    source = [path for kind in PACKAGED for path in package.rglob(kind)]
    assert inside - {extension} == {path.relative_to(package) for path in source}
    assert not {part for name in inside for part in name.parts} & {"tests", "interpreter"}


def test_source_archive_holds_what_development_needs(tree):
    """Everything that git has, but what only a clone can use."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    missing = [name for name in listed.stdout.splitlines() if not (tree / name).is_file()]
    assert not missing, f"add to MANIFEST.in: {missing}"


@pytest.mark.full
def test_editable_install_serves_the_tree(tree, python):
    pip(python, "install", "-e", ".", cwd=tree)
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


def test_a_clone_that_is_not_built_says_what_to_do(monkeypatch):
    """Python started in the clone's folder imports from there, not what was installed."""
    monkeypatch.delattr(vitkern, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "vitkern._C", None)
    with pytest.raises(ImportError, match=r"is not built: leave this folder.*`pip install -e \.`"):
        from vitkern import _C  # noqa: F401
