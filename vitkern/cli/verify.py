"""Check every operator and whole models against float64 on this machine, and print a certificate.

An operator's results and gradients, at every shape of its row of the table, and a model's logits
and gradients at each precision are compared with the reference in float64. An error is given as a
multiple of the one that PyTorch itself makes here, and may be at most twice its worst and 1.25
times its rms error, plus one eps (docs/numerics.md). A row of the certificate shows the check that
came nearest to its limit.

Status 0: the contract is kept. 1: a result breaks it. 2: nothing was checked.

Examples:
    vitkern verify                        # all operators, B/16: some minutes on 2 cores
    vitkern verify --quick                # one shape of each operator, Ti/16 at 64 pixels
    vitkern verify --isa all              # every instruction set that this CPU can run
    vitkern verify --operator mlp,attention --precision bf16 --model none
    vitkern verify --model S/16,vit_base_patch32_224 --operator none --save certificates/mine
    vitkern verify --device cuda
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from typing import TYPE_CHECKING

from .name_lists import names_of, names_or_none

if TYPE_CHECKING:
    from ..verification.run import Check, Device

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8")
QUICK_MODEL, QUICK_SIZE = "Ti/16", 64


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=names_or_none,
        metavar="NAME,...",
        help=f"models (default B/16, with --quick {QUICK_MODEL}), or none",
    )
    parser.add_argument(
        "--operator",
        type=names_or_none,
        metavar="NAME,...",
        help="rows of the operator table, such as mlp or attention+bias (default all), or none",
    )
    parser.add_argument(
        "--precision",
        type=names_of(PRECISIONS, "precision"),
        default=list(PRECISIONS),
        metavar="NAME,...",
        help=f"of {','.join(PRECISIONS)} (default all that the device has)",
    )
    parser.add_argument(
        "--isa",
        type=names_or_none,
        metavar="NAME,...",
        help="instruction sets of the CPU, or all (default the one in use)",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu (default), cuda, cuda:1; ROCm's too"
    )
    parser.add_argument("--image-size", type=int, metavar="PIXELS", help="of the models' images")
    parser.add_argument("--quick", action="store_true", help="one shape of each operator, Ti/16")
    parser.add_argument(
        "--save",
        type=pathlib.Path,
        metavar="PREFIX",
        help="write the certificate to PREFIX.md and PREFIX.json",
    )
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")


def run(given: argparse.Namespace) -> int:
    if given.image_size is not None and given.image_size < 1:
        raise ValueError(f"--image-size {given.image_size}: an image has at least one pixel")
    if given.save is not None and (given.save.is_dir() or not given.save.name):
        raise ValueError(f"--save {given.save} is a folder: name a prefix inside of it")
    from ..measure.machine import let_torch_run_bf16
    from ..measure.progress import Progress
    from ..terminal import Paint
    from ..verification.certificate import Certificate
    from ..verification.run import carry_out

    note = let_torch_run_bf16()
    if note:
        print(note, file=sys.stderr)
    where = device(given)
    checks = plan(given, where)
    if not checks:
        raise ValueError(
            "nothing is left to check: the device has none of these precisions, or both --model"
            " and --operator are none"
        )
    begin, rows = time.perf_counter(), []
    with Progress("checks") as progress:
        for number, check in enumerate(checks, 1):
            rows += carry_out(check, where)
            progress(number, len(checks), check.text)
    seconds = time.perf_counter() - begin
    made = Certificate.of(rows, machine(where), seconds, command(given))
    paint = Paint.of()
    if given.json:
        print(made.json())
    else:
        text = made.text().replace("TOO LARGE", paint("TOO LARGE", "red", "bold"))
        print(text, *made.problems(), sep="\n")
        verdict = paint(made.summary(), "green" if made.passed else "red", "bold")
        print(f"\n{verdict} ({seconds:.0f} s, {made.date})")
    if given.save is not None:
        for path in made.save(given.save):
            print(f"certificate: {path.resolve()}", file=sys.stderr if given.json else sys.stdout)
    return 0 if made.passed else 1


def device(given: argparse.Namespace) -> Device:
    """Where the checks run; a ValueError where that cannot be."""
    import torch

    from ..verification.run import Device

    if given.device != "cpu":
        from ..gpu.runtime.device import arch_name
        from ..measure.machine import find_gpu

        if given.isa:
            raise ValueError(f"--isa {','.join(given.isa)} is for the CPU, not for {given.device}")
        gpu = find_gpu(given.device)
        return Device(gpu, (arch_name(gpu),))
    from .. import cpu

    used, able = cpu.isa(), cpu.isas()
    if given.isa is None:
        return Device(torch.device("cpu"), (used,))
    unknown = [name for name in given.isa if name not in able and name != "all"]
    if unknown:
        raise ValueError(
            f"--isa {','.join(unknown)}: this CPU and this build have {', '.join(able)}, or all;"
            " vitkern doctor says what the others need"
        )
    wanted = able if "all" in given.isa else given.isa
    return Device(torch.device("cpu"), tuple(dict.fromkeys([used, *wanted])))


def plan(given: argparse.Namespace, where: Device) -> list[Check]:
    """All checks: those of operators, then those of models."""
    from ..registry import REGISTRY
    from ..verification import run

    wanted = list(REGISTRY) if given.operator is None else given.operator
    unknown = [name for name in wanted if name not in REGISTRY]
    if unknown:
        raise ValueError(
            f"--operator {','.join(unknown)}: the table has {', '.join(REGISTRY)}, or none"
        )
    models = given.model
    size = given.image_size
    if models is None:
        models = [QUICK_MODEL] if given.quick else ["B/16"]
        size = size or (QUICK_SIZE if given.quick else None)
    found = list(run.operator_checks(wanted, given.precision, where, given.quick))
    for name in models:
        _known(name)
        found += run.model_checks(name, size, given.precision, where)
    return found


def _known(name: str) -> None:
    from ..config import ViTConfig

    ViTConfig.named(name)  # its error names what is close


def machine(where: Device) -> dict[str, object]:
    """What decides PyTorch's error and ours: the machine, versions, sets."""
    import torch

    import vitkern

    from ..doctor.software import versions
    from ..measure.machine import describe, describe_gpu

    about: dict[str, object] = {"vitkern": vitkern.__version__, **describe()}
    about |= {n: v for n, v in versions().items() if v and n not in about}
    if not where.is_cpu:
        about |= describe_gpu(torch.cuda.get_device_properties(where.device))
    return about


def command(given: argparse.Namespace) -> str:
    """The call again, with what was not the default."""
    words = ["vitkern verify"]
    for name in ("model", "operator", "isa"):
        value = getattr(given, name)
        if value is not None:
            words.append(f"--{name} {','.join(value) or 'none'}")
    if given.precision != list(PRECISIONS):
        words.append(f"--precision {','.join(given.precision)}")
    if given.device != "cpu":
        words.append(f"--device {given.device}")
    if given.image_size:
        words.append(f"--image-size {given.image_size}")
    return " ".join([*words, *(["--quick"] if given.quick else [])])
