"""The software: versions, optional extras, the compiled extension, OpenMP runtimes, settings."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
from typing import Any

import vitkern

# Distributions whose version decides what runs or how fast, besides those of vitkern's extras.
_VERSIONS = (
    "torch", "numpy", "triton", "timm", "torchvision", "transformers", "onnxruntime", "openvino",
    "safetensors",
)  # fmt: skip
_SETTINGS = re.compile(
    r"VITKERN_|OMP_|KMP_|GOMP_|MKL_|ONEDNN_|DNNL_|ATEN_CPU|CUDA_VISIBLE|HIP_VISIBLE|LD_PRELOAD$"
)
_OPENMP = re.compile(r"/(lib(?:gomp|iomp5|omp)(?:-\w+)?\.so[\w.]*)$")
# Extras for those who work on vitkern itself: nobody else misses them.
_FOR_DEVELOPERS = {"test", "dev", "peers"}


def versions() -> dict[str, str | None]:
    """Of vitkern, Python, the system and the libraries; None for what is not installed."""
    found: dict[str, str | None] = {
        "vitkern": vitkern.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    return found | {name: version(name) for name in _VERSIONS}


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def extras() -> dict[str, list[str]]:
    """Every extra of vitkern with what it still lacks; nothing where vitkern is not installed."""
    try:
        wanted = importlib.metadata.requires("vitkern") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    by_extra: dict[str, list[str]] = {}
    for line in wanted:
        requirement, _, marker = line.partition(";")
        for extra in re.findall(r"extra == ['\"]([\w-]+)['\"]", marker):
            by_extra.setdefault(extra, []).append(requirement.strip())
    return {
        extra: sorted(set(_lacking(extra, by_extra)))
        for extra in by_extra
        if extra not in _FOR_DEVELOPERS
    }


def _lacking(extra: str, by_extra: dict[str, list[str]]) -> list[str]:
    found = []
    for requirement in by_extra.get(extra, []):
        own = re.match(r"vitkern\[([\w, -]+)\]", requirement)
        if own:
            for other in own[1].split(","):
                found += _lacking(other.strip(), by_extra)
            continue
        name = re.match(r"[\w.-]+", requirement)
        # tomli is needed before Python 3.11 alone: its marker says so, and `tomllib` is there.
        if name and name[0] != "tomli" and version(name[0]) is None:
            found.append(name[0])
    return found


def extension() -> dict[str, Any]:
    """The compiled part: its file, or why it is not there; in a clone, sources newer than it."""
    package = pathlib.Path(vitkern.__file__).parent
    found: dict[str, Any] = {"package": str(package), "file": None, "problem": "", "newer": []}
    try:
        from .. import _C
    except ImportError as error:
        return {**found, "problem": str(error)}
    found["file"] = _C.__file__
    if not hasattr(_C, "instruction_sets"):
        return {**found, "problem": f"{_C.__file__} is of an older vitkern than {package}"}
    return {**found, "newer": newer_sources(package.parent, pathlib.Path(_C.__file__))}


def newer_sources(root: pathlib.Path, built: pathlib.Path) -> list[str]:
    """Sources of a clone that changed after the extension was built, the newest first."""
    if not (root / "csrc").is_dir():
        return []
    sources = [*(root / "csrc").rglob("*"), root / "CMakeLists.txt", root / "setup.py"]
    when = built.stat().st_mtime
    changed = [path for path in sources if path.is_file() and path.stat().st_mtime > when]
    changed.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.relative_to(root).as_posix() for path in changed]


def openmp() -> list[str]:
    """The OpenMP runtimes that this process has loaded: PyTorch's, which vitkern shares."""
    try:
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    mapped = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return sorted({path for path in mapped if _OPENMP.search(path)})


def settings() -> dict[str, str]:
    """Environment variables that change what runs."""
    return {name: os.environ[name] for name in sorted(os.environ) if _SETTINGS.match(name)}
