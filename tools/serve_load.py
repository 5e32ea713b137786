"""Load a `vitkern serve` on this machine: requests a second, latency, and the batches it made.

    python tools/serve_load.py --clients 1,8 --seconds 5
    python tools/serve_load.py --weights deit_tiny.safetensors --model Ti/16 --clients 8

Starts the server twice on the loopback, gathering batches (--max-batch 8) and one by one
(--max-batch 1), and asks each with so many clients at once. A client sends its next picture when it
has the last one's answer. The pictures are JPEGs of noise, --side pixels wide and high. Counts and
times are bounded (--seconds, at most --requests a row), and nothing leaves this machine.
"""

from __future__ import annotations

import argparse
import http.client
import io
import re
import subprocess
import sys
import threading
import time
from typing import NamedTuple

WARM_UP = 0.5  # seconds that are not counted


class Row(NamedTuple):
    """What some clients saw of one server."""

    rate: float  # requests a second
    p50: float  # milliseconds
    p99: float
    batch: float  # mean images of a batch
    refused: int

    def __str__(self) -> str:
        return (
            f"{self.rate:9.1f} {self.p50:9.1f} {self.p99:9.1f} {self.batch:7.1f} {self.refused:8d}"
        )


class Server:
    """`vitkern serve` in a process of its own on a free port."""

    def __init__(self, options: list[str]) -> None:
        command = [sys.executable, "-m", "vitkern", "serve", "--port", "0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = re.search(r":(\d+) ", self._process.stdout.readline())
        if not found:
            raise SystemExit("the server did not start: its message is above")
        self.port = int(found[1])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def batches(self) -> tuple[float, float]:
        """(images, batches) so far."""
        connection = self.connect()
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found = [
            re.search(rf"^vitkern_batch_size_{what} (\S+)$", text, re.M)
            for what in ("sum", "count")
        ]
        images, batches = (float(one[1]) if one else 0.0 for one in found)
        return images, batches


def pictures(side: int, count: int = 16) -> list[bytes]:
    from PIL import Image

    files = []
    for _ in range(count):
        file = io.BytesIO()
        Image.effect_noise((side, side), 60).convert("RGB").save(file, "JPEG", quality=85)
        files.append(file.getvalue())
    return files


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def load(server: Server, files: list[bytes], clients: int, seconds: float, most: int) -> Row:
    """Ask for so long, or so often, whichever is first."""
    times: list[float] = []
    refused, lock = [0], threading.Lock()
    begin = time.perf_counter() + WARM_UP
    end = begin + seconds

    def client(k: int) -> None:
        connection, i = server.connect(), k
        while (start := time.perf_counter()) < end and len(times) < most:
            i += 1
            content = files[i % len(files)]
            connection.request("POST", "/predict", content, {"content-type": "image/jpeg"})
            answer = connection.getresponse()
            answer.read()
            took = time.perf_counter() - start
            with lock:
                if answer.status != 200:
                    refused[0] += 1
                elif start >= begin:
                    times.append(took)
        connection.close()

    before = server.batches()
    threads = [threading.Thread(target=client, args=(k,)) for k in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lasted = time.perf_counter() - begin
    images, batches = (b - a for a, b in zip(before, server.batches(), strict=True))
    if not times:
        raise SystemExit(f"no request was answered within {seconds:g} s: ask for more --seconds")
    shares = [1e3 * percentile(times, share) for share in (0.5, 0.99)]
    return Row(len(times) / lasted, *shares, images / max(batches, 1.0), refused[0])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", metavar="FILE", help="as of vitkern serve")
    parser.add_argument("--model", metavar="NAME")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--clients", default="1,8", metavar="N,N,...", help="at once (1,8)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row (5)")
    parser.add_argument("--requests", type=int, default=5000, help="of each row at most (5000)")
    parser.add_argument("--side", type=int, default=256, help="pixels of the pictures (256)")
    parser.add_argument("--batches", default="8,1", metavar="B,B,...", help="--max-batch (8,1)")
    given = parser.parse_args(arguments)
    options = ["--precision", given.precision]
    for name in ("weights", "model", "threads"):
        value = getattr(given, name)
        options += [] if value is None else [f"--{name}", str(value)]
    files = pictures(given.side)
    print("max-batch  clients  requests/s    p50 ms    p99 ms   batch  refused")
    for most in map(int, given.batches.split(",")):
        with Server([*options, "--max-batch", str(most)]) as server:
            for clients in map(int, given.clients.split(",")):
                row = load(server, files, clients, given.seconds, given.requests)
                print(f"{most:9d} {clients:8d}   {row}", flush=True)


if __name__ == "__main__":
    main()
