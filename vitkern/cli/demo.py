"""Name a photograph, check ViT against PyTorch on this machine, time both, and draw the result.

The photographs (without any, one that the package brings) go through the package's own model, which
vitkern trained: it is small, sees 32 x 32 pixels and knows ten things.

The truth is the model in float64. An error is given as a multiple of the one that eager PyTorch
makes at the same precision, and passes within twice its worst and 1.25 times its rms error. All
four columns of a row of the timing table take turns in one process; the speed-up of bf16 is
over the faster of PyTorch's two precisions. PyTorch's own bf16 is left out of a row where one
forward would take seconds, as on CPUs without bf16 instructions: the table says so.

`vitkern verify` checks every operator as well, `vitkern bench` times other libraries, too.

Examples:
    vitkern demo
    vitkern demo cat.jpg "photos/*.jpg" --seconds 5
    vitkern demo --models S/16 --batches 1 4 --seconds 5 --out speed.svg
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from . import predict

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ..measure.charts import Answer
    from ..model import ViT

MODELS = ("Ti/16", "S/16", "B/16")
BATCHES = (1, 8)
CHECKED_IMAGES = 2
ANSWERS, MOST_DRAWN = 3, 3  # of a photograph; photographs in the picture, all are in the text
NAMED_BY = "Named by the package's own small model (32 x 32 pixels, ten classes)"
PRECISIONS = ("fp32", "bf16")
LONGEST_FORWARD_S = 1.0  # of PyTorch in bf16: six times fp32's time where there are no instructions


Models: TypeAlias = "dict[tuple[str, str], ViT]"  # (provider, precision) -> model


class Verdict(NamedTuple):
    """The errors of the logits against float64, and whether ours is within the contract."""

    model: str
    precision: str
    path: str
    torchs: float
    ours: float
    worst: float  # ours as a multiple of torch's, worst element
    rms: float
    passed: bool


class Timed(NamedTuple):
    """Median milliseconds of one model at one batch size."""

    model: str
    batch: int
    torch: dict[str, float]  # precision -> ms, without what was left out
    native: dict[str, float]

    def speedup(self, precision: str) -> float:
        best = self.torch["fp32"] if precision == "fp32" else min(self.torch.values())
        return best / self.native[precision]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "images",
        nargs="*",
        metavar="IMAGE",
        help="photographs to name: files, folders, patterns, addresses (the package's own)",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("build/demo.png"),
        metavar="FILE",
        help="the picture, .png or .svg (default build/demo.png)",
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), metavar="B")
    parser.add_argument("--image-size", type=int, default=224, metavar="PIXELS")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20,
        help="for timing in all; slow models take longer (default 20)",
    )


def run(given: argparse.Namespace) -> int:
    if given.out.suffix not in (".png", ".svg"):
        raise ValueError(f"--out {given.out}: the picture's name must end in .png or .svg")
    if min(given.batches) < 1:
        raise ValueError(f"--batches {min(given.batches)}: a batch holds at least one image")
    from ..measure.machine import describe, let_torch_run_bf16, one_line

    note = let_torch_run_bf16()
    machine = describe()
    print(f"vitkern demo on {one_line(machine)}", note, sep="\n" if note else "")
    answers = name_photographs(given.images)

    import torch

    torch.manual_seed(0)
    verdicts, times = [], []
    share = given.seconds / (len(given.models) * len(given.batches))
    steps = [(name, batch) for name in given.models for batch in (None, *given.batches)]
    for name, batch in progress(steps):
        if batch is None:
            # Outside inference mode: parameters made in it run no engine.
            models = build(name, given.image_size)
        with torch.inference_mode():
            if batch is None:
                found, an_image = check(name, models, given.image_size)
                verdicts += found
            else:
                left_out = [("torch", "bf16")] if an_image * batch > LONGEST_FORWARD_S else []
                times.append(clock(name, batch, models, given.image_size, share, left_out))
    print(check_table(verdicts), time_table(times), sep="\n\n")
    draw(times, answers, given.out, one_line(machine))
    failed = [f"{v.model} {v.precision}" for v in verdicts if not v.passed]
    if failed:
        print(f"FAILED: the error of {', '.join(failed)} is larger than allowed", file=sys.stderr)
    return 1 if failed else 0


def name_photographs(words: list[str]) -> list[Answer]:
    """What the package's own model says of them, printed; of its own photograph where none is."""
    from .. import trained_file
    from ..measure.charts import Answer

    try:
        found, classes, (y, x) = ask(words or [str(trained_file.PHOTOGRAPH)])
    except ImportError as error:  # of Pillow or safetensors, which the rest does without
        if words:
            raise
        print(f"no photograph named: {error}\n")
        return []
    print(
        f"The package's own model, trained by vitkern on CIFAR-10, is small: it sees {x} x {y}"
        f" pixels and\nknows {len(classes)} things ({', '.join(classes)})."
    )
    answers = []
    for answer, picture in found:
        name = pathlib.PurePath(answer["image"]).name
        top = [(one["label"], one["probability"]) for one in answer["top"]]
        print(f"  {name}: {', '.join(f'{share:.0%} {label}' for label, share in top)}")
        answers.append(Answer(name, picture, top))
    print(flush=True)
    return answers


def ask(
    words: list[str],
) -> tuple[list[tuple[dict[str, Any], Image]], list[str], tuple[int, int]]:
    """Answers with their thumbnails as `vitkern predict` has them, classes, and pixels."""
    from .. import image_sources

    parser = argparse.ArgumentParser()
    predict.arguments(parser)
    given = parser.parse_args(["--top", str(ANSWERS), "--save", "thumbnails", "--", *words])
    sources, predictor = image_sources.expand(words), predict.open_predictor(given)
    found = []
    for answer, picture in predict.predict(predictor, sources, given):
        if picture is None:
            raise ValueError(answer["error"])
        found.append((answer, picture))
    return found, predictor.names, predictor.model.config.pixels


