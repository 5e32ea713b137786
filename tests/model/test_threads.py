"""Threads: many of them, calls at the same time, forked children, limits of containers."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from vitkern import _C, ViT, ViTConfig, cpu, cpu_limits, cpu_threads
from vitkern.engines.cpu import CpuEngine
from vitkern.precision import CHOICES

SMALL = ViTConfig(
    image_size=64, patch_size=8, width=96, depth=2, heads=3, mlp_width=200, classes=11
)
MANY = (5, 8, 12, 16, 64)  # threads, on any number of CPUs


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def torch_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def small(**changes) -> ViT:
    torch.manual_seed(0)
    return ViT(SMALL.replace(**changes)).eval()


def run(model: ViT, image: torch.Tensor, threads: int) -> torch.Tensor:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        return model(image)


# ---- Many threads --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", CHOICES)
@pytest.mark.parametrize("isa", cpu.isas())
def test_any_number_of_threads_gives_the_same_bits(isa, precision, images):
    """Teams of all sizes, more threads than tiles, panels and heads, more threads than CPUs."""
    engine = CpuEngine(small(), precision, isa=isa)
    torch.set_num_threads(1)
    alone = engine.logits(images)
    for threads in MANY:
        torch.set_num_threads(threads)
        for batch in (1, 2, 4, 5):
            got = engine.logits(images[:batch])
            assert torch.equal(got, alone[:batch]), f"{threads=} {batch=}"


@pytest.mark.parametrize(
    "changes", ({"pool": "mean"}, {"qk_norm": True, "pre_norm": True}, {"classes": 0})
)
def test_teams_compute_every_kind_of_model(changes, images):
    model = small(**changes)
    alone = run(model, images, 1)
    assert torch.equal(run(model, images, 8), alone) and torch.equal(run(model, images, 6), alone)


@pytest.mark.parametrize("precision", CHOICES)
def test_threads_that_help_each_other_leave_nothing_out(precision, images):
    """Enough panels for each thread that others, done first, take some of them."""
    model = small(width=192, mlp_width=1024)
    model.precision = precision
    alone = run(model, images[:1], 1)
    for threads in (2, 3, 4) * 5:
        assert torch.equal(run(model, images[:1], threads), alone)


@pytest.mark.parametrize("threads", (2, 6, 16))
def test_teams_compute_images_of_mixed_sizes(threads):
    model = small(dynamic_image_size=True)
    sizes = ((64, 64), (128, 64), (8, 8), (40, 56), (64, 64))
    images = [torch.randn(3, *size, generator=torch.Generator().manual_seed(2)) for size in sizes]
    torch.set_num_threads(1)
    with torch.inference_mode():
        alone = model.forward_packed(images)
        torch.set_num_threads(threads)
        for count in range(1, len(images) + 1):
            assert torch.equal(model.forward_packed(images[:count]), alone[:count])


@pytest.mark.parametrize("threads", (8, 64))
def test_operators_give_the_same_bits_on_many_threads(threads, images):
    model = small()
    model.path = "fused"
    alone = run(model, images, 1)
    assert torch.equal(run(model, images, threads), alone)


def test_more_threads_than_cpus_are_not_catastrophically_slow(images):
    """A barrier that spins until a descheduled thread arrives takes a time slice of each thread."""
    model = small()
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        run(model, images[:1], 64)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 2  # 2 to 10 ms on two CPUs


def test_the_number_may_change_between_calls(images):
    model = small()
    alone = run(model, images, 1)
    for threads in (3, 1, 8, 2, 16, 1):
        assert torch.equal(run(model, images, threads), alone)


# ---- Calls at the same time ----------------------------------------------------------------------


def grant_in_thread(wanted: int) -> tuple[threading.Thread, list[_C.Grant]]:
    """A thread that asks for a grant, and the list that will hold it."""
    got: list[_C.Grant] = []
    thread = threading.Thread(target=lambda: got.append(_C.Grant(wanted)), daemon=True)
    thread.start()
    return thread, got


def test_a_lone_call_gets_what_it_asks_for():
    for wanted in (1, 2, 64):
        assert _C.Grant(wanted).threads == wanted
    assert _C.Grant(0).threads == _C.Grant(-1).threads == 1


def test_a_second_call_waits_for_the_first_to_end():
    first = _C.Grant(64)
    thread, got = grant_in_thread(64)
    thread.join(0.1)
    assert not got and first.threads == 64
    del first
    thread.join(10)
    assert got[0].threads == 64


def test_calls_that_wait_together_share():
    first = _C.Grant(64)
    waiting = []
    for _ in range(2):
        waiting.append(grant_in_thread(64))
        time.sleep(0.1)  # in this order
    del first
    for thread, _ in waiting:
        thread.join(10)
    assert [got[0].threads for _, got in waiting] == [32, 32]


def test_a_call_takes_what_others_leave_if_that_is_a_fair_share():
    first = _C.Grant(20)
    assert _C.Grant(64).threads == 44
    del first
    first = _C.Grant(60)
    thread, got = grant_in_thread(64)  # 4 of 64 would be no fair share
    thread.join(0.1)
    assert not got
    del first
    thread.join(10)
    assert got[0].threads == 64


def test_one_thread_never_waits_and_is_never_waited_for():
    several = _C.Grant(64)
    alone = [_C.Grant(1) for _ in range(100)]
    assert {grant.threads for grant in alone} == {1}
    del several
    assert _C.Grant(64).threads == 1  # all CPUs are busy


def test_models_share_the_threads_of_the_process(images):
    models = [small(), small(width=48)]
    expected = [run(model, images, 1) for model in models]
    torch.set_num_threads(8)

    def call(i: int) -> bool:
        return torch.equal(run(models[i % 2], images, 8), expected[i % 2])

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(call, range(48)))
    assert _C.Grant(64).threads == 64  # nothing is kept


# ---- Forked children, exit -----------------------------------------------------------------------


def in_child(work) -> int:
    """The status of a forked child: 0 if work() is true, and within a minute."""
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_computes_with_threads_of_its_own(images):
    model = small()
    expected = run(model, images, 4)  # the parent's threads exist

    def work() -> bool:
        again = [run(model, images, threads) for threads in (4, 1, 3, 4)]
        return all(torch.equal(y, expected) for y in again)

    assert in_child(work) == 0
    assert in_child(lambda: in_child(work) == 0) == 0  # a child's child
    assert torch.equal(run(model, images, 4), expected)


def test_a_child_does_not_wait_for_calls_of_its_parent(images):
    held = _C.Grant(64)
    thread, got = grant_in_thread(64)  # waits, with the lock's queue not empty
    assert in_child(lambda: _C.Grant(64).threads == 64) == 0
    del held
    thread.join(10)
    assert got


class Embedded(Dataset):
    """Features that the workers of a DataLoader compute."""

    def __init__(self, model: ViT, images: torch.Tensor):
        self.model, self.images = model, images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(self.images[i : i + 1])[0].clone()


def test_workers_of_a_dataloader_run_the_model(images):
    model = small()
    expected = run(model, images, 2)
    loader = DataLoader(
        Embedded(model, images), batch_size=5, num_workers=2, multiprocessing_context="fork"
    )
    assert torch.equal(next(iter(loader)), expected)


EXIT = """
import threading, torch
from vitkern import ViT
model = ViT("Ti/16").eval()
def forever():
    with torch.inference_mode():
        while True:
            model(torch.zeros(1, 3, 224, 224))
