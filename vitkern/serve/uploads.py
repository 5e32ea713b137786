"""A request's body as a picture: how many bytes, which part of a form, how many pixels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from .. import image_files
from ..image_files import TooManyPixels
from ..predictor import Predictor
from .forwards import Work
from .problems import Refusal

FORM = "multipart/form-data"
FORM_ROOM = 16 << 10  # bytes of a form around its file
# curl --data-binary says the second unless it is told otherwise.
RAW = ("application/octet-stream", "application/x-www-form-urlencoded", "")
NAME = "the picture"  # in errors: what a client calls its file is not repeated


class Limits(NamedTuple):
    """What a request may bring."""

    max_bytes: int = 20 << 20
    max_pixels: int = 40_000_000  # 120 MB as RGB
    seconds: float = 30.0  # for the whole body

    def check(self) -> None:
        """A ValueError that names the command's option."""
        if self.max_bytes < 1:
            raise ValueError(f"--max-bytes {self.max_bytes}: expected at least one byte")
        if not 1 <= self.max_pixels <= image_files.LARGEST_PIXELS:
            most = image_files.LARGEST_PIXELS
            raise ValueError(f"--max-pixels {self.max_pixels}: expected 1 to {most}")
        if self.seconds <= 0:
            raise ValueError(f"--body-seconds {self.seconds:g}: expected more than 0")


class Picture(NamedTuple):
    """Pixels (3, Y, X) as the model takes them, and the size (width, height) of the upright
    picture."""

    work: Work
    size: tuple[int, int]


async def read(request: Request, limits: Limits) -> bytes:
    """The file in a request's body; a Refusal says what is wrong, ClientDisconnect that nobody
    waits any more."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    form = kind == FORM
    if not (form or kind in RAW or kind.startswith("image/")):
        raise Refusal(415, "media_type", f"{kind!r:.60} holds no picture: send image/... or a form")
    most = limits.max_bytes + (FORM_ROOM if form else 0)
    try:
        content = await asyncio.wait_for(_at_most(request, most, limits.max_bytes), limits.seconds)
    except asyncio.TimeoutError:
        raise Refusal(
            408, "slow_body", f"the body did not come within {limits.seconds:g} s: send it again"
        ) from None
    if form:
        content = await _file_of(request, content)
    if len(content) > limits.max_bytes:
        raise _too_many_bytes(limits.max_bytes)
    if not content:
        raise Refusal(400, "empty", "the body is empty: send a picture in it")
    return content


async def _at_most(request: Request, most: int, named: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_many_bytes(named)
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise _too_many_bytes(named)
    return bytes(content)


def _too_many_bytes(most: int) -> Refusal:
    return Refusal(413, "too_many_bytes", f"more than {most:,} bytes: scale the picture down")


class _InMemory(MultiPartParser):
    """Starlette's parser without its temporary files: the body is in memory already."""

    spool_max_size = 0  # of SpooledTemporaryFile: never written to disk


async def _file_of(request: Request, content: bytes) -> bytes:
    """The one file of a form."""

    async def whole() -> AsyncGenerator[bytes, None]:
        yield content

    try:
        parser = _InMemory(request.headers, whole(), max_files=1, max_fields=8)
        form = await parser.parse()
    except MultiPartException as error:
        raise Refusal(400, "bad_form", f"not a form with one file: {error.message}") from error
    for _, part in form.multi_items():
        if isinstance(part, UploadFile):
            try:
                return await part.read()
            finally:
                await part.close()
    raise Refusal(400, "bad_form", "the form has no file: send the picture as a part with filename")


def decode(content: bytes, predictor: Predictor, limits: Limits) -> Picture:
    """The picture of a file's bytes: its header is judged before its pixels are decoded."""
    try:
        image = image_files.decode(content, NAME, limits.max_pixels)
    except TooManyPixels as error:
        raise Refusal(413, "too_many_pixels", str(error)) from error
    except ValueError as error:
        raise Refusal(422, "not_a_picture", str(error)) from error
    except MemoryError as error:
        raise Refusal(413, "too_many_pixels", f"{NAME} does not fit into memory") from error
    return Picture(Work(predictor.prepared(image)), image.size)


__all__ = ["ClientDisconnect", "Limits", "Picture", "decode", "read"]
