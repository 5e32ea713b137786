"""Run the benchmark suite of a source checkout and draw its report.

On the CPU the suite compares every operator and whole models with eager PyTorch, timed in turns in
one process, and writes one JSON line per measurement. Arguments after -- go to pytest:
    vitkern bench -- -k layernorm

On a GPU, NVIDIA's or AMD's, it first checks operators, models and gradients against float64, and
stops with status 1 if an error is too large; then it times, by the device's own events, vitkern,
eager PyTorch with and without SDPA, timm, torch.compile, flash-attn and TensorRT, models of each
with and without a CUDA graph; writes rows and pictures, and says where they are and who is missing:
    vitkern bench --device cuda             # everything
    vitkern bench --device cuda --quick     # the smallest shapes: does it run, is it right
    vitkern bench --device cuda --model B/16 --batch 1,64 --dtype bf16 --compile default
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import subprocess
import sys

DTYPES = ("bf16", "fp16", "tf32", "fp32")


def names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    """1,8,64 -> [1, 8, 64]"""
    try:
        found = [int(part) for part in names(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of batch sizes such as 1,8,64")
    return found


def dtypes(text: str) -> list[str]:
    found = names(text)
    unknown = [name for name in found if name not in DTYPES]
    if unknown or not found:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {','.join(DTYPES)}")
    return found


# The options of a run on a GPU: of this command, of `python -m benchmarks.gpu` and of pytest.
GPU_OPTIONS: dict[str, dict] = {
    "--model": {
        "type": names,
        "metavar": "NAME,...",
        "help": "GPU: these models and no operators (default Ti/16,S/16,B/16,L/16)",
    },
    "--batch": {
        "type": numbers,
        "metavar": "B,...",
        "help": "GPU: these batch sizes (default 1,8,64,256 as memory allows)",
    },
    "--dtype": {
        "type": dtypes,
        "metavar": "NAME,...",
        "help": f"GPU: of {','.join(DTYPES)} (default all; tf32: fp32 with TF32 matmuls)",
    },
    "--compile": {
        "nargs": "?",
        "const": "default",
        "choices": ("none", "default", "max-autotune"),
        "help": "GPU: torch.compile's modes to time: none (so with --quick), default, or both of"
        " default and max-autotune (the default: compiling takes hours)",
    },
    "--image-size": {
        "type": int,
        "default": 224,
        "metavar": "PIXELS",
        "help": "GPU: height and width of the images (default 224)",
    },
}


def arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="the smallest shapes only")
    length.add_argument("--full", action="store_true", help="many more repetitions")
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu (default), cuda, cuda:1; ROCm's too"
    )
    for option, settings in GPU_OPTIONS.items():
        parser.add_argument(option, **settings)
    parser.add_argument(
        "--output",
        "--results",
        dest="results",
        type=pathlib.Path,
        metavar="FILE",
        help="where the rows go (default benchmarks/results: a file for the CPU, one for the GPU)",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FOLDER",
        help="draw --output there (GPU: default beside --output, else build/bench)",
    )
    parser.add_argument("--source", type=pathlib.Path, metavar="FOLDER", help="the source checkout")
    parser.add_argument("rest", nargs="*", metavar="-- ARGUMENT", help="arguments for pytest")


def checkout(given: pathlib.Path | None) -> pathlib.Path:
    """The folder that holds benchmarks/: the given one, the current one or the package's parent."""
    places = [given] if given else [pathlib.Path.cwd(), pathlib.Path(__file__).parents[2]]
    for place in places:
        if (place / "benchmarks" / "test_operators.py").is_file():
            return place.resolve()
    looked = " or ".join(str(place) for place in places)
    raise FileNotFoundError(
        f"no benchmarks in {looked}: run in a clone of the repository or name one with --source"
    )


def check_runs(source: pathlib.Path) -> None:
    """Refuse what would fail in the benchmarks' own process, which imports from `source`."""
    how = f"pip install -e '{source}[test]'"
    if importlib.util.find_spec("pytest_benchmark") is None:
        raise ImportError(f"the benchmarks need pytest and pytest-benchmark: {how}")
    package = source / "vitkern"
    if not any(package.glob("_C.*.so")) and package != pathlib.Path(__file__).parents[1]:
        raise ImportError(f"{package}, which the benchmarks import, is not built: {how}")


def run(given: argparse.Namespace) -> int:
    source = checkout(given.source)
    if given.device != "cpu":
        return run_gpu(given, source)
    refuse_gpu_options(given)
    if given.out and not given.results:
        raise ValueError("--out draws the rows of --output FILE: give both")
    check_runs(source)
    suite = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "-q"]
    suite += [f"--{mode}" for mode in ("quick", "full") if getattr(given, mode)]
    if given.results:
        suite += ["--results", str(given.results.resolve())]
    status = subprocess.run([*suite, *given.rest], cwd=source).returncode
    if status == 0 and given.out:
        report = [sys.executable, "-m", "benchmarks.report", str(given.results.resolve())]
        status = subprocess.run(
            [*report, "--pictures", str(given.out.resolve())], cwd=source
        ).returncode
    return status


def refuse_gpu_options(given: argparse.Namespace) -> None:
    for option, settings in GPU_OPTIONS.items():
        if getattr(given, option[2:].replace("-", "_")) != settings.get("default"):
            raise ValueError(
                f"{option} is for a GPU (--device cuda); on the CPU choose by name: -- -k S/16-8"
            )


def run_gpu(given: argparse.Namespace, source: pathlib.Path) -> int:
    if given.rest:
        raise ValueError(
            "arguments after -- go to pytest, which this does not start: call"
            " pytest benchmarks/ --benchmark-only --device cuda"
        )
    suite = [sys.executable, "-m", "benchmarks.gpu", "--device", given.device]
    suite += [f"--{mode}" for mode in ("quick", "full") if getattr(given, mode)]
    for option in GPU_OPTIONS:
        value = getattr(given, option[2:].replace("-", "_"))
        if value is not None:
            suite += [option, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    for option, path in (("--output", given.results), ("--out", given.out)):
        suite += [option, str(path.resolve())] if path else []
    return subprocess.run(suite, cwd=source).returncode
