"""The HTTP server: OpenAI's completions and chat completions over a batch, its state and its metrics.

```
POST /v1/completions  /v1/chat/completions
GET  /v1/models  /v1/models/ID  /server_info  /metrics  /health
```

If a key is set, every route except /health requires it. A request becomes one row of the batch per choice.
Its rows are cancelled together when the client disconnects, streaming or not, or if one of them fails."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from yggdrasil.errors import YggError
from yggdrasil.serve.body import read_body
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.hosts import HostNames
from yggdrasil.serve.metrics import CONTENT_TYPE_LATEST, Metrics
from yggdrasil.serve.middleware import AuthMiddleware, answer_error
from yggdrasil.serve.openai import ApiError, ChatRequest, CompletionRequest, WireRequest
from yggdrasil.serve.prompts import PromptEncoder
from yggdrasil.serve.replies import ChatReply, CompletionReply, Reply, merge
from yggdrasil.serve.request import DEFECT, Event, Request
from yggdrasil.tokenizer import Tokenizer

__all__ = ["BatchService", "Rows", "Serving", "create_app"]

HEALTH_CHECK_S = 2.0

router = APIRouter()


class BatchService(Protocol):
    """The part of a service that this module uses."""

    def submit(self, request: Request) -> Any:
        """Queue a request; returns its ticket."""
        ...

    def cancel(self, ticket: Any) -> None:
        """End a request early."""
        ...

    def info(self) -> dict[str, Any]:
        """State in JSON values; may wait for a step."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether the service runs."""
        ...


@dataclass(kw_only=True)
class Serving:
    """What the routes share.

    Args:
        service: Decodes the requests.
        metrics: Also the service's observer.
        model: Name of the model for clients.
        max_context: Largest number of tokens of prompt and output together.
        vocab: V: the token ids of both models go from 0 to V - 1.
        max_rows: Largest number of choices of one HTTP request.
        api_key: Required of clients; empty requires none.
        hosts: Host names that clients without a key may use.

    Attributes:
        is_draining: Set while new requests are refused.
    """

    service: BatchService
    tokenizer: Tokenizer
    template: ChatTemplate
    metrics: Metrics
    model: str
    max_context: int
    vocab: int
    max_rows: int
    api_key: str = ""
    hosts: HostNames = field(default_factory=HostNames)
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def encoder(self) -> PromptEncoder:
        """Turns prompts into tokens."""
        return PromptEncoder(self.tokenizer, self.template, self.max_context, self.vocab)


def create_app(serving: Serving) -> FastAPI:
    """Build the ASGI application."""
    app = FastAPI(title="Yggdrasil", openapi_url=None, redirect_slashes=False)
    app.state.serving = serving
    app.include_router(router)
    app.add_middleware(
        AuthMiddleware, api_key=serving.api_key, hosts=serving.hosts, metrics=serving.metrics
    )
    for kind in (ApiError, YggError, HTTPException, Exception):
        app.add_exception_handler(kind, partial(answer_error, metrics=serving.metrics))
    return app


class Rows:
    """The rows of one HTTP request: their submission, their events and their cancellation."""

    def __init__(self, service: BatchService) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._received: asyncio.Queue[tuple[int, Event] | ApiError | None] = asyncio.Queue()
        self._tickets: dict[int, Any] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all requests; if one is refused, `close` cancels those before it."""
        for index, request in enumerate(requests):
            self._tickets[index] = self._service.submit(
                replace(request, on_event=partial(self._receive, index))
            )

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Every event with the index of its row, until all rows have ended or the client disconnects.

        Raises:
            ApiError: a row failed, or the service died.
        """
        while self._tickets:
            received = await self._received.get()
            if received is None:
                return
            if isinstance(received, ApiError):
                raise received
            index, event = received
            if event.finish is not None:
                del self._tickets[index]
            if event.finish == "error":
                raise ApiError(500, event.error or "decoding failed")
            if event.finish == "cancelled":  # not by `close`, after which no events are read
                raise ApiError(503, "the server is shutting down")
            yield index, event

    async def watch(self, http: HttpRequest) -> None:
        """End `events` as soon as the client disconnects or the service dies."""
        while True:
            try:
                async with asyncio.timeout(HEALTH_CHECK_S):
                    if (await http.receive())["type"] == "http.disconnect":
                        return self._received.put_nowait(None)
            except TimeoutError:
                if not self._service.is_healthy:
                    error = ApiError(500, "the decoding thread has died; see the server's log")
                    return self._received.put_nowait(error)

    def close(self) -> None:
        """Cancel the rows that have not ended."""
        for ticket in self._tickets.values():
            self._service.cancel(ticket)
        self._tickets.clear()

    def _receive(self, index: int, event: Event) -> None:
        """Called in the service's thread."""
        with suppress(RuntimeError):  # the loop is closed, so no one waits for events
            self._loop.call_soon_threadsafe(self._received.put_nowait, (index, event))


