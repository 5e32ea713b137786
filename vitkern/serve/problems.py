"""Errors as every client sees them: a status, a word for programs, a sentence for people."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from .batching import Closed, Full

if TYPE_CHECKING:
    from fastapi import FastAPI

LOG = logging.getLogger("vitkern.serve")
GONE = 499  # nobody reads it but the metrics: the client closed the connection
STOP_RETRY = 5  # seconds: a restart of a small model takes that long
WORDS = {404: "not_found", 405: "method_not_allowed", 500: "failed"}


class Refusal(Exception):
    """An error that is the request's own."""

    def __init__(self, status: int, error: str, message: str, retry: int = 0) -> None:
        super().__init__(message)
        self.status, self.error, self.message, self.retry = status, error, message, retry

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(self.retry)} if self.retry else None
        content = {"error": self.error, "message": self.message}
        return JSONResponse(content, self.status, headers)


def of_queue(error: Full | Closed) -> Refusal:
    """What a full or closed queue means to a client."""
    if isinstance(error, Full):
        return Refusal(429, "queue_full", str(error), error.retry)
    return Refusal(503, "stopping", str(error), STOP_RETRY)


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return error.response()


def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    said = [
        f"{'.'.join(map(str, one['loc'][1:])) or one['loc'][0]}: {one['msg']}"
        for one in error.errors()
    ]
    return Refusal(422, "parameter", "; ".join(said)[:1000]).response()


def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    word = WORDS.get(error.status_code, "http")
    response = Refusal(error.status_code, word, f"{error.detail}").response()
    response.headers.update(error.headers or {})
    return response


def _failed(_: Request, error: Exception) -> JSONResponse:
    return Refusal(500, "failed", "the server failed: its log says why").response()


def install(app: FastAPI) -> None:
    """Make every error of an app a Problem."""
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _failed)
