"""The training loop: steps, evaluation, checkpoints. Every step is a function of state and number.

Nothing random is carried from step to step: torch's generator is seeded anew for each part of a
step, so that a resumed run draws the same dropout masks as an unbroken one.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..measure.progress import Progress as Bar
from ..model import ViT
from . import build
from .batches import Batch, EvaluationOrder, Order, Problems, Views, loader
from .data import Parts
from .log import Log
from .parallel import Processes
from .report import Tally
from .settings import Settings
from .state import State, save

LOGGED_STEPS = 2000  # rows of steps.csv, about, however long the run
EVALUATION_BATCH = 64


class Diverged(ValueError):
    """The loss or a gradient was not finite; the state before that step is kept."""


@dataclass
class Trainer:
    """A run over its data: `train` goes from the state's step to the end."""

    settings: Settings
    model: ViT
    state: State
    parts: Parts
    processes: Processes
    folder: pathlib.Path

    def __post_init__(self) -> None:
        loop, p = self.settings.loop, self.processes
        self.stepped: nn.Module = self.model
        count = len(self.parts.train)
        self.batch = min(loop.batch, count - count % (p.world * loop.accumulate))
        if self.batch < 1 or self.batch % (p.world * loop.accumulate):
            raise ValueError(
                f"a batch of {loop.batch} cannot be shared by {p.world} processes in"
                f" {loop.accumulate} parts each: make it a multiple of {p.world * loop.accumulate},"
                f" and at most the {count} training images"
            )
        self.each = count // self.batch  # steps an epoch
        self.total = build.total_steps(self.settings.schedule, self.each)
        self.problems = Problems(self.settings.data.broken == "error")
        self.evaluation = self._evaluation_loader()

    # ---- data ----

    def _views(self, training: bool) -> Views:
        c, s = self.model.config, self.settings
        images = self.parts.train if training else self.parts.evaluation
        assert images is not None
        return Views(images, c.pixels, c.channels, s.data, s.loop.seed)

    def _training_loader(self) -> DataLoader:
        s, p, views = self.settings, self.processes, self._views(True)
        order = Order(
            len(views), self.batch, views.size, s.data, s.loop.seed, self.state.progress.step,
            self.total, s.loop.accumulate, p.rank, p.world,
        )  # fmt: skip
        return loader(views, order, s.data.workers, pin_memory=p.device.type == "cuda")

    def _evaluation_loader(self) -> DataLoader:
        p, views = self.processes, self._views(False)
        order = EvaluationOrder(len(views), EVALUATION_BATCH, p.rank, p.world)
        return loader(views, order, min(1, self.settings.data.workers))

    # ---- training ----

    def train(self, log: Log | None) -> Tally:
        """Train to the last step; returns the final evaluation."""
        progress, loop = self.state.progress, self.settings.loop
        rows_every = max(1, self.total // LOGGED_STEPS)
        tally, began = None, time.perf_counter()
        parts = iter(self._training_loader())
        self.model.train()
        with Bar("steps") as bar:
            while progress.step < self.total:
                start = time.perf_counter()
                lr, norm, sums = self._step(parts)
                rate = self.batch / (time.perf_counter() - start)
                epoch = progress.step / self.each
                ends = progress.step % self.each == 0 or progress.step == self.total
                row = {
                    "step": progress.step, "epoch": round(epoch, 4), "lr": lr,
                    "loss": sums[0] / self.batch, "accuracy": sums[1] / self.batch,
                    "gradient_norm": norm, "images_per_second": round(rate, 1),
                }  # fmt: skip
                if log and (progress.step % rows_every == 0 or ends):
                    log.step(row)
                if self.processes.first:
                    accuracy = progress.right / max(1, progress.seen)
                    words = f"loss {row['loss']:.3f}, {accuracy:.1%} right, {rate:.0f} images/s"
                    bar(progress.step, self.total, f"epoch {math.ceil(epoch)}, {words}")
                if ends:
                    tally = self._end_epoch(log, time.perf_counter() - began)
                    began = time.perf_counter()
                if ends or (loop.save_every and progress.step % loop.save_every == 0):
                    save(self.state, self.folder, self.processes)
        return tally if tally is not None else self.evaluate()

    def _step(self, parts: Any) -> tuple[float, float, list[float]]:
        """One step of the optimizer: its learning rate, gradient norm, [loss sum, right, seen]."""
        s, state, p = self.settings, self.state, self.processes
        step = state.progress.step
        lr = build.learning_rate(s.schedule, s.optimizer.lr, step, self.total, self.each)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.zero_grad()
        sums = torch.zeros(3, dtype=torch.float64, device=p.device)
        for part in range(s.loop.accumulate):
            batch: Batch = next(parts)
            self.problems(batch)
            torch.manual_seed(_seed(s.loop.seed, step, part, p.rank))
            with p.accumulating(self.stepped, part == s.loop.accumulate - 1):
                loss, right = self._losses(batch)
                # DDP and FSDP average over processes: this makes it the mean over the whole batch.
                (loss * (p.world / self.batch)).backward()
            sums += torch.stack([loss.detach().double(), right.double(), _like(right, batch)])
        found = p.total(sums).tolist()
        norm = self._gradient_norm()
        if not (math.isfinite(found[0]) and math.isfinite(norm)):
            self._stop(step, found[0] / self.batch, norm)
        state.optimizer.step()
        progress = state.progress
        progress.step += 1
        state.average()
        progress.loss, progress.right = progress.loss + found[0], progress.right + found[1]
        progress.seen += found[2]
        return lr, norm, found

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of the losses of a part, and how many images are right."""
        device = self.processes.device
        images, labels, partners, shares = (t.to(device, non_blocking=True) for t in batch[:4])
        smoothing = self.settings.loop.label_smoothing
        with self._autocast():
            logits = self.stepped(images)
        logits = logits.float()
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        if self.settings.data.mixup or self.settings.data.cutmix:
            other = F.cross_entropy(logits, partners, reduction="none", label_smoothing=smoothing)
            losses = shares * losses + (1 - shares) * other
        return losses.sum(), (logits.argmax(-1) == labels).sum()

    def _gradient_norm(self) -> float:
        """Of all gradients, which are clipped to the settings' norm if they ask for that."""
        clip = self.settings.optimizer.clip or math.inf
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), clip, foreach=True)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.settings.loop.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.processes.device.type, torch.bfloat16)

    def _stop(self, step: int, loss: float, norm: float) -> None:
        """Keep the state as it was before this step, and say what happened."""
        self.state.optimizer.zero_grad()
        save(self.state, self.folder, self.processes)
        raise Diverged(
            f"step {step}: the loss is {loss:.4g} and the gradient's norm {norm:.4g}, so training"
            f" stopped; the state before this step is in {self.folder}: resume it with a lower --lr"
        )

    # ---- evaluation ----

    def _end_epoch(self, log: Log | None, seconds: float) -> Tally | None:
        progress, schedule = self.state.progress, self.settings.loop
        epoch = math.ceil(progress.step / self.each)
        row: dict[str, float] = {
            "epoch": epoch,
            "step": progress.step,
            "seconds": round(seconds, 2),
        }
        row["loss"] = progress.loss / max(1, progress.seen)
        row["accuracy"] = progress.right / max(1, progress.seen)
        tally = None
        if epoch % schedule.eval_every == 0 or progress.step == self.total:
            tally = self.evaluate()
            row["eval_loss"], row["eval_accuracy"] = tally.mean_loss, tally.accuracy
        progress.history.append(row)
        progress.best = max(progress.best, row.get("eval_accuracy", 0.0))
        progress.loss = progress.right = progress.seen = 0.0
        if log:
            log.epoch(row)
        return tally

    def evaluate(self) -> Tally:
        """All evaluation images, by the moving average where there is one."""
        tally = Tally(self.model.config.classes)
        self.state.swap()
        self.model.eval()
        sharded = self.processes.sharded  # its all-gathers need version counters
        with torch.no_grad() if sharded else torch.inference_mode(), self._autocast():
            for batch in self.evaluation:
                self.problems(batch)
                labels = batch.labels.to(self.processes.device)
                logits = self.model(batch.images.to(self.processes.device)).float()
                loss = F.cross_entropy(logits, labels, reduction="sum").item()
                tally.add(logits, labels, loss)
        self.model.train()
        self.state.swap()
        return self._everybody(tally)

    def _everybody(self, tally: Tally) -> Tally:
        """The sum of all processes' counts."""
        p = self.processes
        if p.world > 1:
            for counts in (tally.right, tally.predicted, tally.actual, tally.matrix):
                if counts is not None:
                    counts.copy_(p.total(counts.to(p.device)).cpu())
            loss = torch.tensor(tally.loss, dtype=torch.float64, device=p.device)
            tally.loss = p.total(loss).item()
        return tally


def _like(right: Tensor, batch: Batch) -> Tensor:
    return torch.tensor(len(batch.labels), dtype=torch.float64, device=right.device)


def _seed(*parts: int) -> int:
    """A seed of torch's generator for this part of this step of this process."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
