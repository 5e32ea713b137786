"""The queue before the engine: bounded, gathered into batches, worked off by one thread.

A request takes a ticket before its picture is decoded and gives it back when it is answered or has
gone away. Tickets are what is bounded, so that decoding is, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

LONGEST_RETRY = 60  # seconds that a refused client is told to wait at most
MEMORY = 0.2  # weight of the last batch in the mean time of an image


class Full(Exception):
    """As many wait as may; `retry` is the number of seconds after which a place is likely."""

    def __init__(self, waiting: int, retry: int) -> None:
        super().__init__(f"{waiting} images wait already: try again in {retry} s")
        self.retry = retry


class Closed(Exception):
    """The server is stopping."""


class Settings(NamedTuple):
    """How images are gathered."""

    max_batch: int = 8
    max_wait: float = 0.005  # seconds that the first of a batch waits for others
    queue: int = 64  # tickets whose batch has not begun

    def check(self) -> None:
        """A ValueError that names the command's option."""
        if self.max_batch < 1:
            raise ValueError(f"--max-batch {self.max_batch}: a batch holds at least one image")
        if not 0 <= self.max_wait <= 60:
            wait = self.max_wait * 1e3
            raise ValueError(f"--max-wait-ms {wait:g}: expected 0 to 60000 milliseconds")
        if self.queue < 1:
            raise ValueError(f"--queue {self.queue}: at least one image must be able to wait")


class Ticket:
    """A place in the queue, from before decoding until the batch begins."""

    def __init__(self, owner: Batcher) -> None:
        self._owner = owner
        self.work: Any = None
        self.answer: Future[Any] = Future()
        self.arrived = math.inf  # when it was ready to be computed

    def submit(self, work: Any) -> Future[Any]:
        """Hand in what `compute` is to be called with; cancelling the answer drops it."""
        self.work, self.arrived = work, time.monotonic()
        self._owner.enqueue(self)
        return self.answer

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.answer.cancel()  # nothing happens where there is an answer
        self._owner.give_back(self)


class Batcher:
    """Runs `compute(works)`, which returns a result or an exception for each, on a single thread.

    begin: called once on that thread, before the constructor returns; what it raises, that raises.
    observe(size, seconds): after each batch.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Any]], Sequence[Any]],
        settings: Settings,
        observe: Callable[[int, float], object] = lambda size, seconds: None,
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        settings.check()
        self.settings = settings
        self._compute, self._observe, self._begin = compute, observe, begin
        self._change = threading.Condition()
        self._tickets: set[Ticket] = set()  # whose batch has not begun
        self._ready: deque[Ticket] = deque()  # those of them that are decoded
        self._running = 0
        self._last = 0  # size of the last batch
        self._each = 0.0  # mean seconds of an image
        self._closed = self._stopped = False
        self._thread = threading.Thread(target=self._work, name="vitkern-engine", daemon=True)
        self._begun: Future[None] = Future()
        self._thread.start()
        self._begun.result()

    # ---- the side of requests ----

    @property
    def waiting(self) -> int:
        """Tickets whose batch has not begun."""
        return len(self._tickets)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """Full or Closed, if `admit` would raise it now."""
        with self._change:
            if self._closed:
                raise Closed("the server is stopping: try another, or again later")
            waiting = len(self._tickets)
            if waiting >= self.settings.queue:
                ahead = (waiting + self._running) * self._each
                raise Full(waiting, min(LONGEST_RETRY, max(1, math.ceil(ahead))))

    def admit(self) -> Ticket:
        """A ticket, to be used as a context manager; or Full, or Closed."""
        with self._change:
            self.check()
            ticket = Ticket(self)
            self._tickets.add(ticket)
            return ticket

    def enqueue(self, ticket: Ticket) -> None:
        with self._change:
            self._ready.append(ticket)
            self._change.notify_all()

    def give_back(self, ticket: Ticket) -> None:
        """Forget a ticket, whatever became of it."""
        with self._change:
            self._tickets.discard(ticket)
            if ticket in self._ready:
                self._ready.remove(ticket)
            self._change.notify_all()

    def close(self) -> None:
        """Admit nobody from now on; what was admitted is computed."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def stop(self, seconds: float) -> bool:
        """Close, compute what is there, end the thread: whether it has ended in time."""
        with self._change:
            self._closed = self._stopped = True
            self._change.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- the thread ----

    def _work(self) -> None:
        try:
            self._begin()
        except BaseException as error:
            self._begun.set_exception(error)
            return
        self._begun.set_result(None)
        while batch := self._gather():
            begin = time.monotonic()
            try:
                results = self._compute([ticket.work for ticket in batch])
            except Exception as error:  # an answer like any other: the thread serves the next
                results = [error] * len(batch)
            seconds = time.monotonic() - begin
            with self._change:
                self._running, self._last = 0, len(batch)
                each = seconds / len(batch)
                self._each += (MEMORY if self._each else 1.0) * (each - self._each)
            self._observe(len(batch), seconds)
            for ticket, result in zip(batch, results, strict=True):
                if isinstance(result, BaseException):
                    ticket.answer.set_exception(result)
                else:
                    ticket.answer.set_result(result)

    def _gather(self) -> list[Ticket]:
        """The next batch, without those who left meanwhile; empty: there will be none."""
        with self._change:
            while True:
                while not self._ready:
                    if self._stopped and not self._tickets:
                        return []
                    self._change.wait()
                self._wait_for_others()
                most = min(len(self._ready), self.settings.max_batch)
                taken = [self._ready.popleft() for _ in range(most)]
                self._tickets.difference_update(taken)
                batch = [t for t in taken if t.answer.set_running_or_notify_cancel()]
                if batch:
                    self._running = len(batch)
                    return batch

    def _wait_for_others(self) -> None:
        """Until the batch is full or its first image has waited long enough.

        A lone client never waits: others are expected only while some are being decoded, or where
        the last batch held more than one.
        """
        while self._ready and len(self._ready) < self.settings.max_batch and not self._closed:
            if len(self._tickets) == len(self._ready) and self._last <= 1:
                return
            left = self._ready[0].arrived + self.settings.max_wait - time.monotonic()
            if left <= 0:
                return
            self._change.wait(left)
