"""A whole run: data, model, loop, and the folder with everything that came of it."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import NamedTuple

import torch

from .. import trained_file
from . import build, parallel, report, state
from .data import Images, Parts, first_of_each_class, open_data
from .log import Log
from .loop import Trainer
from .settings import Settings, read

SETTINGS = "settings.toml"


class Result(NamedTuple):
    """What a run came to."""

    folder: pathlib.Path
    accuracy: float  # of the final evaluation
    loss: float
    seconds: float


def train(settings: Settings, runs: pathlib.Path, resume: pathlib.Path | None = None) -> Result:
    """Train by the settings into a new folder of `runs`, or go on in the folder `resume`."""
    processes = parallel.start(settings.loop.device, settings.loop.parallel)
    try:
        return _train(settings, runs, resume, processes)
    finally:
        parallel.stop()


def _train(
    settings: Settings,
    runs: pathlib.Path,
    resume: pathlib.Path | None,
    processes: parallel.Processes,
) -> Result:
    began = time.perf_counter()
    parts = data(settings)
    torch.manual_seed(settings.loop.seed)
    model = build.model(settings.model, settings.data.normalisation, len(parts.train.classes))
    model.to(processes.device)
    summary = model.summary(show=False).text
    stepped = processes.wrap(model)
    optimizer = build.optimizer(settings.optimizer, model, model.no_weight_decay())
    now = state.State(model, optimizer, settings.loop.ema)
    folder = resume if resume is not None else processes.same(_new_folder(runs, settings.name))
    trainer = Trainer(settings, model, now, parts, processes, folder)
    trainer.stepped = stepped
    if resume is not None:
        state.load(now, resume)
    log = None
    if processes.first:
        folder.mkdir(parents=True, exist_ok=resume is not None)
        (folder / SETTINGS).write_text(settings.text(), encoding="utf-8")
        (folder / "summary.txt").write_text(summary + "\n", encoding="utf-8")
        log = Log(folder, now.progress.step, settings.loop.tensorboard)
        _say(trainer, resume)
    processes.wait()
    tally = trainer.train(log)
    if log is not None:
        log.close()
        _write_reports(trainer, tally)
    _save_model(trainer)
    return Result(folder, tally.accuracy, tally.mean_loss, time.perf_counter() - began)


def data(settings: Settings) -> Parts:
    """Training and evaluation images, no more than the settings' limits."""
    d = settings.data
    train, evaluation = open_data(d.kind, d.path, d.eval_share, settings.loop.seed)
    if evaluation is None or not len(train) or not len(evaluation):
        raise ValueError(f"{d.path}: there are no images to train on or none to evaluate")
    return Parts(first_of_each_class(train, d.limit), first_of_each_class(evaluation, d.eval_limit))


def settings_of(folder: pathlib.Path) -> Settings:
    """What a run was started with."""
    if not (folder / SETTINGS).is_file():
        raise FileNotFoundError(f"{folder}: no run was started in it (no {SETTINGS})")
    name = folder.name.split("-", 4)[-1] if folder.name[:2].isdigit() else "run"
    return dataclasses.replace(read(folder / SETTINGS), name=name)


def _new_folder(runs: pathlib.Path, name: str) -> pathlib.Path:
    """Named by the time, and by a number where two runs begin in one second."""
    stem = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{name}"
    folder, count = runs / stem, 1
    while folder.exists():
        count += 1
        folder = runs / f"{stem}-{count}"
    return folder


def _say(trainer: Trainer, resume: pathlib.Path | None) -> None:
    """What is about to happen, in three lines."""
    settings, parts = trainer.settings, trainer.parts
    held: Images | None = parts.evaluation
    count = sum(p.numel() for p in trainer.model.parameters())
    path = "; ".join(trainer.model.explain().splitlines()[:2])
    print(f"{settings.name}: {count:,} parameters, {len(parts.train):,} images to train on,")
    print(f"{len(held or ()):,} to evaluate, {trainer.total:,} steps of {trainer.batch}; {path}")
    verb = f"resuming step {trainer.state.progress.step:,} of" if resume else "writing"
    print(f"{verb} {trainer.folder}", flush=True)


def _write_reports(trainer: Trainer, tally: report.Tally) -> None:
    folder, names = trainer.folder, trainer.parts.train.classes
    title = f"{trainer.settings.name}: ViT, {trainer.model.config.depth} blocks"
    (folder / "report.txt").write_text(report.text(tally, names), encoding="utf-8")
    report.draw_curves(trainer.state.progress.history, folder / "curves.png", title)
    report.draw_confusions(tally, names, folder / "confusion.png", title)


def _save_model(trainer: Trainer) -> None:
    """The weights alone, the moving average's where there is one, under timm's names."""
    trainer.state.swap()
    tensors = {}
    for name, value in trainer.model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        tensors[name] = whole
    if trainer.processes.first:
        classes, crop = trainer.parts.train.classes, trainer.settings.data.eval_crop
        about = trained_file.metadata(trainer.model.config, classes, crop)
        state.write_tensors(trainer.folder / "model.safetensors", tensors, about)
    trainer.state.swap()  # only now: `tensors` are the parameters themselves
    trainer.processes.wait()
