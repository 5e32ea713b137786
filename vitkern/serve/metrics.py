"""What Prometheus reads, and the layer of the app that counts it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

WINDOW = 10.0  # seconds of images_per_second
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """Counters of one app, in a registry of its own."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        own = self._registry = CollectorRegistry()
        self.requests = Counter(
            "vitkern_requests", "Requests by address and status; 499: the client left",
            ["endpoint", "status"], registry=own,
        )  # fmt: skip
        self.latency = Histogram(
            "vitkern_request_seconds", "From the request's headers to the end of its answer",
            ["endpoint"], buckets=SECONDS, registry=own,
        )  # fmt: skip
        self.batches = Histogram(
            "vitkern_batch_size", "Images of a batch", buckets=SIZES, registry=own
        )
        self.forwards = Histogram(
            "vitkern_batch_seconds", "Time of a batch in the engine", buckets=SECONDS, registry=own
        )
        self.images = Counter("vitkern_images", "Images computed", registry=own)
        self.dropped = Counter("vitkern_dropped", "Images whose client left", registry=own)
        depth = Gauge("vitkern_queue_depth", "Images decoding or waiting", registry=own)
        depth.set_function(waiting)
        rate = Gauge(
            "vitkern_images_per_second", f"Mean of the last {WINDOW:g} seconds", registry=own
        )
        rate.set_function(self.rate)
        ProcessCollector(registry=own)
        self._recent: deque[tuple[float, int]] = deque()
        self._began = time.monotonic()

    def batch(self, size: int, seconds: float) -> None:
        """After each batch, on the engine's thread."""
        self.batches.observe(size)
        self.forwards.observe(seconds)
        self.images.inc(size)
        self._recent.append((time.monotonic(), size))
        self._forget()

    def rate(self) -> float:
        self._forget()
        now = time.monotonic()
        return sum(size for _, size in list(self._recent)) / max(
            min(WINDOW, now - self._began), 1e-3
        )

    def _forget(self) -> None:
        oldest = time.monotonic() - WINDOW
        while self._recent and self._recent[0][0] < oldest:
            try:
                self._recent.popleft()
            except IndexError:  # the other thread was faster
                return

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Counting:
    """The outermost layer: counts and times requests, and says goodbye while the server stops."""

    def __init__(self, app: ASGIApp, metrics: Metrics, stopping: Callable[[], bool]) -> None:
        self._app, self._metrics, self._stopping = app, metrics, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._stopping():  # so that a client does not send the next one into nothing
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            # The pattern, never what a client typed: labels are kept for ever.
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(endpoint, str(status)).inc()
            self._metrics.latency.labels(endpoint).observe(time.perf_counter() - begin)
