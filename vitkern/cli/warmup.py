"""Compile the GPU kernels of a model into the user's cache, before its first forward does.

With a GPU for that one; without one for the architecture that is named.
A forward compiles what is missing by itself, and waits for it.
The cache is that of VITKERN_CACHE, else vitkern/kernels in the user's own.

Examples:
    vitkern warmup B/16
    vitkern warmup L/14 --batch 1,32 --precision bf16 --image-size 518 --arch sm_90
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import tempfile
from typing import TYPE_CHECKING

from ..gpu.configs import TARGETS, nearest_arch
from .aot import require_triton
from .name_lists import count_of, names, numbers

if TYPE_CHECKING:
    from ..gpu.aot.build import Result
    from ..gpu.launch import Variant
    from ..gpu.runtime.cache import Cache
    from ..gpu.runtime.device import DeviceExecutor


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help='such as "B/16", or one of timm\'s names')
    parser.add_argument(
        "--batch",
        type=numbers,
        default=[1, 8, 64],
        metavar="N,...",
        help="images at once (default 1,8,64)",
    )
    parser.add_argument(
        "--precision",
        type=names,
        default=["bf16"],
        metavar="NAME,...",
        help="of fp32,tf32,fp16,bf16 (default bf16), autocast-fp16,autocast-bf16",
    )
    parser.add_argument(
        "--image-size", type=int, metavar="N", help="pixels of a side (default the model's own)"
    )
    parser.add_argument("--training", action="store_true", help="a training step's kernels, too")
    parser.add_argument(
        "--arch",
        choices=TARGETS,
        metavar="NAME",
        help=f"of {','.join(TARGETS)} (default this GPU's)",
    )
    parser.add_argument(
        "--processors",
        type=count_of("multiprocessors"),
        metavar="N",
        help="multiprocessors of the GPU, with --arch (default those of its usual board)",
    )
    parser.add_argument(
        "--jobs",
        type=count_of("processes"),
        metavar="N",
        help="processes at once (default one per core)",
    )


def run(given: argparse.Namespace) -> int:
    require_triton()
    from ..gpu.runtime.cache import Cache

    arch, count = given.arch, given.processors
    if arch is None:
        if count is not None:
            raise ValueError(
                f"--processors {count} is for another GPU, but which architecture is it? "
                "Name it by --arch, such as sm_90, or leave --processors out for this GPU"
            )
        own = _own_gpu()
        arch, count = own.real_arch, own.processors
    cache = Cache(arch)
    wanted = _variants(given, arch, count)
    missing = [variant for variant in wanted if cache.find(variant) is None]
    there = len(wanted) - len(missing)
    result = None
    if missing:
        with tempfile.TemporaryDirectory() as beside:
            try:
                result = _build(cache.arch, missing, pathlib.Path(beside), given.jobs)
            except KeyboardInterrupt:
                print("interrupted: nothing was added")
                return 130
            _keep(cache, missing, result)
    failures = result.failures if result else []
    for failure in failures:
        print(f"FAILED {failure.id}\n       {failure.reason}")
    print(
        f"{len(wanted)} kernels of {given.model} for {cache.arch}: {there} there already, "
        f"{len(missing) - len(failures)} compiled, {len(failures)} failed; in {cache.folder}"
    )
    return 1 if failures else 0


def _own_gpu() -> DeviceExecutor:
    import torch

    from ..gpu.runtime import device

    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here: name an architecture by --arch, such as sm_90")
    return device.executor(torch.device("cuda"))


def _variants(given: argparse.Namespace, arch: str, processors: int | None) -> list[Variant]:
    """What the model asks for, each once, in the order of first use."""
    from ..engines import trace

    for name in given.precision:
        if name not in trace.MIXTURES:
            raise ValueError(f"unknown precision {name!r}; known: {', '.join(trace.MIXTURES)}")
    found: dict[Variant, None] = {}
    for precision, batch in itertools.product(given.precision, given.batch):
        cases = [trace.Case(given.model, precision, batch, images=kind) for kind in trace.IMAGES]
        if given.training:
            cases.append(trace.Case(given.model, precision, batch, training=True))
        for case in cases:
            case = case._replace(size=given.image_size)
            made = trace.launches(case, nearest_arch(arch), processors=processors)
            found |= dict.fromkeys(one.variant for one in made)
    return list(found)


def _build(arch: str, variants: list[Variant], folder: pathlib.Path, jobs: int | None) -> Result:
    from ..gpu.aot import build as aot
    from ..measure.progress import Progress

    with Progress("kernels") as progress:
        return aot.build({arch: variants}, folder, jobs, progress)


def _keep(cache: Cache, variants: list[Variant], result: Result) -> None:
    by_name = {variant.name: variant for variant in variants}
    for entry in result.entries:
        cache.keep(by_name[entry["id"]], entry, (result.folder / entry["file"]).read_bytes())
