"""Computes what each training recipe needs in time and memory, for docs/training.md.

    python -m tools.recipe_costs            # writes the table between the page's markers
    python -m tools.recipe_costs --check    # status 1 if the page is old

Arithmetic, no measurement: a step is three forwards' multiplications. On the CPU they run at the
rate of the recorded ViT-B/16 steps (benchmarks/results); on a GPU at the one that
tools/gpu_prediction.py predicts for ViT-B/16 at batch 256. Decoding, evaluation and models too
small to fill the machine come on top.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import NamedTuple

import torch

from benchmarks import rows as results
from benchmarks.training.tables import published
from tools import gpu_prediction, page_table
from vitkern import ViT
from vitkern.bench import work
from vitkern.config import ViTConfig
from vitkern.train import build, recipes
from vitkern.train.settings import Settings

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "training.md"
BEGIN, END = "<!-- recipe costs -->", "<!-- end of recipe costs -->"
STEPS = published("avx512_bf16")
MEASURED = ("vit_base_patch16_224", 8)  # the step whose rate is taken
GPUS = ("A100", "H100")
GPU_BATCH = 256


class DataSet(NamedTuple):
    """What a recipe is meant for: training images and classes."""

    images: int
    classes: int


DATA = {
    "digits": DataSet(1437, 10),  # 1,797 without the held-out fifth
    "fashion-mnist": DataSet(60_000, 10),
    "cifar10": DataSet(50_000, 10),
    "folder": DataSet(14_197_122, 21_841),  # ImageNet-21k
    "": DataSet(1_281_167, 1000),  # paper-finetune: ImageNet
}


class Cost(NamedTuple):
    """Of one recipe, in one process."""

    parameters: int
    images: int  # in all steps
    flops: int  # of an image's step
    state: int  # bytes of weights, gradients and the optimizer's moments
    kept: int  # bytes between forward and backward, of all images computed together


def cost(settings: Settings) -> Cost:
    """What a recipe's steps compute and hold."""
    data = DATA[settings.data.kind]
    with torch.device("meta"):
        model = build.model(settings.model, settings.data.normalisation, data.classes)
    parameters = sum(p.numel() for p in model.parameters())
    each_epoch = -(-data.images // settings.loop.batch)
    steps = build.total_steps(settings.schedule, each_epoch)
    together = settings.loop.batch // settings.loop.accumulate
    values = {"sgd": 3, "adam": 4, "adamw": 4}[settings.optimizer.optimizer]  # fp32, a parameter
    return Cost(
        parameters, steps * settings.loop.batch,
        3 * work.flops(model, 1, model.config.image_size), 4 * values * parameters,
        together * kept_bytes(model.config, settings.loop.precision),
    )  # fmt: skip


def kept_bytes(config: ViTConfig, precision: str) -> int:
    """What the blocks keep of one image for their backwards (docs/training.md).

    Input and residual stream in fp32; q, k, v, attention's result and the MLP's pre-activation.
    """
    wide = 2 if precision == "bf16" else 4
    a_token = 2 * config.width * 4 + (4 * config.width + config.mlp_width) * wide
    return config.depth * config.tokens * a_token


@functools.cache
def cpu_rate(precision: str) -> float:
    """Flops a second of the recorded step."""
    name, batch = MEASURED
    for row in results.read(STEPS):
        found = row.get("model"), row.get("batch"), row.get("contestant"), row.get("precision")
        if found == (name, batch, "vitkern", precision):
            return 3 * batch * _base_flops() / (row["us"] * 1e-6)
    raise SystemExit(f"{STEPS} has no step of {name} in {precision}: run make bench-training")


@functools.cache
def gpu_rate(name: str) -> float:
    """Flops a second of the predicted forward in bf16."""
    board = gpu_prediction.BOARDS[name]
    works = gpu_prediction.ours(GPU_BATCH, board)
    time = gpu_prediction.forward(works, board, gpu_prediction.HOST["vitkern"])
    return GPU_BATCH * _base_flops() / time


@functools.cache
def _base_flops() -> int:
    with torch.device("meta"):
        model = ViT(MEASURED[0])
    return work.flops(model, 1, model.config.image_size)


def table() -> str:
    """Markdown, a row for each recipe."""
    text = "| recipe | parameters | batch at once | state | kept | two cores, computed |"
    text += "".join(f" {name}, predicted |" for name in GPUS) + "\n|---|" + "--:|" * 7 + "\n"
    for name in recipes.names():
        settings = recipes.settings(name)
        it = cost(settings)
        flops = it.images * it.flops
        cells = (
            f"`{name}`", f"{it.parameters / 1e6:.1f} M",
            settings.loop.batch // settings.loop.accumulate, _bytes(it.state), _bytes(it.kept),
            _time(flops / cpu_rate(settings.loop.precision)),
            *(_time(flops / gpu_rate(gpu)) for gpu in GPUS),
        )  # fmt: skip
        text += "| " + " | ".join(map(str, cells)) + " |\n"
    return text


def _bytes(count: float) -> str:
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def _time(seconds: float) -> str:
    for length, unit in ((86400 * 365.25, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return "< 2 min"


def main(arguments: list[str] | None = None) -> int:
    return page_table.main(__doc__, PAGE, (BEGIN, END), table, arguments)


if __name__ == "__main__":
    sys.exit(main())
