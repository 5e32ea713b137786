"""Compile the GPU kernels ahead of time; needs Triton, but no GPU.

The kernels are those that the named models launch, in inference and training. They go into a folder
together with manifest.json, and kernels that are there already are not compiled again. With
--package they become a Python package, vitkern-kernels, which vitkern finds once installed. About a
second a kernel and core, and a minute for the list of all of them for an architecture.

Examples:
    vitkern aot --arch sm_80,sm_90 --out kernels
    vitkern aot --arch sm_90 --dtype bf16 --models B/16,L/16 --no-backward --out kernels
    vitkern aot --arch sm_90 --package kernels
    pip install ./kernels
"""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import TYPE_CHECKING

from ..gpu.configs import ARCHS, BORROWED, TARGETS, nearest_arch
from .name_lists import count_of, names, names_of

if TYPE_CHECKING:
    from ..gpu.aot.build import Result, Verdict
    from ..gpu.launch import Variant


def arguments(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="where the binaries go")
    place.add_argument(
        "--package",
        type=pathlib.Path,
        metavar="FOLDER",
        help="where an installable package of them goes, vitkern-kernels",
    )
    parser.add_argument(
        "--arch",
        type=names_of(TARGETS, "architecture"),
        default=list(ARCHS),
        metavar="NAME,...",
        help=f"architectures, of {','.join(ARCHS)} (default all) and {','.join(BORROWED)}",
    )
    parser.add_argument(
        "--dtype",
        type=names,
        metavar="NAME,...",
        help="of fp32,tf32,fp16,bf16,autocast-fp16,autocast-bf16 (default all)",
    )
    parser.add_argument(
        "--models",
        type=names,
        metavar="NAME,...",
        help='models such as "B/16", timm\'s names, and families: vit, deit3, dinov2, clip, siglip,'
        " qk_norm, dinov3, eva02 (default all of these)",
    )
    parser.add_argument(
        "--no-backward", action="store_true", help="inference only: half of the kernels"
    )
    parser.add_argument(
        "--jobs",
        type=count_of("processes"),
        metavar="N",
        help="processes at once (default one per core)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also apply the gates on the machine code (spills, tensor instructions, widths)",
    )


def run(given: argparse.Namespace) -> int:
    require_triton()
    from ..engines import trace as aot_list
    from ..gpu.aot import package

    precisions = given.dtype or list(aot_list.USUAL)
    for name in precisions:
        if name not in aot_list.MIXTURES:
            known = ", ".join(aot_list.MIXTURES)
            raise ValueError(f"unknown dtype {name!r}; known: {known}")
    models = given.models or aot_list.MODELS
    print("listing what the models launch", flush=True)
    wanted = {
        arch: aot_list.variants(nearest_arch(arch), precisions, models, not given.no_backward)
        for arch in given.arch
    }
    out = given.out or package.make(given.package)
    try:
        result = build(wanted, out, given.jobs, given.check)
    except KeyboardInterrupt:
        print(f"interrupted: {out} is as complete as before")
        return 130
    for failure in result.failures:
        print(f"FAILED {failure.arch} {failure.id}\n       {failure.reason}")
    broken = [one for one in result.checked if one.broken]
    for one in broken:
        print(f"GATE   {one.report.arch} {one.label}\n       {'; '.join(one.broken)}")
    print(summary(result))
    if given.package:
        print(f"install it: pip install {given.package}")
    return 1 if result.failures or broken else 0


def require_triton() -> None:
    from ..gpu import triton_version

    try:
        import triton
    except ImportError as error:
        raise ImportError(
            f"the kernels are compiled with Triton, which is missing ({error}): "
            "pip install 'vitkern[gpu]'"
        ) from None
    triton_version.require(triton.__version__)


def build(
    wanted: dict[str, list[Variant]],
    out: os.PathLike[str],
    jobs: int | None,
    check: bool,
    verdict: Verdict = lambda one: None,
) -> Result:
    """`gpu.aot.build` with a bar, after saying how much there is to do."""
    from ..gpu.aot import build as aot
    from ..measure.progress import Progress

    counts = ", ".join(f"{len(several)} for {arch}" for arch, several in wanted.items())
    print(f"kernels: {counts}", flush=True)
    with Progress("kernels") as progress:
        return aot.build(wanted, out, jobs, progress, check, verdict)


def summary(result: Result) -> str:
    """What a build did, in one line."""
    earlier = len(result.entries) - result.built
    kept = f", {result.kept} others of earlier builds kept" if result.kept else ""
    return (
        f"{len(result.entries)} kernels, {result.bytes / 1e6:.1f} MB in {result.folder}: "
        f"{result.built} compiled and {earlier} there already{kept}, {len(result.failures)} failed,"
        f" {result.seconds:.0f} s"
    )