torch.set_num_threads(4)
threading.Thread(target=forever, daemon=True).start()
with torch.inference_mode():
    model(torch.zeros(1, 3, 224, 224))
"""


@pytest.mark.full
def test_the_interpreter_exits_while_a_daemon_thread_computes():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- How many ------------------------------------------------------------------------------------


def write_files(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "sys/fs/cgroup/cpu,cpuacct/"
LIMITS = {
    "none": ({}, None),
    "v2": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    "v2-no-limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    "v2-of-a-parent": (
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "400000 100000\n",
        },
        4,
    ),
    "v2-path-of-the-host": (
        {"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
        0.5,
    ),
    "v1": (
        {
            "proc/self/cgroup": "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/\n",
            V1 + "cpu.cfs_quota_us": "250000\n",
            V1 + "cpu.cfs_period_us": "100000\n",
        },
        2.5,
    ),
    "v1-no-limit": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/\n",
            V1 + "cpu.cfs_quota_us": "-1\n",
            V1 + "cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("files, expected", LIMITS.values(), ids=LIMITS)
def test_a_quota_is_found(files, expected, tmp_path):
    assert cpu_limits.quota(write_files(tmp_path, files)) == expected


def test_available_cpus_are_those_of_mask_and_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert cpu_limits.available(tmp_path) == 16
    for share, expected in ((20_000, 1), (240_000, 2), (260_000, 3), (3_200_000, 16)):
        files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{share} 100000\n"}
        assert cpu_limits.available(write_files(tmp_path, files)) == expected


def test_a_quota_bounds_the_number_that_torch_chose(monkeypatch):
    monkeypatch.setattr(cpu_threads, "_CPUS", 3)
    monkeypatch.setattr(cpu_threads, "_CHOSEN_BY_TORCH", 8)
    torch.set_num_threads(8)
    assert cpu.threads() == 3
    for asked in (2, 5, 16):  # somebody's own choice
        torch.set_num_threads(asked)
        assert cpu.threads() == asked
    monkeypatch.setattr(cpu_threads, "_CHOSEN_BY_TORCH", None)  # OMP_NUM_THREADS
    torch.set_num_threads(8)
    assert cpu.threads() == 8
