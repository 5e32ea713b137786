"""A frozen model's features of images, and how well simple classifiers do on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..measure.progress import Progress as Bar
from ..model import ViT
from .batches import EvaluationOrder, Problems, Views, loader
from .data import Images
from .settings import Data

BATCH = 32
NEIGHBOURS = 20  # of kNN, fewer where a class has fewer images
TEMPERATURE = 0.07  # of its votes, as DINO weighs them
REGULARISATION = 2.0**10  # λ of least squares on whitened columns, as big_vision's few-shot
BIAS = 100.0  # the column of ones times this, so that λ hardly shrinks the bias
LINEAR_STEPS = 300


class Features(NamedTuple):
    """Rows (N, D) and labels (N,) of the images that could be read."""

    rows: Tensor
    labels: Tensor


def extract(model: ViT, images: Images, data: Data, device: torch.device) -> Features:
    """What the classifier would see: pooled and normed rows, by the packed engine."""
    c = model.config
    views = Views(images, c.pixels, c.channels, data, 0)
    batches = loader(views, EvaluationOrder(len(images), BATCH), data.workers)
    problems = Problems(data.broken == "error")
    rows, labels = [], []
    model.eval()
    with torch.inference_mode(), Bar("batches") as bar:
        for i, batch in enumerate(batches):
            problems(batch)
            tokens = model.forward_features(batch.images.to(device))
            rows.append(model.forward_head(tokens, pre_logits=True).float().cpu())
            labels.append(batch.labels)
            bar(i + 1, len(batches), f"{len(images):,} images")
    return Features(torch.cat(rows), torch.cat(labels))


def few(features: Features, each: int, seed: int) -> Features:
    """`each` random images of every class; an error where a class has fewer."""
    rng = np.random.default_rng([seed, 0xFE3])
    rows = []
    for label in features.labels.unique().tolist():
        own = np.flatnonzero(features.labels.numpy() == label)
        if len(own) < each:
            raise ValueError(f"class {label} has {len(own)} images, fewer than {each} a class")
        rows.append(rng.choice(own, each, replace=False))
    chosen = torch.from_numpy(np.sort(np.concatenate(rows)))
    return Features(features.rows[chosen], features.labels[chosen])


def least_squares(train: Features, test: Features, classes: int) -> float:
    """Accuracy of W = (XᵀX + λI)⁻¹XᵀY for targets Y in {-1, 1}ᴷ, in float64 and closed form."""
    X, mean, scale = _whitened(train.rows, BIAS)
    Y = F.one_hot(train.labels, classes).double() * 2 - 1
    N, D = X.shape
    if N >= D:
        gram = X.mT @ X + REGULARISATION * torch.eye(D, dtype=X.dtype)
        W = torch.linalg.solve(gram, X.mT @ Y)
    else:  # the same by Woodbury's identity, on the smaller side
        gram = X @ X.mT + REGULARISATION * torch.eye(N, dtype=X.dtype)
        W = X.mT @ torch.linalg.solve(gram, Y)
    return _accuracy(_with_bias((test.rows.double() - mean) / scale, BIAS) @ W, test)


def nearest(train: Features, test: Features, classes: int) -> float:
    """Accuracy of a vote of the nearest neighbours by cosine, weighed by exp(cosine / 0.07)."""
    one, other = (F.normalize(f.rows, dim=-1) for f in (train, test))
    each = int(torch.bincount(train.labels, minlength=classes).max())
    k = min(NEIGHBOURS, each, len(one))
    votes = torch.zeros(len(other), classes)
    for start in range(0, len(other), 1024):  # (1024, N) at a time
        near = (other[start : start + 1024] @ one.mT).topk(k, dim=-1)
        weights = (near.values / TEMPERATURE).exp()
        votes[start : start + 1024].scatter_add_(1, train.labels[near.indices], weights)
    return _accuracy(votes, test)


def linear(train: Features, test: Features, classes: int) -> float:
    """Accuracy of a linear layer trained to convergence on the features (L-BFGS)."""
    X, mean, scale = _whitened(train.rows)
    W = torch.zeros(X.shape[1], classes, dtype=X.dtype, requires_grad=True)
    solver = torch.optim.LBFGS([W], max_iter=LINEAR_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        value = F.cross_entropy(X @ W, train.labels) + W[:-1].square().sum() / (2 * len(X))
        value.backward()
        return value

    solver.step(loss)
    with torch.no_grad():
        return _accuracy(_with_bias((test.rows.double() - mean) / scale) @ W, test)


PROBES: dict[str, Callable[[Features, Features, int], float]] = {
    "least-squares": least_squares,
    "knn": nearest,
    "linear": linear,
}


def _whitened(rows: Tensor, bias: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of mean 0 and deviation 1 beside one of `bias`, and what was taken out."""
    X = rows.double()
    mean, scale = X.mean(0), X.std(0, correction=0).clamp(min=1e-6)
    return _with_bias((X - mean) / scale, bias), mean, scale


def _with_bias(X: Tensor, bias: float = 1.0) -> Tensor:
    return torch.cat([X, X.new_full((len(X), 1), bias)], 1)


def _accuracy(scores: Tensor, test: Features) -> float:
    return (scores.argmax(-1) == test.labels).double().mean().item()
