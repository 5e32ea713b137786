"""The app: addresses, what they take and answer, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from fastapi import FastAPI, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from .. import __version__, image_files
from ..predictor import Predictor
from . import problems, schemas, uploads
from .batching import Batcher, Closed, Full, Settings, Ticket
from .forwards import Answer, BadWeights, Forwards, normalised
from .metrics import CONTENT_TYPE, Counting, Metrics
from .problems import GONE, LOG, Refusal
from .uploads import Limits

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

DECODERS = 2  # threads; Pillow lets go of Python's lock while it decodes
ACCEPTED = "vitkern.accepted"  # in the scope of a request that got a ticket
PAGE = pathlib.Path(__file__).parent / "page"
# The page loads nothing from elsewhere, and nothing typed into it can run.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PAGE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}


class Options(NamedTuple):
    """How a service runs."""

    batching: Settings = Settings()
    limits: Limits = Limits()
    threads: int | None = None  # of the engine; None: as many as a call of the library takes
    decoders: int = DECODERS


class Service:
    """A model behind HTTP: an ASGI app with the thread and the pool that work for it."""

    def __init__(self, predictor: Predictor, options: Options | None = None) -> None:
        options = options or Options()
        self.check(options)
        self.predictor, self.options = predictor, options
        self.metrics = Metrics(lambda: self.batcher.waiting)
        # Tickets given, those whose request got an answer or an error, those whose client left.
        self.accepted = self.answered = self.dropped = 0
        self.unsent = 0  # accepted requests whose answer is not on its way yet
        self._reading = 0
        self._decoders = ThreadPoolExecutor(
            options.decoders, "vitkern-decoder", initializer=torch.set_num_threads, initargs=(1,)
        )
        # All of them begin now: a thread's number is also the default of those that come later.
        list(self._decoders.map(lambda _: None, range(options.decoders)))
        self.forwards = Forwards(predictor, options.threads)
        self.batcher = Batcher(
            self.forwards, options.batching, self.metrics.batch, self.forwards.begin
        )
        self.app = _app(self)
        self._outermost = Counting(self.app, self.metrics, lambda: self.batcher.closed)

    @staticmethod
    def check(options: Options) -> None:
        """A ValueError that names the command's option, where one cannot be."""
        options.limits.check()
        options.batching.check()
        if options.decoders < 1:
            raise ValueError(f"--decoders {options.decoders}: at least one thread must decode")
        if options.threads is not None and options.threads < 1:
            raise ValueError(f"--threads {options.threads}: the engine needs at least one")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._outermost(scope, receive, send)
        finally:
            self.unsent -= ACCEPTED in scope

    def stop(self, seconds: float = 30.0) -> bool:
        """Refuse what is new, compute what was accepted: whether that ended in time."""
        self.batcher.close()
        ended = self.batcher.stop(seconds)
        self._decoders.shutdown(wait=ended, cancel_futures=True)
        return ended

    # ---- one request ----

    async def answer(
        self, request: Request, pool: str = "", attention: bool = False
    ) -> tuple[Answer, tuple[int, int]]:
        """What the model says of the picture in the body, and that picture's size."""
        try:
            content = await self._body(request)
            with self.batcher.admit() as ticket:
                self.accepted += 1
                self.unsent += 1
                request.scope[ACCEPTED] = True
                return await self._accepted(request, ticket, content, pool, attention)
        except (Full, Closed) as error:
            raise problems.of_queue(error) from error
        except ClientDisconnect as error:
            raise Refusal(GONE, "gone", "the client closed the connection") from error

    async def _accepted(
        self, request: Request, ticket: Ticket, content: bytes, pool: str, attention: bool
    ) -> tuple[Answer, tuple[int, int]]:
        work = asyncio.ensure_future(self._computed(ticket, content, pool, attention))
        try:
            found = await self._unless_gone(request, work)
        except Refusal:
            self.answered += 1
            raise
        except ClientDisconnect:
            self.dropped += 1
            self.metrics.dropped.inc()
            raise
        self.answered += 1
        return found

    async def _body(self, request: Request) -> bytes:
        """Refused before it is read where the queue is full: its bytes would only take memory."""
        self.batcher.check()
        if self._reading >= 2 * self.options.batching.queue:
            raise Refusal(429, "queue_full", "too many uploads at once: try again in 1 s", 1)
        self._reading += 1
        try:
            return await uploads.read(request, self.options.limits)
        finally:
            self._reading -= 1

    async def _computed(
        self, ticket: Ticket, content: bytes, pool: str, attention: bool
    ) -> tuple[Answer, tuple[int, int]]:
        loop = asyncio.get_running_loop()
        picture = await loop.run_in_executor(
            self._decoders, uploads.decode, content, self.predictor, self.options.limits
        )
        work = picture.work._replace(pool=pool, attention=attention)
        try:
            return await asyncio.wrap_future(ticket.submit(work)), picture.size
        except BadWeights as error:
            raise Refusal(500, "bad_weights", str(error)) from error
        except (ValueError, RuntimeError, MemoryError) as error:
            LOG.exception("a batch failed")
            raise Refusal(500, "failed", "the model failed: the server's log says why") from error

    async def _unless_gone(
        self, request: Request, work: asyncio.Future[tuple[Answer, tuple[int, int]]]
    ) -> tuple[Answer, tuple[int, int]]:
        """The work's result; if the client leaves first, the work is cancelled."""
        gone = asyncio.ensure_future(_left(request))
        try:
            both: set[asyncio.Future[Any]] = {work, gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await gone


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


Top = Annotated[int, Query(ge=1, description="how many classes, best first")]


def _app(service: Service) -> FastAPI:
    predictor, options = service.predictor, service.options
    config = predictor.model.config
    app = FastAPI(
        title="vitkern serve",
        version=__version__,
        description="Predictions and embeddings of pictures by a Vision Transformer.",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    problems.install(app)
    taking: dict[str, Any] = {"responses": schemas.PROBLEMS, "openapi_extra": schemas.IMAGE_BODY}

    @app.post("/predict", summary="Name what is on a picture", **taking)
    async def predict(
        request: Request,
        top: Top = 5,
        attention: Annotated[bool, Query(description="show where the model looked")] = False,
    ) -> schemas.Prediction:
        if not predictor.names:
            said = "this model has no classifier, so it names nothing: ask /embed for a vector"
            raise Refusal(422, "no_classifier", said)
        if attention and service.forwards.attention_refusal:
            said = service.forwards.attention_refusal
            raise Refusal(422, "no_attention", f"this model shows no attention: {said}")
        found, size = await service.answer(request, attention=attention)
        best = found.row.topk(min(top, len(predictor.names)))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        seen = None
        if found.attention is not None:
            part = image_files.seen_part(size, config.pixels, predictor.crop)
            seen = schemas.Attention(weights=found.attention.tolist(), part=list(part))
        return schemas.Prediction(
            model=predictor.title,
            top=[schemas.Class(index=i, label=predictor.names[i], probability=p) for p, i in pairs],
            attention=seen,
        )

    @app.post("/embed", summary="Turn a picture into a vector", **taking)
    async def embed(
        request: Request,
        pool: Annotated[
            str | None,
            Query(pattern="^(token|mean)$", description="class token, or mean of the patches"),
        ] = None,
        normalise: Annotated[bool, Query(description="scale the vector to length 1")] = False,
    ) -> schemas.Embedding:
        known = service.forwards.pools
        chosen = pool or known[0]
        if chosen not in known:
            raise Refusal(422, "parameter", "pool: the model has no class token: ask for mean")
        found, _ = await service.answer(request, chosen)
        row = normalised(found.row) if normalise else found.row
        return schemas.Embedding(model=predictor.title, pool=chosen, embedding=row.tolist())

    broken: dict[int | str, Any] = {
        503: {"model": schemas.State, "description": "do not send requests here"}
    }

    def state(good: bool, words: str) -> JSONResponse:
        return JSONResponse({"status": words}, 200 if good else 503)

    @app.get("/health", summary="Whether the process works", responses=broken,
             response_model=schemas.State)  # fmt: skip
    async def health() -> JSONResponse:
        return state(service.batcher.alive, "ok" if service.batcher.alive else "broken")

    @app.get("/ready", summary="Whether new requests are taken", responses=broken,
             response_model=schemas.State)  # fmt: skip
    async def ready() -> JSONResponse:
        good = service.batcher.alive and not service.batcher.closed
        return state(good, "ready" if good else "stopping")

    @app.get("/about", summary="The model and the limits")
    async def about() -> schemas.About:
        return schemas.About(
            model=predictor.title,
            precision=predictor.model.precision or "fp32",
            threads=options.threads or torch.get_num_threads(),
            classes=len(predictor.names),
            pools=list(service.forwards.pools),
            attention=not service.forwards.attention_refusal,
            image_size=list(config.pixels),
            max_batch=options.batching.max_batch,
            max_wait_ms=options.batching.max_wait * 1e3,
            queue=options.batching.queue,
            max_bytes=options.limits.max_bytes,
            max_pixels=options.limits.max_pixels,
        )

    text: dict[int | str, Any] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", summary="Prometheus's text format", responses=text,
             response_class=Response)  # fmt: skip
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    for address, (name, kind) in PAGE_FILES.items():
        _add_page(app, address, (PAGE / name).read_bytes(), kind)
    return app


def _add_page(app: FastAPI, address: str, content: bytes, kind: str) -> None:
    @app.get(address, include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type=kind, headers=PAGE_HEADERS)
