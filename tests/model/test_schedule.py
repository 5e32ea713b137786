"""How threads share a forward, counted by the engine's own code (tools/cpu_schedule.py)."""

import shutil

import pytest

from tools import cpu_schedule
from tools.cpu_schedule import Case, Counter, Event
from vitkern import cpu

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        "avx2" not in cpu.isas() or not shutil.which("c++"), reason="compiles for AVX2, and runs"
    ),
]


@pytest.fixture(scope="module")
def counter() -> Counter:
    return Counter()


def total(threads: list[list[Event]], kind: str) -> int:
    """Multiply-adds of all matmuls, or what else the first number counts."""
    found = [e.numbers for thread in threads for e in thread if e.kind == kind]
    return sum(n[0] * n[1] * n[2] if kind == "m" else n[0] for n in found)


@pytest.mark.parametrize("threads", (2, 3, 7, 8, 12, 13, 16, 24, 61, 64))
@pytest.mark.parametrize("batch", (1, 2, 3, 5, 8, 9))
def test_threads_share_all_work_and_nothing_twice(counter, batch, threads):
    alone = counter.count(Case("S/16", batch, 1), 2)
    shared = counter.count(Case("S/16", batch, threads), 2)
    assert len(shared) == threads
    for kind in "mhr":
        assert total(shared, kind) == total(alone, kind)


@pytest.mark.parametrize("threads", (2, 6, 8, 16, 36, 64))
@pytest.mark.parametrize("batch", (1, 4, 9, 70))
def test_all_threads_of_a_barrier_come_to_it(counter, batch, threads):
    shared = counter.count(Case("Ti/16", batch, threads), 1)
    assert cpu_schedule.run(shared, "Ti/16") > 0
    shared[0].append(Event("b", (1, 2)))
    with pytest.raises(RuntimeError, match="wait for ever"):
        cpu_schedule.run(shared, "Ti/16")


def test_images_go_to_teams(counter):
    def barriers(batch, threads):
        found = counter.count(Case("S/16", batch, threads), 1)[0]
        return {e.numbers[1] for e in found if e.kind == "b"}

    assert barriers(4, 16) == {4, 16}  # four teams of four; all meet at the end
    assert barriers(9, 16) == {2, 16}
    assert barriers(16, 16) == {16}
    assert barriers(5, 7) == {7}


def test_a_block_has_seven_barriers(counter):
    assert cpu_schedule.predict(counter, Case("B/16", 1, 16)).barriers == 7


def test_work_is_balanced_on_any_number_of_threads(counter):
    cases = [
        Case(m, b, t) for m in cpu_schedule.MODELS for b in (1, 8) for t in (8, 12, 16, 32, 64)
    ]
    assert not list(cpu_schedule.complaints(counter, cases))


def test_the_page_shows_the_counts(counter):
    page = cpu_schedule.PAGE.read_text()
    assert cpu_schedule.table(counter) in page, "run python -m tools.cpu_schedule"
    assert "**Predicted, not measured**" in page
