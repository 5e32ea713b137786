"""Serve predictions and embeddings over HTTP, with a page to drop pictures on.

POST a picture to /predict or /embed, as the body itself or as a form's file; /openapi.json says it
all. Requests are computed in batches, whose make-up changes no bit of an answer. Listens on this
machine alone unless --host says otherwise. SIGTERM and Ctrl-C answer what was accepted, then stop.

  vitkern serve
  vitkern serve --weights deit_tiny.safetensors --labels imagenet.json --precision bf16 --port 8080
  vitkern serve --where ray --replicas 4 --threads 8 --host 0.0.0.0
  curl --data-binary @cat.jpg 'http://127.0.0.1:8000/predict?top=3'
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import TYPE_CHECKING

from . import predict

if TYPE_CHECKING:
    from ..predictor import Predictor
    from ..serve.app import Options

MIB = 1 << 20


def arguments(parser: argparse.ArgumentParser) -> None:
    predict.model_arguments(parser)
    predict.precision_argument(parser)
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of the engine (as many as there are CPUs)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="default 8000; 0: any that is free, which is printed"
    )
    parser.add_argument(
        "--max-batch", type=int, default=8, metavar="B", help="images of a batch (default 8)"
    )
    parser.add_argument(
        "--max-wait-ms", type=float, default=5.0, metavar="MS",
        help="that the first image of a batch waits for others (default 5; a lone client never)",
    )  # fmt: skip
    parser.add_argument(
        "--queue", type=int, default=64, metavar="N",
        help="images that may wait; more are refused with 429 (default 64)",
    )  # fmt: skip
    parser.add_argument(
        "--max-bytes", type=int, default=20 * MIB, metavar="N",
        help=f"of a picture's file (default {20 * MIB})",
    )  # fmt: skip
    parser.add_argument(
        "--max-pixels", type=int, default=40_000_000, metavar="N",
        help="of a picture, by its header (default 40000000)",
    )  # fmt: skip
    parser.add_argument(
        "--decoders", type=int, default=2, metavar="N", help="threads that decode (default 2)"
    )
    parser.add_argument(
        "--stop-seconds", type=float, default=30.0, metavar="S",
        help="that a stop waits for answers at most (default 30)",
    )  # fmt: skip
    parser.add_argument("--access-log", action="store_true", help="print a line for each request")
    parser.add_argument(
        "--where", choices=("local", "ray"), default="local",
        help="ray: by Ray Serve on the cluster that RAY_ADDRESS names, or on one of this machine",
    )  # fmt: skip
    parser.add_argument(
        "--replicas", type=int, default=1, metavar="N",
        help="with --where ray: processes that answer, each with --threads CPUs (default 1)",
    )  # fmt: skip


def run(given: argparse.Namespace) -> int:
    # Read when torch is loaded. The engine's threads share the cores with decoding and HTTP: where
    # they sleep instead of spinning, DeiT-Tiny answers 62 requests a second, not 53 (2 cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from ..serve import server
        from ..serve.app import Options, Service
        from ..serve.batching import Settings
        from ..serve.uploads import Limits
    except ImportError as error:
        needs = f"serving needs more packages ({error}): pip install 'vitkern[serve]'"
        raise ImportError(needs) from error
    from ..cpu_threads import threads

    if given.stop_seconds <= 0:
        raise ValueError(f"--stop-seconds {given.stop_seconds:g}: expected more than 0")
    if given.where == "local" and given.replicas != 1:
        raise ValueError(f"--replicas {given.replicas}: one process serves here; add --where ray")
    options = Options(
        Settings(given.max_batch, given.max_wait_ms / 1e3, given.queue),
        Limits(given.max_bytes, given.max_pixels),
        given.threads if given.threads is not None else max(1, threads() // max(given.replicas, 1)),
        given.decoders,
    )
    if given.where == "ray":
        return run_on_ray(given, options)
    bound = server.listen(given.host, given.port)  # before the weights: a taken port shows at once
    with bound:
        service = Service(predict.open_predictor(given, headless=True), options)
        bound.listen(server.BACKLOG)  # now that requests can be answered
        greet(given, options, service.predictor, server.address_of(bound))
        return server.run(
            service, bound, stop_seconds=given.stop_seconds, access_log=given.access_log
        )


def run_on_ray(given: argparse.Namespace, options: Options) -> int:
    from ..serve import on_ray

    on_ray.imported()  # before the weights
    for name in ("weights", "classes"):  # a replica has another working folder
        path = getattr(given, name)
        setattr(given, name, path.absolute() if path is not None and path.exists() else path)
    predictor = predict.open_predictor(given, headless=True)  # what is wrong with it shows here
    status = on_ray.run(
        functools.partial(predict.open_predictor, model_choice(given), headless=True),
        options, host=given.host, port=given.port, replicas=given.replicas,
        stop_seconds=given.stop_seconds,
        ready=lambda address: greet(given, options, predictor, address),
    )  # fmt: skip
    print("vitkern serve: stopped", file=sys.stderr)
    return status


def model_choice(given: argparse.Namespace) -> argparse.Namespace:
    """Of the flags those that `open_predictor` reads: they can be sent to another process."""
    names = ("weights", "classes", "model", "normalisation", "precision")
    return argparse.Namespace(**{name: getattr(given, name) for name in names})


def greet(given: argparse.Namespace, options: Options, predictor: Predictor, address: str) -> None:
    """Say where it listens, once it does."""
    from ..serve import server

    on_ray = f", {given.replicas} on Ray" if given.where == "ray" else ""
    print(
        f"vitkern serve: {predictor.title} in {predictor.model.precision} on {address}"
        f" ({options.threads} threads, batches of up to {given.max_batch}{on_ray}); Ctrl-C stops",
        flush=True,
    )
    if not server.is_loopback(address):
        print(
            f"vitkern serve: whoever reaches {address} may use it: there is no authentication",
            file=sys.stderr,
        )
