"""Two processes (gloo) against one: the same result, and checkpoints that change hands."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.conftest import ROOT
from tests.train.small_sets import write_idx
from tests.train.test_run import settings
from vitkern import trained_file

pytest.importorskip("PIL")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow
full = pytest.mark.full  # of each kind one case is in the default run

# sgd: adam's first steps have the size of the learning rate whatever the gradient's, so that
# rounding errors of gradients near zero show.
PLAIN = {
    "model": {"dropout": 0.0, "drop_path": 0.0},
    "optimizer": {"optimizer": "sgd", "lr": 0.05},
    "schedule": {"epochs": 4},
    "loop": {"save_every": 1},
}


def command(world: int, *words: object) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    start = [sys.executable, *(torchrun if world > 1 else []), "-m", "vitkern", "train"]
    return [*start, *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def train(world: int, *words: object) -> None:
    done = subprocess.run(
        command(world, *words), cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A file of settings, and the model that one process makes of it."""
    folder = tmp_path_factory.mktemp("parallel")
    write_idx(folder / "data", 100, 40)
    path = folder / "tiny.toml"
    path.write_text(settings(folder / "data", **PLAIN).text(), encoding="utf-8")
    train(1, "--config", path, "--out", folder / "one")
    return path, *(folder / "one").iterdir()


def difference(one, other) -> float:
    """The largest difference of any parameter, in units of the largest parameter."""
    models = [trained_file.read(folder / "model.safetensors").model for folder in (one, other)]
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=full)])
def test_two_processes_do_what_one_does(setting, tmp_path, parallel):
    path, one = setting
    train(2, "--config", path, "--out", tmp_path, "--parallel", parallel)
    (two,) = tmp_path.iterdir()
    found = difference(one, two)
    print(f"{parallel}: {found:.2e}")
    assert found < 1e-4
    assert (two / "last.json").is_file() == (parallel == "fsdp")
    reports = [(folder / "report.txt").read_text().splitlines()[-1] for folder in (one, two)]
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    "parallel, worlds",
    [
        pytest.param("fsdp", (2, 1), id="fsdp-2-to-1"),
        pytest.param("fsdp", (1, 2), id="fsdp-1-to-2", marks=full),
        pytest.param("ddp", (2, 1), id="ddp-2-to-1", marks=full),
        pytest.param("ddp", (1, 2), id="ddp-1-to-2", marks=full),
    ],
)
def test_a_killed_run_goes_on_with_another_number_of_processes(setting, tmp_path, parallel, worlds):
    path, one = setting
    before, after = worlds
    words = ("--config", path, "--out", tmp_path, "--parallel", parallel)
    process = subprocess.Popen(
        command(before, *words), cwd=ROOT, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while step_of(tmp_path) < 7:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)  # torchrun and what it started
    process.wait()
    (folder,) = tmp_path.iterdir()
    assert 7 <= step_of(tmp_path) < 20, "it had finished before the kill"
    train(after, "--resume", folder, "--parallel", parallel)
    assert difference(one, folder) < 1e-4


def step_of(runs) -> int:
    files = list(runs.glob("*/steps.csv"))
    lines = files[0].read_text().splitlines() if files else []
    return int(lines[-1].split(",")[0]) if len(lines) > 1 else 0


@full
def test_a_batch_that_cannot_be_shared_is_refused(setting, tmp_path):
    path, _ = setting
    done = subprocess.run(
        command(2, "--config", path, "--out", tmp_path, "--batch", "5"),
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode and "cannot be shared by 2 processes" in done.stderr


def test_torch_has_what_is_used():
    assert torch.distributed.is_available()
