"""Builds vitkern._C with CMake and Ninja. All metadata is in pyproject.toml.

The environment variable CMAKE_ARGS adds arguments to CMake's first call, CXX names the compiler and
CMAKE_BUILD_PARALLEL_LEVEL limits the number of compilers that run at once.
"""

import importlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = pathlib.Path(__file__).resolve().parent

NO_COMPILER = """vitkern: no C++ compiler found (looked for {names}).
The CPU kernels are compiled on this machine and need GCC >= 10 or Clang >= 12:
  Debian, Ubuntu   apt-get install g++
  Fedora, RHEL     dnf install gcc-c++
  macOS            xcode-select --install
  conda            conda install -c conda-forge cxx-compiler
A compiler in another place: set the environment variable CXX to it."""

NO_TOOL = """vitkern: {name} not found.
An ordinary `pip install` fetches it by itself; with --no-build-isolation it has to be there first:
  python -m pip install "setuptools>=77" "cmake>=3.20" ninja pybind11"""


def require_compiler() -> None:
    """Stops with advice where CMake would stop with a page of its own log."""
    chosen = shlex.split(os.environ.get("CXX", ""))[:1]
    names = chosen or ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        raise CompileError(NO_COMPILER.format(names=", ".join(names)))


def find_tool(name: str, folder_attribute: str) -> str:
    """The program in the Python package `name`, which may be off PATH, or else the system's."""
    try:
        folder = getattr(importlib.import_module(name), folder_attribute)
    except (ImportError, AttributeError):
        folder = None
    found = (folder and shutil.which(name, path=folder)) or shutil.which(name)
    if not found:
        raise CompileError(NO_TOOL.format(name=name))
    return found


def pybind11_folder() -> str:
    try:
        return importlib.import_module("pybind11").get_cmake_dir()
    except ImportError:
        raise CompileError(NO_TOOL.format(name="pybind11")) from None


class CMakeBuild(build_ext):
    """One build folder per Python, kept, so that a second build compiles only what changed."""

    def build_extension(self, ext: Extension) -> None:
        require_compiler()
        cmake, ninja = find_tool("cmake", "CMAKE_BIN_DIR"), find_tool("ninja", "BIN_DIR")
        build = ROOT / "build" / f"cmake-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        self.forget_other_tree(build)
        configure = [
            *[cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja"],
            # Given each time: the tools of an isolated build are gone at the next.
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-Dpybind11_DIR={pybind11_folder()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        try:
            subprocess.run(configure, check=True)
            subprocess.run([cmake, "--build", str(build), "--target", "_C"], check=True)
        except subprocess.CalledProcessError as error:
            command = shlex.join(error.cmd)
            raise CompileError(
                f"vitkern: this failed, with the reason above:\n  {command}"
            ) from None
        target = pathlib.Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # not written in place: a running Python may have it mapped
        shutil.copy2(build / target.name, target)

    @staticmethod
    def forget_other_tree(build: pathlib.Path) -> None:
        """CMake refuses a build folder that was moved together with its tree: start again."""
        cache = build / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(build)


setup(ext_modules=[Extension("vitkern._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
