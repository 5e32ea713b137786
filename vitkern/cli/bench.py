"""Time models beside eager PyTorch, torch.compile, ONNX Runtime and OpenVINO on this machine.

Every contestant has a process of its own, the same weights and images, and a turn in every round;
its error against float64 stands beside its time. Peers that are not installed are named and left
out. Into --out go the rows (results.jsonl), the tables (report.md) and two pictures (speedup.svg,
roofline.svg; they need matplotlib, the extra plots).

--compare sets results files of several machines or versions side by side.

On a GPU, NVIDIA's or AMD's (--device cuda, in a clone of the repository), it first checks
operators, models and gradients against float64, and stops with status 1 if an error is too large;
then it times, by the device's own events, vitkern, eager PyTorch with and without SDPA, timm,
torch.compile, flash-attn and TensorRT, models of each with and without a CUDA graph.

--suite runs the clone's benchmark suite on the CPU: every operator and model, and the tables of
docs/performance.md. Arguments after -- go to pytest then.

Status 0: all is well. 1: vitkern has no time, or an error that its precision does not allow.

Examples:
    vitkern bench --quick                           # does it run, roughly how fast
    vitkern bench --model B/16 --batch 1,8 --precision fp32,int8
    vitkern bench --model vit_small_patch16_224 --against torch,onnxruntime --threads 1
    vitkern bench --compare laptop.jsonl server.jsonl
    vitkern bench --device cuda --model B/16 --batch 1,64 --dtype bf16 --compile default
    vitkern bench --suite -- -k layernorm
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Callable

from .name_lists import names, names_of, numbers

DTYPES = ("bf16", "fp16", "tf32", "fp32")
CPU_PRECISIONS = ("fp32", "tf32", "bf16", "int8")
PEERS = ("torch", "compile", "onnxruntime", "openvino")
MODELS, BATCHES = ["S/16", "B/16"], [1, 8]
QUICK_MODELS, QUICK_BATCHES, QUICK_SIZE = ["Ti/16"], [1], 64
SECONDS, QUICK_SECONDS = 20.0, 3.0  # of turns for a case


# The options of a run on a GPU: of this command, of `python -m benchmarks.gpu` and of pytest.
GPU_OPTIONS: dict[str, dict] = {
    "--model": {
        "type": names,
        "metavar": "NAME,...",
        "help": "these models (default S/16,B/16; GPU: Ti/16,S/16,B/16,L/16, and operators)",
    },
    "--batch": {
        "type": numbers,
        "metavar": "B,...",
        "help": "these batch sizes (default 1,8; GPU: 1,8,64,256 as memory allows)",
    },
    "--dtype": {
        "type": names_of(DTYPES, "precision"),
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
        "help": "height and width of the images (default 224)",
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
        "--precision",
        type=names_of(CPU_PRECISIONS, "precision"),
        metavar="NAME,...",
        help=f"CPU: vitkern's, of {','.join(CPU_PRECISIONS)} (default all)",
    )
    parser.add_argument(
        "--against",
        type=names_of(PEERS, "engine", or_none=True),
        metavar="NAME,...",
        help=f"CPU: of {','.join(PEERS)}, or none (default those that are installed)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU: of everybody (PyTorch's)")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=f"CPU: of turns for each model and batch (default {SECONDS:g}, with --quick"
        f" {QUICK_SECONDS:g})",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        type=pathlib.Path,
        metavar="FILE",
        help="time nothing: print results files of a run (.jsonl) side by side",
    )
    parser.add_argument("--json", action="store_true", help="CPU: print the rows, a list")
    parser.add_argument("--suite", action="store_true", help="the benchmark suite of a clone")
    parser.add_argument(
        "--output",
        "--results",
        dest="results",
        type=pathlib.Path,
        metavar="FILE",
        help="where the rows go (default results.jsonl in --out; suite, GPU: benchmarks/results)",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FOLDER",
        help="tables and pictures (default vitkern-bench; suite: of --output, only if given; GPU:"
        " beside --output, else build/bench)",
    )
    parser.add_argument("--source", type=pathlib.Path, metavar="FOLDER", help="the clone")
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
    if given.compare:
        return compare(given)
    if given.device != "cpu":
        refuse(given, CPU_ONLY, "is for the CPU: leave out --device")
        return run_gpu(given, checkout(given.source))
    if given.suite:
        refuse(given, CPU_ONLY, "is not for --suite, whose cases are chosen by name: -- -k S/16-8")
        return run_suite(given, checkout(given.source))
    if given.rest:
        raise ValueError(f"{given.rest[0]!r} is for pytest: add --suite before --")
    refuse(given, ("source", "full"), "is for --suite or --device cuda")
    refuse(given, GPU_ONLY, "is for a GPU (--device cuda)")
    return run_cpu(given)


CPU_ONLY = ("precision", "against", "threads", "seconds", "json")
GPU_ONLY = ("dtype", "compile")


def refuse(given: argparse.Namespace, options: tuple[str, ...], why: str) -> None:
    """A ValueError for what would be ignored."""
    for option in options:
        if getattr(given, option) not in (None, False):
            raise ValueError(f"--{option} {why}")


def compare(given: argparse.Namespace) -> int:
    from ..bench.compare import table

    if len(given.compare) < 2:
        raise ValueError(f"--compare {given.compare[0]}: give two results files or more")
    print(table(given.compare))
    return 0


def run_cpu(given: argparse.Namespace) -> int:
    """Models against everybody who is installed; rows, tables and pictures into a folder."""
    for option in ("threads", "seconds", "image_size"):
        value = getattr(given, option)
        if value is not None and value <= 0:
            raise ValueError(f"--{option.replace('_', '-')} {value}: it must be positive")
    import json

    import torch

    from ..bench import session
    from ..bench.cases import Case
    from ..bench.turns import Runner
    from ..config import ViTConfig
    from ..measure.machine import features, let_torch_run_bf16

    quick = given.quick
    models = given.model or (QUICK_MODELS if quick else MODELS)
    size = QUICK_SIZE if quick and given.image_size == 224 else given.image_size
    for name in models:
        ViTConfig.named(name, image_size=size)  # an unknown name or size is refused at once
    flags = features().get("flags")
    if not isinstance(flags, dict):
        raise ImportError("the native extension is not built: vitkern doctor says more")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    note = let_torch_run_bf16()
    if note:
        say(note)
    batches = given.batch or (QUICK_BATCHES if quick else BATCHES)
    seconds = given.seconds or (QUICK_SECONDS if quick else SECONDS)
    folder = given.out or pathlib.Path("vitkern-bench")
    path = given.results or folder / "results.jsonl"
    against = session.installed() if given.against is None else given.against
    runner = Runner(given.threads or torch.get_num_threads(), seconds, say=say)
    everybody = session.chosen(flags, against, given.precision)
    cases = [Case(name, batch, size) for name in models for batch in batches]
    found = session.run(runner, cases, everybody, path, say)
    text = session.report(found)
    print(json.dumps(found) if given.json else text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text, encoding="utf-8")
    say(f"rows: {path.resolve()}\ntables: {(folder / 'report.md').resolve()}")
    draw(found, folder, say)
    problems = session.problems(found)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def draw(found: list[dict], folder: pathlib.Path, say: Callable[[str], None]) -> None:
    from ..bench import pictures

    try:
        for path in pictures.draw(found, folder):
            say(f"picture: {path.resolve()}")
    except ImportError as error:
        say(f"no pictures: {error}")


def run_suite(given: argparse.Namespace, source: pathlib.Path) -> int:
    for option in (*GPU_OPTIONS, "--json"):
        default = GPU_OPTIONS.get(option, {}).get("default")
        if getattr(given, option[2:].replace("-", "_")) not in (default, False):
            raise ValueError(f"{option} is not for --suite: choose by name: -- -k S/16-8")
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
