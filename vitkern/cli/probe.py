"""Measure a frozen model's features: few-shot least squares, nearest neighbours, a linear layer.

Draws accuracy against the number of training images a class.

Examples:
    vitkern probe --weights deit_tiny.safetensors --model Ti/16 --data DIR --shots 10,100
    vitkern probe --weights runs/RUN/model.safetensors --data-kind digits
"""

from __future__ import annotations

import argparse
import pathlib

from ..image_files import NORMALISATIONS

PROBES = ("least-squares", "knn", "linear")
KINDS = ("digits", "folder", "cifar10", "cifar100", "fashion-mnist")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", type=pathlib.Path, required=True, metavar="FILE",
        help="a file or folder in any layout that vitkern.load reads, or a run's model.safetensors",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="NAME", help="the variant, where shapes alone do not tell"
    )
    parser.add_argument("--image-size", type=int, metavar="PIXELS", help="positions are resized")
    parser.add_argument("--data", default="", metavar="DIR", help="the folder of the data")
    parser.add_argument("--data-kind", default="", choices=KINDS, help="guessed if not given")
    parser.add_argument(
        "--shots", default="1,5,10,25,100", metavar="N,N,...",
        help="training images a class; 0: all of them (default 1,5,10,25,100)",
    )  # fmt: skip
    parser.add_argument(
        "--probes", default=",".join(PROBES), metavar="NAMES", help="some of " + ", ".join(PROBES)
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="draws of the images: mean and deviation",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N",
        help="read at most about N training images, the first of each class",
    )  # fmt: skip
    parser.add_argument("--eval-limit", type=int, default=0, metavar="N")
    parser.add_argument(
        "--normalisation",
        choices=tuple(NORMALISATIONS),
        help="mean and std (the model's own, else imagenet)",
    )
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("runs"), metavar="FOLDER",
        help="where the folder of results is made (default runs)",
    )  # fmt: skip


def run(given: argparse.Namespace) -> int:
    shots = numbers(given.shots)
    probes = [name.strip() for name in given.probes.split(",")]
    for name in probes:
        if name not in PROBES:
            raise ValueError(f"--probes: there is no {name!r:.80}: some of {', '.join(PROBES)}")
    if given.repeats < 1 or given.seed < 0:
        raise ValueError("--repeats must be at least 1 and --seed at least 0")
    import torch

    from ..train import build, probe
    from ..train.data import Parts, first_of_each_class, open_data
    from ..train.settings import Data

    data = Data(workers=given.workers)
    train, evaluation = open_data(given.data_kind, given.data, seed=given.seed)
    if evaluation is None:
        raise ValueError(f"{given.data}: there is nothing to evaluate on")
    parts = Parts(
        first_of_each_class(train, given.limit), first_of_each_class(evaluation, given.eval_limit)
    )
    options = {"image_size": given.image_size} if given.image_size else {}
    model = build.from_weights(given.weights, given.model, options, given.normalisation)
    device = torch.device(given.device)
    model.to(device).precision = given.precision
    scores = probe.probe(model, parts, data, probes, shots, given.repeats, given.seed, device)
    about = f"{len(parts.train):,} images to draw from, {len(parts.evaluation or ()):,} to evaluate"
    about = f"{about}; {given.repeats} draw{'s' if given.repeats > 1 else ''}, {given.precision}"
    print(probe.write(scores, given.out, f"Features of {given.weights.stem}", about))
    return 0


def numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--shots {text}: give whole numbers, such as 1,10,100") from error
    if min(found) < 0:
        raise ValueError(f"--shots {text}: a number of images cannot be negative")
    return found