def build(name: str, image_size: int) -> Models:
    """The same weights five times: eager PyTorch and vitkern in each precision, and the truth."""
    from .. import ViT
    from ..verification import models as verification

    base = ViT(name, image_size=image_size).eval()
    models: Models = {("native", p): verification.native(base, p) for p in PRECISIONS}
    models |= {("torch", p): verification.eager(base, p) for p in PRECISIONS}
    models["torch", "fp64"] = verification.exact(base)
    return models


def call(models: Models, provider: str, precision: str, image: Tensor) -> Callable[[], Tensor]:
    """One forward; eager PyTorch in bf16 gets its image in bf16 already."""
    model = models[provider, precision]
    image = image.to(model.dtype)
    return lambda: model(image)


def check(name: str, models: Models, image_size: int) -> tuple[list[Verdict], float]:
    """Both precisions against float64, and the seconds that PyTorch took for an image in bf16."""
    import torch

    from ..contract import judge
    from ..measure.timing import WALL
    from ..verification.models import dtype_of

    outputs: dict[tuple[str, str], Tensor] = {}

    def forward(provider: str, precision: str) -> None:
        outputs[provider, precision] = call(models, provider, precision, image)()

    image = torch.randn(CHECKED_IMAGES, 3, image_size, image_size)
    seconds = {key: WALL.time(functools.partial(forward, *key)) for key in models}
    truth = outputs["torch", "fp64"]
    found = []
    for precision in PRECISIONS:
        got, plain = outputs["native", precision], outputs["torch", precision]
        ours, torchs, problem = judge(got, plain, truth, dtype=dtype_of(precision))
        model = models["native", precision]
        path = model.explain(image).split("\n")[0].removeprefix("path: ").split(" ")[0]
        multiples = (ours.worst / torchs.worst, ours.rms / torchs.rms)
        found.append(
            Verdict(name, precision, path, torchs.worst, ours.worst, *multiples, not problem)
        )
    return found, seconds["torch", "bf16"] / CHECKED_IMAGES


def clock(
    name: str,
    batch: int,
    models: Models,
    image_size: int,
    seconds: float,
    left_out: list[tuple[str, str]],
) -> Timed:
    """Four forwards in turns, but for those left out."""
    import torch

    from ..measure.timing import Turns

    image = torch.randn(batch, 3, image_size, image_size)
    contestants = [(who, p) for p in PRECISIONS for who in ("torch", "native")]
    contestants = [key for key in contestants if key not in left_out]
    spreads = Turns({key: call(models, *key, image) for key in contestants}).run(seconds)
    ms: dict[str, dict[str, float]] = {"torch": {}, "native": {}}
    for (who, precision), spread in spreads.items():
        ms[who][precision] = spread.median / 1e3
    return Timed(name, batch, **ms)


def check_table(verdicts: Iterable[Verdict]) -> str:
    lines = [
        "Errors of the logits against float64 (worst element, in units of the logits' rms):",
        f"{'model':<8}{'precision':<11}{'path':<11}{'PyTorch':>10}{'vitkern':>10}{'worst':>9}{'rms':>8}",
    ]
    for v in verdicts:
        lines.append(
            f"{v.model:<8}{v.precision:<11}{v.path:<11}{v.torchs:>10.1e}{v.ours:>10.1e}"
            f"{v.worst:>8.2f}x{v.rms:>7.2f}x  {'ok' if v.passed else 'TOO LARGE'}"
        )
    return "\n".join(lines)


def time_table(times: Iterable[Timed]) -> str:
    lines = [
        "Median milliseconds a forward, timed in turns:",
        f"{'':<15}{'------------ fp32 -----------':>32}{'------------ bf16 -----------':>33}",
        f"{'model':<8}{'batch':>5}" + f"{'PyTorch':>13}{'vitkern':>11}{'speed-up':>9}" * 2,
    ]
    for t in times:
        torchs = {p: f"{t.torch[p]:>13.2f}" if p in t.torch else f"{'-':>13}" for p in PRECISIONS}
        cells = (f"{torchs[p]}{t.native[p]:>11.2f}{t.speedup(p):>8.2f}x" for p in PRECISIONS)
        lines.append(f"{t.model:<8}{t.batch:>5}" + "".join(cells))
    if any("bf16" not in t.torch for t in times):
        lines.append(
            f"- PyTorch in bf16 was left out: a forward would take over {LONGEST_FORWARD_S:.0f} s"
            f" on this CPU, so the speed-up is over its fp32."
        )
    return "\n".join(lines)


def draw(times: list[Timed], answers: list[Answer], path: pathlib.Path, machine: str) -> None:
    from ..measure import charts

    bars = []
    for t in times:
        for p in PRECISIONS:
            best = t.speedup(p) * t.native[p]
            ratios = {"native": t.speedup(p)}
            if p in t.torch:
                ratios["torch"] = best / t.torch[p]
            bars.append((f"{t.model} batch {t.batch} {p}", ratios))
    try:
        title = "vitkern beside eager PyTorch"
        charts.speedup_bars(bars, path, title, machine, answers[:MOST_DRAWN], NAMED_BY)
    except ImportError as error:
        print(f"\nno picture: {error}")
        return
    print(f"\npicture: {path.resolve()}")


def progress(steps: list) -> Iterable:
    """A bar on a terminal that has tqdm; otherwise the steps alone."""
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, desc="checking and timing", leave=False, disable=not sys.stderr.isatty())
