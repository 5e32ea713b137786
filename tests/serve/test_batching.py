"""The queue: what is gathered, in which order, what is refused and what is dropped."""

import threading
import time

import pytest

pytest.importorskip("fastapi", reason="vitkern[serve] is not installed")

from vitkern.serve.batching import Batcher, Closed, Full, Settings


class Held:
    """A computation that doubles numbers, and stands still until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go, self.inside = threading.Event(), threading.Event()

    def __call__(self, works):
        self.batches.append(list(works))
        self.inside.set()
        assert self.go.wait(10)
        return [ValueError(f"{work} is odd luck") if work == 13 else 2 * work for work in works]


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def make(held):
    made = []

    def build(**settings) -> Batcher:
        made.append(Batcher(held, Settings(**settings)))
        return made[-1]

    yield build
    held.go.set()
    assert all(batcher.stop(10) for batcher in made)


def submit(batcher: Batcher, *works: int) -> list:
    return [batcher.admit().submit(work) for work in works]


def test_what_came_meanwhile_is_one_batch_in_order(make, held):
    batcher = make(max_batch=4)
    first = submit(batcher, 1)
    assert held.inside.wait(10)
    rest = submit(batcher, 2, 3, 4, 5, 6)
    held.go.set()
    assert [answer.result(10) for answer in first + rest] == [2, 4, 6, 8, 10, 12]
    assert held.batches == [[1], [2, 3, 4, 5], [6]]


def test_a_lone_client_does_not_wait(make, held):
    held.go.set()
    batcher = make(max_wait=30)
    for i in range(3):
        with batcher.admit() as ticket:
            assert ticket.submit(i).result(10) == 2 * i


def test_others_that_are_being_decoded_are_waited_for(make, held):
    held.go.set()
    batcher = make(max_wait=30, max_batch=2)
    late = batcher.admit()
    (first,) = submit(batcher, 1)
    time.sleep(0.05)
    assert not held.batches
    assert late.submit(2).result(10) == 4 and first.result(10) == 2
    assert held.batches == [[1, 2]]


def test_the_wait_ends(make, held):
    held.go.set()
    batcher = make(max_wait=0.02)
    with batcher.admit():  # still decoding
        (first,) = submit(batcher, 1)
        assert first.result(10) == 2


def test_more_than_the_queue_are_refused_until_a_batch_begins(make, held):
    batcher = make(queue=2, max_batch=2)
    submit(batcher, 1)
    assert held.inside.wait(10)
    rest = submit(batcher, 2, 3)
    with pytest.raises(Full, match="2 images wait already: try again in 1 s") as refused:
        batcher.admit()
    assert refused.value.retry == 1 and batcher.waiting == 2
    held.go.set()
    assert [answer.result(10) for answer in rest] == [4, 6]
    assert batcher.waiting == 0 and submit(batcher, 4)[0].result(10) == 8


def test_whoever_leaves_is_not_computed_and_frees_the_place(make, held):
    batcher = make(queue=3)
    submit(batcher, 1)
    assert held.inside.wait(10)
    stays = submit(batcher, 2)[0]
    with batcher.admit() as ticket:
        left = ticket.submit(3)
        assert batcher.waiting == 2
    assert left.cancelled() and batcher.waiting == 1
    held.go.set()
    assert stays.result(10) == 4 and held.batches == [[1], [2]]


def test_a_batch_that_everybody_left_is_skipped(make, held):
    batcher = make()
    submit(batcher, 1)
    assert held.inside.wait(10)
    for answer in submit(batcher, 2, 3):
        assert answer.cancel()
    held.go.set()
    assert submit(batcher, 4)[0].result(10) == 8
    assert [work for batch in held.batches for work in batch] == [1, 4]


def test_an_error_is_its_own_and_the_thread_lives_on(make, held):
    batcher = make()
    submit(batcher, 1)
    assert held.inside.wait(10)
    bad, good = submit(batcher, 13, 2)
    held.go.set()
    with pytest.raises(ValueError, match="13 is odd luck"):
        bad.result(10)
    assert good.result(10) == 4 and batcher.alive


def test_a_failing_computation_answers_everybody():
    def fail(works):
        raise RuntimeError("no memory")

    batcher = Batcher(fail, Settings())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            submit(batcher, 1)[0].result(10)
    assert batcher.alive and batcher.stop(10)


def test_a_beginning_that_fails_is_the_caller_s_error():
    def fail():
        raise ValueError("bad weights")

    with pytest.raises(ValueError, match="bad weights"):
        Batcher(list, Settings(), begin=fail)


def test_closing_computes_what_was_admitted_and_nothing_else(make, held):
    batcher = make()
    submit(batcher, 1)
    assert held.inside.wait(10)
    decoding = batcher.admit()
    waiting = submit(batcher, 2)[0]
    batcher.close()
    with pytest.raises(Closed, match="stopping"):
        batcher.admit()
    late = decoding.submit(3)
    held.go.set()
    assert batcher.stop(10)
    assert (waiting.result(0), late.result(0)) == (4, 6) and not batcher.alive


def test_many_threads_get_their_own_answers(held, make):
    held.go.set()
    batcher, wrong = make(max_batch=5, queue=1000, max_wait=0.001), []

    def client(k: int) -> None:
        for i in range(50):
            with batcher.admit() as ticket:
                if ticket.submit(1000 * k + i).result(10) != 2 * (1000 * k + i):
                    wrong.append((k, i))

    threads = [threading.Thread(target=client, args=(k,)) for k in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and sum(map(len, held.batches)) == 400 and batcher.waiting == 0
    assert max(map(len, held.batches)) <= 5


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"max_batch": 0}, "--max-batch 0"),
        ({"max_wait": -1}, "--max-wait-ms -1000"),
        ({"max_wait": float("nan")}, "--max-wait-ms nan"),
        ({"queue": 0}, "--queue 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Batcher(list, Settings(**settings))