def _serving(http: HttpRequest) -> Serving:
    serving: Serving = http.app.state.serving
    return serving


async def _rows(http: HttpRequest) -> AsyncIterator[Rows]:
    """Rows that are always closed after the response: a stream may be cancelled before its first event."""
    serving = _serving(http)
    if serving.is_draining:
        raise ApiError(503, "the server is shutting down", headers={"Retry-After": "10"})
    rows = Rows(serving.service)
    watch = asyncio.create_task(rows.watch(http))
    try:
        yield rows
    finally:
        watch.cancel()
        rows.close()


CompletionBody = Annotated[CompletionRequest, Depends(read_body(CompletionRequest))]
ChatBody = Annotated[ChatRequest, Depends(read_body(ChatRequest))]
RowsOfRequest = Annotated[Rows, Depends(_rows)]  # after the body: `watch` reads all later messages


@router.post("/v1/completions")
async def completions(http: HttpRequest, body: CompletionBody, rows: RowsOfRequest) -> Response:
    """Continue prompts."""
    serving = _serving(http)
    prompts = await _begin(serving, body, rows)
    reply = CompletionReply(body, serving.model, serving.tokenizer, prompts)
    return await _respond(reply, body, rows)


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest, body: ChatBody, rows: RowsOfRequest) -> Response:
    """Answer a conversation."""
    serving = _serving(http)
    prompts = await _begin(serving, body, rows)
    reply = ChatReply(body, serving.model, serving.tokenizer, prompts)
    return await _respond(reply, body, rows)


async def _begin(serving: Serving, body: WireRequest, rows: Rows) -> list[list[int]]:
    _check_model(serving, body.model or serving.model)
    body.check_rows(serving.max_rows)
    prompts = await run_in_threadpool(body.prompts, serving.encoder)  # megabytes of text take seconds
    rows.submit(body.requests(prompts, max_context=serving.max_context))
    return prompts


async def _respond(reply: Reply, body: WireRequest, rows: Rows) -> Response:
    if body.stream:
        stream = _stream(reply, body, rows)
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
    received: dict[int, list[Event]] = {}
    async for index, event in rows.events():
        reply.count(event)
        received.setdefault(index, []).append(event)
    if not all(events[-1].finish for events in received.values()):
        return Response(status_code=499)  # the client has disconnected and does not read this
    return JSONResponse(reply.whole([merge(received[index]) for index in sorted(received)]))


async def _stream(reply: Reply, body: WireRequest, rows: Rows) -> AsyncIterator[str]:
    try:
        async for index, event in rows.events():
            reply.count(event)
            if event.text or event.log_probs or event.finish:
                yield _sse(reply.chunk(index, event))
        if body.include_usage:
            yield _sse(reply.last_chunk())
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status line is already sent, so the error goes into the stream
        yield _sse(error.body)
    except Exception:
        logging.getLogger(__name__).exception("a stream failed")
        yield _sse(ApiError(500, DEFECT).body)


def _sse(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


@router.get("/v1/models")
async def models(http: HttpRequest) -> Response:
    """List the only model."""
    return JSONResponse({"object": "list", "data": [_model_card(_serving(http))]})


@router.get("/v1/models/{model:path}")
async def model(http: HttpRequest, model: str) -> Response:
    """Describe the model by its name."""
    _check_model(_serving(http), model)
    return JSONResponse(_model_card(_serving(http)))


@router.get("/health")
async def health(http: HttpRequest) -> Response:
    """200 while requests are accepted, else 503."""
    serving = _serving(http)
    state = "draining" if serving.is_draining else "ok" if serving.service.is_healthy else "failed"
    return JSONResponse({"status": state}, 200 if state == "ok" else 503)


@router.get("/server_info")
async def server_info(http: HttpRequest) -> Response:
    """State of the batch and the policy; SGLang's clients read it in `internal_states`."""
    serving = _serving(http)
    if not serving.service.is_healthy:
        raise ApiError(503, "the decoding thread is not running")
    info = await run_in_threadpool(serving.service.info)
    card = {"model": serving.model, "chat_template": "model" if serving.template.is_own else "plain"}
    return JSONResponse({**card, **info, "internal_states": [info]})


@router.get("/metrics")
async def metrics(http: HttpRequest) -> Response:
    """Metrics for Prometheus."""
    return Response(_serving(http).metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _model_card(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model,
        "object": "model",
        "created": serving.created,
        "owned_by": "yggdrasil",
        "max_model_len": serving.max_context,
    }


def _check_model(serving: Serving, name: str) -> None:
    if name != serving.model:
        message = f"there is no model {name!r}; this server has {serving.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
