"""`vitkern serve` as a process of its own on the loopback, and clients that count what they got."""

import collections
import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time

from tests.conftest import ROOT

RETRIED = (ConnectionError, http.client.HTTPException, TimeoutError)
# What a client may meet whose server closed the connection: while it connected, wrote or read.
HANG_UPS = {
    "ConnectionRefusedError", "ConnectionAbortedError", "ConnectionResetError", "BrokenPipeError",
    "RemoteDisconnected",
}  # fmt: skip


class Process:
    """A server that was started with some options; `address` is (host, port)."""

    def __init__(self, *options: object, port: int = 0) -> None:
        words = ["serve", "--port", str(port), *map(str, options)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vitkern", *words],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.greeting = self.process.stdout.readline()
        found = re.search(r"http://([\d.]+):(\d+)", self.greeting)
        if not found:
            self.process.kill()
            raise RuntimeError(f"no server: {self.greeting}{self.process.communicate()[1]}")
        self.address = found[1], int(found[2])

    def stop(self, sig: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal: (status, what was said on stderr)."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        _, said = self.process.communicate(timeout=600)
        return self.process.returncode, said

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(ValueError):  # read to its end already
            self.process.communicate()


def post(connection, content: bytes, address: str = "/predict") -> tuple[int, bytes, dict]:
    connection.request("POST", address, content, {"content-type": "image/png"})
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.headers)


class Load:
    """Threads that post pictures over connections of their own until they are told to end."""

    def __init__(self, address, contents, threads: int = 6) -> None:
        self.address, self.contents = address, contents
        self.counts, self.wrong = collections.Counter(), []
        self.end = threading.Event()
        self._lock = threading.Lock()
        self._answers: dict[bytes, bytes] = {}
        self._threads = [threading.Thread(target=self._run, args=(k,)) for k in range(threads)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        for thread in self._threads:
            thread.join(600)

    def _run(self, k: int) -> None:
        connection = http.client.HTTPConnection(*self.address, timeout=300)
        i = k
        while not self.end.is_set():
            i += 1
            content = self.contents[i % len(self.contents)]
            try:
                status, body, headers = post(connection, content)
            except RETRIED as error:
                connection.close()
                self._note(type(error).__name__)
                time.sleep(0.02)
                continue
            self._note(status)
            if status == 200:
                with self._lock:
                    if self._answers.setdefault(content, body) != body:
                        self.wrong.append(i)
            if headers.get("connection") == "close":
                connection.close()

    def _note(self, what: object) -> None:
        with self._lock:
            self.counts[what] += 1

    def until(self, count: int, what: object = 200, seconds: float = 600) -> None:
        """Wait for so many more of these."""
        wanted, end = self.counts[what] + count, time.monotonic() + seconds
        while self.counts[what] < wanted:
            assert time.monotonic() < end, f"only {self.counts}"
            time.sleep(0.01)
