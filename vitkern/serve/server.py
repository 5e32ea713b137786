"""The server's life: a socket, signals, and a stop that answers what was accepted."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import sys
import time
import urllib.parse
from types import FrameType

import uvicorn

from .app import Service

LINGER = 0.5  # seconds that new requests are told of the stop before the socket closes
POLL = 0.02  # seconds
BACKLOG = 1024  # connections that the system holds until they are looked at


class Server(uvicorn.Server):
    """Stops in three steps at the first SIGTERM or SIGINT: refuse (503), answer, close.

    A second signal stops at once.
    """

    def __init__(self, service: Service, config: uvicorn.Config, stop_seconds: float) -> None:
        super().__init__(config)
        self._service, self._stop_seconds = service, stop_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain is not None or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_to_stop)

    def _begin_to_stop(self) -> None:
        if self._drain is None:
            self._service.batcher.close()
            self._drain = asyncio.ensure_future(self._until_answered())

    async def _until_answered(self) -> None:
        begin = time.monotonic()
        while (gone := time.monotonic() - begin) < self._stop_seconds:
            if gone >= LINGER and not self._service.unsent:
                break
            await asyncio.sleep(POLL)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; an OSError that says what to change."""
    if not 0 <= port <= 65535:  # which the C library would cut to 16 bits
        raise ValueError(f"--port {port}: expected 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(f"--host {host}: no such address ({error.strerror})") from error
    family, kind, protocol, _, address = found[0]
    # asyncio turns Nagle's delay off where the socket says that it is TCP: 40 ms an answer.
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        do = "choose another --port" if error.errno == errno.EADDRINUSE else "choose another --host"
        raise OSError(f"{host}:{port}: {error.strerror}: {do}") from error
    return made


def address_of(bound: socket.socket) -> str:
    """http://host:port"""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether http://host:port is reached from this machine alone."""
    host = urllib.parse.urlsplit(address).hostname or ""
    return ipaddress.ip_address(host.split("%")[0]).is_loopback


def run(
    service: Service, bound: socket.socket, *, stop_seconds: float = 30.0, access_log: bool = False
) -> int:
    """Serve until a signal: 0 if everything that was accepted has been answered."""
    config = uvicorn.Config(
        service,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        timeout_graceful_shutdown=1,  # after the stop has waited already
        ws="none",
        backlog=BACKLOG,
    )
    try:
        Server(service, config, stop_seconds).run([bound])
    finally:
        ended = service.stop(1.0)
    lost = service.accepted - service.answered - service.dropped
    print(
        f"vitkern serve: stopped; {service.accepted} accepted, {service.answered} answered,"
        f" {service.dropped} left by their clients, {lost} lost",
        file=sys.stderr,
    )
    return 0 if ended and not lost else 1
