"""Probing a frozen model: accuracy of simple classifiers against the images a class they see."""

from __future__ import annotations

import csv
import pathlib
import statistics
import time
from typing import NamedTuple

import torch

from ..measure import charts
from ..model import ViT
from .data import Parts
from .features import PROBES, extract, few
from .settings import Data

COLOURS = {"least-squares": "#0072B2", "knn": "#E69F00", "linear": "#009E73"}


class Score(NamedTuple):
    """A probe's accuracy with so many images a class, over repeats; 0 a class: all images."""

    probe: str
    each: int
    mean: float
    deviation: float
    repeats: int

    def __str__(self) -> str:
        shown = f"{self.each} a class" if self.each else "all images"
        spread = f" ± {self.deviation:.2%}" if self.repeats > 1 else ""
        return f"{self.probe:14} {shown:>14}  {self.mean:7.2%}{spread}"


def probe(
    model: ViT, parts: Parts, data: Data, probes: list[str], shots: list[int],
    repeats: int, seed: int, device: torch.device,
) -> list[Score]:  # fmt: skip
    """Every probe with every number of training images a class, drawn `repeats` times."""
    if parts.evaluation is None:
        raise ValueError("there are no images to evaluate the probes on")
    train = extract(model, parts.train, data, device)
    test = extract(model, parts.evaluation, data, device)
    classes = len(parts.train.classes)
    scores = []
    for name in probes:
        for each in shots:
            count = repeats if each else 1  # all images are always the same
            drawn = (few(train, each, seed + i) if each else train for i in range(count))
            found = [PROBES[name](some, test, classes) for some in drawn]
            deviation = statistics.stdev(found) if count > 1 else 0.0
            scores.append(Score(name, each, statistics.mean(found), deviation, count))
            print(scores[-1], flush=True)
    return scores


def write(scores: list[Score], folder: pathlib.Path, title: str, about: str) -> pathlib.Path:
    """The scores as a CSV file and a picture, in a folder named by the time."""
    place = folder / f"{time.strftime('%Y-%m-%d-%H%M%S')}-probe"
    place.mkdir(parents=True)
    with open(place / "probe.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([Score._fields, *scores])
    draw(scores, place / "probe.png", title, about)
    return place


def draw(scores: list[Score], path: pathlib.Path, title: str, about: str) -> None:
    """Accuracy against the number of training images a class, on a logarithmic axis."""
    plt = charts.pyplot()
    figure, axis = plt.subplots(figsize=(6, 3.6))
    for name in dict.fromkeys(score.probe for score in scores):
        own = [score for score in scores if score.probe == name and score.each]
        if own:
            axis.errorbar(
                [score.each for score in own], [score.mean for score in own],
                [score.deviation for score in own], color=COLOURS[name], marker="o", markersize=4,
                capsize=3, label=name,
            )  # fmt: skip
        for score in scores:
            if score.probe == name and not score.each:
                axis.axhline(
                    score.mean, color=COLOURS[name], linestyle=":", label=f"{name}, all images"
                )
    shots = sorted({score.each for score in scores if score.each})
    if shots:
        axis.set_xscale("log")
        axis.set_xticks(shots, [str(each) for each in shots])
        axis.minorticks_off()
    axis.set_xlabel("training images a class")
    axis.set_ylabel("accuracy")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    charts.save(figure, path, title, about)
