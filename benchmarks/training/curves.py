"""Losses of vitkern and of eager PyTorch, from the same weights, images and order.

Training is chaotic: runs that differ by a rounding drift apart, one pair by ten times as much as
the next. So each trains several times, the first time from the same weights, then from weights of
which each is moved by one unit in its last place. How far runs of eager PyTorch are from each
other is what rounding alone does; how far vitkern's are from them is compared with that.
"""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitkern import ViT, ViTConfig
from vitkern.bench.timm_import import prepare
from vitkern.train.data import open_data

CONFIG = ViTConfig(
    image_size=8, patch_size=2, width=64, depth=4, heads=4, mlp_width=256, channels=1, classes=10
)
STEPS, BATCH, LEARNING_RATE, WARM_UP = 300, 64, 1e-3, 50
RUNS = 6  # of each: 15 pairs of eager runs, 36 of vitkern's with eager's

Curve = list[float]  # a loss for each step
Pairs = list[tuple[Curve, Curve]]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The digits, in an order by the seed."""
    images, _ = open_data("digits", "", eval_share=0.2, seed=0)
    if images.pixels is None:
        raise ValueError("the digits are not in memory")
    pixels = torch.from_numpy(images.pixels.copy()).float().div(127.5).sub(1).unsqueeze(1)
    labels = torch.from_numpy(images.labels.copy())
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        chosen = torch.randint(0, len(labels), (BATCH,), generator=generator)
        yield pixels[chosen], labels[chosen]


def losses(contestant: str, run: int) -> Curve:
    """A loss for each step; contestant: "vitkern" or "eager"; run: 0 is that of unmoved weights."""
    torch.manual_seed(0)
    model: nn.Module = ViT(CONFIG)
    move(model, run)
    if contestant == "eager":
        model = eager_model(model.state_dict())
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    found = []
    for step, (images, labels) in enumerate(batches()):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def move(model: nn.Module, run: int) -> None:
    """Each weight by one unit in the last place, up or down by the run's number; run 0: none."""
    if not run:
        return
    generator = torch.Generator().manual_seed(run)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf)))


def eager_model(weights: dict[str, Tensor]) -> nn.Module:
    """timm's model of the same shape and weights."""
    prepare()
    from timm.models.vision_transformer import VisionTransformer

    c = CONFIG
    model = VisionTransformer(
        img_size=c.image_size, patch_size=c.patch_size, in_chans=c.channels, num_classes=c.classes,
        embed_dim=c.width, depth=c.depth, num_heads=c.heads, mlp_ratio=c.mlp_width / c.width,
    )  # fmt: skip
    model.load_state_dict(weights)
    return model


def measure() -> dict[str, list[Curve]]:
    """Every run of each."""
    return {who: [losses(who, run) for run in range(RUNS)] for who in ("vitkern", "eager")}


class Apart(NamedTuple):
    """The largest difference of two runs' losses over all steps; of all pairs of runs."""

    median: float
    largest: float
    pairs: int


def apart(curves: dict[str, list[Curve]]) -> dict[str, Apart]:
    """How far vitkern's runs are from eager PyTorch's, and those from each other."""
    found = {}
    for name, compared in pairs(curves).items():
        gaps = [max(differences(one, other)) for one, other in compared]
        found[name] = Apart(statistics.median(gaps), max(gaps), len(gaps))
    return found


def pairs(curves: dict[str, list[Curve]]) -> dict[str, Pairs]:
    return {
        "vitkern": list(itertools.product(curves["vitkern"], curves["eager"])),
        "eager": list(itertools.combinations(curves["eager"], 2)),
    }


def differences(one: Iterable[float], other: Iterable[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def draw(curves: dict[str, list[Curve]], path: pathlib.Path) -> None:
    """Losses above; below, by how much pairs of runs differ: the median pair's and the largest."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), dpi=110)
    styles = {"vitkern": ("C0", "-"), "eager": ("C1", "--")}
    labels = {"vitkern": "vitkern from eager", "eager": "eager from eager"}
    for name, compared in pairs(curves).items():
        colour, line = styles[name]
        for run, curve in enumerate(curves[name]):
            label = name if run == 0 else None
            above.plot(curve, color=colour, linestyle=line, linewidth=0.7, label=label)
        by_step = list(zip(*(differences(*pair) for pair in compared), strict=True))
        middle = [statistics.median(gaps) for gaps in by_step]
        below.plot(middle, color=colour, linestyle=line, label=f"{labels[name]}, median")
        below.plot([max(gaps) for gaps in by_step], color=colour, linestyle=":", linewidth=0.7)
    title = f"{len(curves['eager'])} runs each: same digits and order, AdamW, fp32"
    above.set(ylabel="loss", yscale="log", title=title)
    below.set(ylabel="difference (dotted: largest)", xlabel="step", yscale="log")
    for axes in (above, below):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
