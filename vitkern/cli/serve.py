"""Serve predictions and embeddings over HTTP, with a page to drop pictures on.

POST a picture to /predict or /embed, as the body itself or as a form's file; /openapi.json says it
all. Requests are computed in batches, whose make-up changes no bit of an answer. Listens on this
machine alone unless --host says otherwise. SIGTERM and Ctrl-C answer what was accepted, then stop.

  vitkern serve
  vitkern serve --weights deit_tiny.safetensors --labels imagenet.json --precision bf16 --port 8080
  curl --data-binary @cat.jpg 'http://127.0.0.1:8000/predict?top=3'
"""

from __future__ import annotations

import argparse
import os
import sys

from . import predict

MIB = 1 << 20


def arguments(parser: argparse.ArgumentParser) -> None:
    predict.model_arguments(parser)
    parser.add_argument("--precision", choices=predict.PRECISIONS, default="fp32")
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
    options = Options(
        Settings(given.max_batch, given.max_wait_ms / 1e3, given.queue),
        Limits(given.max_bytes, given.max_pixels),
        given.threads if given.threads is not None else threads(),
        given.decoders,
    )
    bound = server.listen(given.host, given.port)  # before the weights: a taken port shows at once
    with bound:
        service = Service(predict.open_predictor(given), options)
        bound.listen(server.BACKLOG)  # now that requests can be answered
        address = server.address_of(bound)
        print(
            f"vitkern serve: {service.predictor.title} in {given.precision} on {address}"
            f" ({options.threads} threads, batches of up to {given.max_batch}); Ctrl-C stops",
            flush=True,
        )
        if not server.is_loopback(bound):
            print(
                f"vitkern serve: whoever reaches {address} may use it: there is no authentication",
                file=sys.stderr,
            )
        return server.run(
            service, bound, stop_seconds=given.stop_seconds, access_log=given.access_log
        )
