"""What a run writes while it goes on: CSV files, and TensorBoard's events if asked for."""

from __future__ import annotations

import csv
import io
import os
import pathlib
from collections.abc import Mapping
from typing import Any

STEPS, EPOCHS = "steps.csv", "epochs.csv"
STEP_COLUMNS = ("step", "epoch", "lr", "loss", "accuracy", "gradient_norm", "images_per_second")
EPOCH_COLUMNS = (
    "epoch", "step", "loss", "accuracy", "eval_loss", "eval_accuracy", "seconds",
)  # fmt: skip


class Log:
    """Two CSV files; rows after `step`, which a killed run may have written, are taken back."""

    def __init__(self, folder: pathlib.Path, step: int, tensorboard: bool) -> None:
        self.folder = folder
        for name, columns in ((STEPS, STEP_COLUMNS), (EPOCHS, EPOCH_COLUMNS)):
            _truncate(folder / name, columns, step)
        self.events: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("TensorBoard's events need: pip install tensorboard") from error
            self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def step(self, row: Mapping[str, float]) -> None:
        self._add(STEPS, STEP_COLUMNS, row, "step")

    def epoch(self, row: Mapping[str, float]) -> None:
        self._add(EPOCHS, EPOCH_COLUMNS, row, "epoch")

    def close(self) -> None:
        if self.events is not None:
            self.events.close()

    def _add(
        self, name: str, columns: tuple[str, ...], row: Mapping[str, float], group: str
    ) -> None:
        text = io.StringIO()
        csv.writer(text).writerow([row.get(column, "") for column in columns])
        with open(self.folder / name, "a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())
        if self.events is not None:
            for column, value in row.items():
                if column not in ("step", "epoch"):
                    self.events.add_scalar(f"{group}/{column}", value, row["step"])


def read(path: pathlib.Path) -> list[dict[str, float]]:
    """The rows of a CSV file, numbers as numbers, empty cells left out."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


def _truncate(path: pathlib.Path, columns: tuple[str, ...], step: int) -> None:
    """Start the file, or keep its rows up to a step; a row that was cut short is dropped."""
    kept = []
    if path.is_file():
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                whole = len(row) == len(columns) and row[0] != columns[0]
                if whole and int(float(row[columns.index("step")])) <= step:
                    kept.append(row)
    beside = path.with_name(path.name + ".new")
    with open(beside, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *kept])
    os.replace(beside, path)
