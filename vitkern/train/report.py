"""What an evaluation found: counts, the report as text, curves and confusions as pictures."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..measure import charts

LARGEST_MATRIX = 1000  # classes; beyond, only the counts of each class are kept
LARGEST_DRAWN = 100  # classes whose confusions a picture can show
LARGEST_NAMED = 30  # and name

COLOURS = {"training": "#7f7f7f", "evaluation": "#0072B2"}


class Tally:
    """Counts of an evaluation: right, predicted and actual images of each class."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.right, self.predicted, self.actual = torch.zeros(3, classes, dtype=torch.int64)
        small = classes <= LARGEST_MATRIX
        self.matrix = torch.zeros(classes, classes, dtype=torch.int64) if small else None
        self.loss = 0.0  # the sum

    def add(self, logits: Tensor, labels: Tensor, loss: float) -> None:
        """A batch; `loss` is the sum over its images."""
        K = self.classes
        found, labels = logits.argmax(-1).cpu(), labels.cpu()
        self.right += torch.bincount(labels[found == labels], minlength=K)
        self.predicted += torch.bincount(found, minlength=K)
        self.actual += torch.bincount(labels, minlength=K)
        if self.matrix is not None:
            self.matrix += torch.bincount(labels * K + found, minlength=K * K).view(K, K)
        self.loss += loss

    @property
    def count(self) -> int:
        return int(self.actual.sum())

    @property
    def accuracy(self) -> float:
        return int(self.right.sum()) / max(1, self.count)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.count)


def text(tally: Tally, names: Sequence[str]) -> str:
    """Precision, recall and F1 of every class, and their means, as a table."""
    right, predicted, actual = (t.double() for t in (tally.right, tally.predicted, tally.actual))
    precision, recall = right / predicted.clamp(min=1), right / actual.clamp(min=1)
    f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
    wide = max(12, *(len(name) for name in names))
    lines = [f"{'':{wide}}  precision  recall      f1  images"]

    def row(name: str, values: Sequence[float], count: int) -> str:
        return f"{name:{wide}}  {values[0]:9.4f}  {values[1]:6.4f}  {values[2]:6.4f}  {count:6d}"

    for k, name in enumerate(names):
        scores = [float(score[k]) for score in (precision, recall, f1)]
        lines.append(row(name, scores, int(actual[k])))
    weights = actual / actual.sum().clamp(min=1)
    means = [float(score.mean()) for score in (precision, recall, f1)]
    weighted = [float((score * weights).sum()) for score in (precision, recall, f1)]
    lines += ["", row("mean", means, tally.count), row("weighted", weighted, tally.count), ""]
    lines.append(f"accuracy {tally.accuracy:.4f}, loss {tally.mean_loss:.4f}")
    return "\n".join(lines) + "\n"


def draw_curves(rows: Sequence[Mapping[str, float]], path: pathlib.Path, title: str) -> None:
    """Loss and accuracy over the epochs, training and evaluation."""
    plt = charts.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        for part, key in (("training", name), ("evaluation", f"eval_{name}")):
            points = [(row["epoch"], row[key]) for row in rows if key in row]
            if points:
                style = {"marker": "o", "markersize": 2.5} if len(points) < 40 else {}
                axis.plot(*zip(*points, strict=True), color=COLOURS[part], label=part, **style)
        axis.set_xlabel("epoch")
        axis.set_ylabel(name)
        axis.grid(alpha=0.25)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(frameon=False)
    best = max((row["eval_accuracy"] for row in rows if "eval_accuracy" in row), default=0.0)
    charts.save(figure, path, title, f"highest evaluation accuracy {best:.2%}")


def draw_confusions(
    tally: Tally, names: Sequence[str], path: pathlib.Path, title: str
) -> pathlib.Path | None:
    """Which classes are taken for which: shares of each actual class. None for too many classes."""
    if tally.matrix is None or tally.classes > LARGEST_DRAWN:
        return None
    plt = charts.pyplot()
    K = tally.classes
    shares = tally.matrix.double() / tally.actual.double().clamp(min=1)[:, None]
    side = min(11.0, 3.0 + 0.35 * K)
    figure, axis = plt.subplots(figsize=(side + 0.6, side))
    shown = axis.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shown, ax=axis, fraction=0.046, label="share of the actual class")
    if K <= LARGEST_NAMED:
        axis.set_xticks(range(K), names, rotation=60, ha="right")
        axis.set_yticks(range(K), names)
        for i in range(K):
            for j in range(K):
                count = int(tally.matrix[i, j])
                if count:
                    colour = "white" if shares[i, j] > 0.5 else "black"
                    axis.text(j, i, count, ha="center", va="center", fontsize=6, color=colour)
    axis.set_xlabel("predicted")
    axis.set_ylabel("actual")
    subtitle = f"{tally.count:,} images, accuracy {tally.accuracy:.2%}"
    return charts.save(figure, path, title, subtitle)
