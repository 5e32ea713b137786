"""Which images a step sees, and how they reach it: order, share of a process, workers.

A draw names everything random about one image of a batch. The order is a function of seed and
epoch, so that a run can go on from any step, on any number of processes, with the same images.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .augment import Box, cut_box, mixed, plain_view, random_view
from .data import Images
from .settings import Data

EVALUATION = -1  # the epoch of a draw that nothing random happens to


class Draw(NamedTuple):
    """An image of a batch, and with mixup or cutmix its partner."""

    epoch: int
    image: int
    partner: int = -1
    share: float = 1.0  # of the image itself
    box: Box | None = None  # cutmix: where the partner shows


class Batch(NamedTuple):
    """Images (B, C, Y, X) as bytes, labels, and with mixup the partners' and the images' shares."""

    images: Tensor
    labels: Tensor
    partners: Tensor
    shares: Tensor
    problems: tuple[str, ...]  # broken images, which are not in it


class Order(Sampler):
    """The draws of every part of every step, from `start` on: this process's share of them."""

    def __init__(
        self, count: int, batch: int, size: tuple[int, int], data: Data, seed: int,
        start: int, stop: int, accumulate: int = 1, rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        self.count, self.batch, self.size, self.data = count, batch, size, data
        self.seed, self.start, self.stop = seed, start, stop
        self.accumulate, self.rank, self.world = accumulate, rank, world

    def __iter__(self) -> Iterator[list[Draw]]:
        each = self.count // self.batch
        order, current = np.empty(0, np.int64), -1
        for step in range(self.start, self.stop):
            epoch, place = divmod(step, each)
            if epoch != current:
                order, current = permutation(self.count, self.seed, epoch), epoch
            rows = order[place * self.batch : (place + 1) * self.batch]
            draws = self._drawn(rows, epoch, step)
            for part in range(self.accumulate):
                yield draws[part :: self.accumulate][self.rank :: self.world]

    def __len__(self) -> int:
        return (self.stop - self.start) * self.accumulate

    def _drawn(self, rows: np.ndarray, epoch: int, step: int) -> list[Draw]:
        data = self.data
        alphas = [a for a in (("mixup", data.mixup), ("cutmix", data.cutmix)) if a[1]]
        if not alphas:
            return [Draw(epoch, int(row)) for row in rows]
        rng = np.random.default_rng([self.seed, 0x317, step])
        kind, alpha = alphas[int(rng.integers(len(alphas)))]
        partners = np.roll(rows, 1)
        draws = []
        for row, partner in zip(rows.tolist(), partners.tolist(), strict=True):
            share, box = float(rng.beta(alpha, alpha)), None
            if kind == "cutmix":
                box = cut_box(self.size, share, rng)
                cut = (box[2] - box[0]) * (box[3] - box[1])
                share = 1 - cut / (self.size[0] * self.size[1])
            draws.append(Draw(epoch, row, partner, share, box))
        return draws


class EvaluationOrder(Sampler):
    """Every image once, in order; each process has as many batches, of almost equal size.

    As many, because the processes of a sharded model exchange parameters in every forward.
    """

    def __init__(self, count: int, batch: int, rank: int = 0, world: int = 1) -> None:
        if count < world:
            raise ValueError(f"{count} images are too few to evaluate with {world} processes")
        self.count, self.batch, self.rank, self.world = count, batch, rank, world

    def __iter__(self) -> Iterator[list[Draw]]:
        parts = np.array_split(np.arange(self.count), len(self) * self.world)
        for rows in parts[self.rank :: self.world]:
            yield [Draw(EVALUATION, row) for row in rows.tolist()]

    def __len__(self) -> int:
        return -(-self.count // (self.batch * self.world))


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, 0x0DE4, epoch]).permutation(count)


class Views(Dataset):
    """Draws in, bytes out; in a worker if there are any."""

    def __init__(
        self, images: Images, size: tuple[int, int], channels: int, data: Data, seed: int
    ) -> None:
        self.images, self.size, self.channels = images, size, channels
        self.data, self.seed = data, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, draw: Draw) -> tuple[np.ndarray, int, int, float] | str:
        """Pixels, label, partner's label and share; or what is wrong with the file."""
        labels = self.images.labels
        try:
            pixels = self._view(draw.epoch, draw.image)
            if draw.partner < 0:
                return pixels, int(labels[draw.image]), int(labels[draw.image]), 1.0
            other = self._view(draw.epoch, draw.partner)
        except (ValueError, OSError) as error:
            return str(error)  # the main process decides: an exception here would lose its words
        pixels = mixed(pixels, other, draw.share, draw.box)
        return pixels, int(labels[draw.image]), int(labels[draw.partner]), draw.share

    def _view(self, epoch: int, number: int) -> np.ndarray:
        image = self.images[number]
        if epoch == EVALUATION:
            return plain_view(image, self.size, self.channels, self.data.eval_crop)
        rng = np.random.default_rng([self.seed, 0xA06, epoch, number])
        return random_view(image, self.size, self.channels, self.data, rng)


def collate(found: Sequence[tuple[np.ndarray, int, int, float] | str]) -> Batch:
    """The good images of a batch, and what was wrong with the others."""
    good = [one for one in found if not isinstance(one, str)]
    problems = tuple(one for one in found if isinstance(one, str))
    pixels, labels, partners, shares = zip(*good, strict=True) if good else ((), (), (), ())
    return Batch(
        torch.from_numpy(np.stack(pixels)) if good else torch.empty(0),
        torch.tensor(labels),
        torch.tensor(partners),
        torch.tensor(shares, dtype=torch.float32),
        problems,
    )


def loader(views: Views, order: Sampler, workers: int, **more: Any) -> DataLoader:
    """Batches in the sampler's order, decoded and augmented by that many processes."""
    return DataLoader(
        views, batch_sampler=order, num_workers=workers, collate_fn=collate,
        persistent_workers=workers > 0, prefetch_factor=4 if workers else None, **more,
    )  # fmt: skip


class Problems:
    """Broken images: each reported once, on stderr, or the end of the run."""

    def __init__(self, fatal: bool) -> None:
        self.fatal = fatal
        self.seen: set[str] = set()

    def __call__(self, batch: Batch) -> None:
        for problem in batch.problems:
            if self.fatal:
                raise ValueError(f"{problem}; or set broken = skip")
            if problem not in self.seen:
                self.seen.add(problem)
                print(f"skipped: {problem}", file=sys.stderr)
        if not len(batch.images):
            raise ValueError(f"every image of a batch is broken, the first: {batch.problems[0]}")
