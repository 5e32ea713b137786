"""The same service on Ray Serve: replicas on the machines of a cluster, behind Ray's HTTP proxies.

A replica is a `Service`, with its own queue, batches and limits; Ray spreads requests over replicas
and brings a new one up where one dies. Every node must have vitkern, and see the weights under the
same path. Replicas give the same bits where their CPUs are of one kind.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ..predictor import Predictor
from . import server
from .app import Options, Service

NAME = "vitkern"  # of the application on the cluster
BESIDE = 16  # requests of a replica that bring no picture: the page, metrics, health
# Seconds that an HTTP proxy may take to start. Ray's 5 are too few where cores are busy: it would
# kill the proxy, and the start with it. Read by Ray's controller, from the environment.
PROXY_START = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}


def imported() -> Any:
    """Ray with its Serve; an ImportError says how to get them."""
    for name, value in PROXY_START.items():
        os.environ.setdefault(name, value)
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.serve")
    except ImportError as error:
        raise ImportError(
            "--where ray needs Ray Serve: pip install 'vitkern[ray,serve]'"
        ) from error
    return ray


def run(
    opened: Callable[[], Predictor],
    options: Options,
    *,
    host: str,
    port: int,
    replicas: int = 1,
    stop_seconds: float = 30.0,
    ready: Callable[[str], None] = lambda address: None,
) -> int:
    """Serve on the cluster that RAY_ADDRESS names, or on one of this machine, until a signal.

    opened: makes the predictor, in each replica; it must be picklable. ready: called with the
    address once all replicas answer. A signal stops: Ray refuses what is new and waits for what it
    accepted, `stop_seconds` at most.
    """
    if replicas < 1:
        raise ValueError(f"--replicas {replicas}: at least one must answer")
    Service.check(options)
    ray = imported()
    with server.listen(host, port) as bound:  # Ray would only say it in a log
        host, port = bound.getsockname()[:2]
        address = server.address_of(bound)
    with _cluster(ray), _stop_signals() as stopped:
        _check(ray, replicas, options.threads or 1)
        try:
            ray.serve.start(http_options={"host": host, "port": port})
            _deploy(ray.serve, opened, options, replicas, stop_seconds)
            ready(address)
            stopped.wait()
            ray.serve.delete(NAME)  # answers what was accepted
        except ray.exceptions.RayError as error:
            said = str(error).splitlines()[0]
            raise ValueError(f"Ray Serve failed: {said}") from error
        finally:
            ray.serve.shutdown()
    return 0


def _deploy(
    serve: Any, opened: Callable[[], Predictor], options: Options, replicas: int, seconds: float
) -> None:
    """Replicas that answer, or a ValueError with what one of them said."""
    queue, batch = options.batching.queue, options.batching.max_batch

    def built() -> Service:  # in each replica
        return Service(opened(), options)

    replica = serve.deployment(
        serve.ingress(built)(),
        name=NAME,
        num_replicas=replicas,
        ray_actor_options={"num_cpus": options.threads or 1},
        # More than the replica's own queue takes, so that its 429 is what a client sees.
        max_ongoing_requests=3 * queue + batch + BESIDE,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=seconds,
        max_constructor_retry_count=1,
    )
    try:
        serve.run(replica.bind(), name=NAME, route_prefix="/")
    except RuntimeError as error:
        found = serve.status().applications[NAME].deployments[NAME].message
        said = [line.strip() for line in str(found).splitlines() if line.strip()]
        raise ValueError(f"on the Ray cluster: {said[-1] if said else error}") from error


def _check(ray: Any, replicas: int, threads: int) -> None:
    """Ray would wait for CPUs for ever, and leave an address of its own as it is."""
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if replicas * threads > cpus:
        raise ValueError(
            f"{replicas} replicas of {threads} threads need {replicas * threads} CPUs, the Ray"
            f" cluster has {cpus}: fewer --replicas or --threads"
        )
    if ray.serve.status().proxies:
        raise ValueError(
            "Ray Serve runs on this cluster already, at an address of its own: stop it"
            " (serve shutdown) or name another cluster with RAY_ADDRESS"
        )


@contextlib.contextmanager
def _cluster(ray: Any) -> Iterator[None]:
    """Connected; what was begun here is ended here."""
    begun = not ray.is_initialized()
    if begun:
        try:
            ray.init(log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError) as error:
            raise ValueError(f"no Ray cluster: {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        if begun:
            ray.shutdown()


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Set by SIGTERM and SIGINT; a second one ends the process at once."""
    stopped = threading.Event()
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    if threading.current_thread() is threading.main_thread():
        before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
