"""The HTTP server: OpenAI's completions and chat completions over a batch, its state and its metrics.

```
POST /v1/completions  /v1/chat/completions                             here
POST /v1/responses                                                     here, responses.py
POST /tokenize  /detokenize                                            texts.py
GET  /v1/models  /v1/models/ID  /server_info  /metrics  /version       status.py
GET  /health  /ping    POST /ping                                      status.py
POST /admin/speculation                                                admin.py
GET  /docs  /openapi.json                                              describe.py
GET  /  /page/app.js  /page/style.css                                  web.py
```

If a key is set, every route except /health, /ping and the files of the page requires it. A request becomes
one row of the batch per choice. Its rows are cancelled together when the client disconnects, streaming or
not, or if one of them fails."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import yggdrasil
from yggdrasil.config import GrammarConfig
from yggdrasil.errors import ConfigError, UsageError, YggError
from yggdrasil.serve import admin, describe, status, texts
from yggdrasil.serve.access import REQUEST_ID, Access, AccessLog, access_of
from yggdrasil.serve.body import checked, read_body
from yggdrasil.serve.describe import body_of
from yggdrasil.serve.middleware import OPEN_PATHS, AuthMiddleware, answer_error
from yggdrasil.serve.openai import ChatRequest, CompletionRequest, WireRequest
from yggdrasil.serve.replies import ChatReply, CompletionReply, Reply, merge
from yggdrasil.serve.request import DEFECT, Event, Request
from yggdrasil.serve.responses import RENAMED, Answer, ResponsesRequest
from yggdrasil.serve.serving import BatchService, Serving, serving_of
from yggdrasil.serve.web import PAGE_PATHS, page_router
from yggdrasil.serve.wire import ApiError

__all__ = ["Rows", "create_app"]

HEALTH_CHECK_S = 2.0
MOST_PARTS_S = 2.0  # after which no other part of a grammar is tried, to name the wrong one

Result = TypeVar("Result")

router = APIRouter()


def create_app(serving: Serving) -> ASGIApp:
    """Build the application; the log is around it, so that refusals and defects have a line, too."""
    app = FastAPI(
        title="Yggdrasil", version=yggdrasil.__version__, openapi_url=None, redirect_slashes=False
    )
    app.state.serving = serving
    for routes in (router, texts.router, status.router, admin.router, describe.router):
        app.include_router(routes)
    if serving.page:
        app.include_router(page_router())
    app.add_middleware(
        AuthMiddleware,
        api_key=serving.api_key,
        hosts=serving.hosts,
        metrics=serving.metrics,
        open_paths=(*OPEN_PATHS, *PAGE_PATHS) if serving.page else OPEN_PATHS,
    )
    if serving.allow_origins:  # outermost: a browser asks for permission without the key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=serving.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    for kind in (ApiError, YggError, HTTPException, Exception):
        app.add_exception_handler(kind, partial(answer_error, metrics=serving.metrics))
    return AccessLog(app, serving.log)


class Rows:
    """The rows of one HTTP request: their submission, their events and their cancellation.

    Attributes:
        has_left: The client has disconnected.
    """

    def __init__(self, service: BatchService, access: Access) -> None:
        self.has_left = False
        self._service = service
        self._access = access
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
            self._access.output_tokens += len(event.tokens)
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
                        self.has_left = True
                        return self._received.put_nowait(None)
            except TimeoutError:
                if not self._service.is_healthy:
                    error = ApiError(500, "the decoding thread has died; see the server's log")
                    return self._received.put_nowait(error)

    @property
    def are_done(self) -> bool:
        """Whether every row has ended."""
        return not self._tickets

    def close(self) -> None:
        """Cancel the rows that have not ended."""
        for ticket in self._tickets.values():
            self._service.cancel(ticket)
        self._tickets.clear()

    def _receive(self, index: int, event: Event) -> None:
        """Called in the service's thread."""
        with suppress(RuntimeError):  # the loop is closed, so no one waits for events
            self._loop.call_soon_threadsafe(self._received.put_nowait, (index, event))


async def _rows(http: HttpRequest) -> AsyncIterator[Rows]:
    """Rows that are always closed after the response: a stream may be cancelled before its first event."""
    serving = serving_of(http)
    if serving.is_draining:
        raise ApiError(503, "the server is shutting down", headers={"Retry-After": "10"})
    rows = Rows(serving.service, access_of(http))
    watch = asyncio.create_task(rows.watch(http))
    try:
        yield rows
    finally:
        watch.cancel()
        rows.close()


CompletionBody = Annotated[CompletionRequest, Depends(read_body(CompletionRequest))]
ChatBody = Annotated[ChatRequest, Depends(read_body(ChatRequest))]
ResponsesBody = Annotated[ResponsesRequest, Depends(read_body(ResponsesRequest))]
RowsOfRequest = Annotated[Rows, Depends(_rows)]  # after the body: `watch` reads all later messages


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
async def completions(http: HttpRequest, body: CompletionBody, rows: RowsOfRequest) -> Response:
    """Continue prompts."""
    serving = serving_of(http)
    prompts = await _begin(http, body, rows)
    reply = CompletionReply(body, serving.model, serving.tokenizer, prompts)
    return await _respond(reply, body, rows)


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
async def chat_completions(http: HttpRequest, body: ChatBody, rows: RowsOfRequest) -> Response:
    """Answer a conversation."""
    serving = serving_of(http)
    prompts = await _begin(http, body, rows)
    return await _respond(_chat_reply(serving, body, prompts), body, rows)


@router.post("/v1/responses", openapi_extra=body_of(ResponsesRequest))
async def responses(http: HttpRequest, body: ResponsesBody, rows: RowsOfRequest) -> Response:
    """Answer a conversation, in the form of OpenAI's newer interface; nothing is stored."""
    serving = serving_of(http)
    chat = checked(body.chat, RENAMED)
    prompts = await _begin(http, chat, rows)
    answer = Answer(body, _chat_reply(serving, chat, prompts), serving.model, serving.defaults)
    if body.stream:
        return _event_stream(_events(answer, rows))
    received = [event async for _, event in rows.events()]
    if not rows.are_done:
        return Response(status_code=499)  # the client has disconnected and does not read this
    return JSONResponse(answer.whole(received))


def _chat_reply(serving: Serving, body: ChatRequest, prompts: Sequence[Sequence[int]]) -> ChatReply:
    form = serving.form
    wants_reasoning = serving.reasoning_parser is not None or body.include_reasoning is not None
    return ChatReply(
        body,
        serving.model,
        serving.tokenizer,
        prompts,
        form if body.may_call(form) else None,
        separates_reasoning=wants_reasoning and body.has_free_text(form),
    )


async def _begin(http: HttpRequest, body: WireRequest, rows: Rows) -> list[list[int]]:
    serving = serving_of(http)
    serving.check_model(body.model or serving.model)
    body.check_rows(serving.max_rows)
    prompts, requests, grammar = await run_in_threadpool(_requests, body, serving)
    access_of(http).prompt_tokens = sum(map(len, prompts))
    if grammar is not None and not serving.service.knows(grammar):
        async with serving.compiling:
            if rows.has_left:
                raise ApiError(499, "the client has disconnected")  # and does not read this
            await run_in_threadpool(_prepare, serving.service, grammar, body)
    rows.submit(requests)
    return prompts


def _requests(
    body: WireRequest, serving: Serving
) -> tuple[list[list[int]], list[Request], GrammarConfig | None]:
    """The prompts, the rows and the grammar of a request; megabytes of text take seconds."""
    prompts = body.prompts(serving.encoder)
    grammar = body.grammar(serving.form)
    requests = body.requests(
        prompts,
        max_context=serving.max_context,
        template=serving.template,
        spellings=serving.tokenizer.spellings,
        defaults=serving.defaults,
        grammar=grammar,
    )
    return prompts, requests, grammar


def _prepare(service: BatchService, grammar: GrammarConfig, body: WireRequest) -> None:
    """Compile the grammar of a request; an error names the field, or the part that has it alone, too."""
    try:
        service.prepare(grammar)
    except ConfigError as error:
        field, fault = _faulty_part(service, body) or (body.grammar_field, error)
        param = field.partition("[")[0]
        raise ApiError(400, f"{field}: {fault}", param=param, code="invalid_grammar") from None
    except YggError as error:  # this server has no grammars, or it failed
        status = 400 if isinstance(error, UsageError) else 500
        raise ApiError(status, f"{body.grammar_field}: {error}", param=body.grammar_field) from None


def _faulty_part(service: BatchService, body: WireRequest) -> tuple[str, ConfigError] | None:
    """The first part of a grammar that does not compile alone, if it is found in time, and its error."""
    deadline = monotonic() + MOST_PARTS_S
    for field, part in body.grammar_parts:
        if monotonic() > deadline:
            break
        try:
            service.check(part)
        except ConfigError as error:
            return field, error
    return None


async def _respond(reply: Reply, body: WireRequest, rows: Rows) -> Response:
    if body.stream:
        return _event_stream(_stream(reply, body, rows))
    received: dict[int, list[Event]] = {}
    async for index, emitted in rows.events():
        event = body.returned(emitted)
        reply.count(event)
        received.setdefault(index, []).append(event)
    if not rows.are_done:
        return Response(status_code=499)  # the client has disconnected and does not read this
    merged = [merge(received[index]) for index in sorted(received)]
    has_scores = body.num_top is not None or body.prompt_top is not None
    return await _computed(lambda: JSONResponse(reply.whole(merged)), has_scores)


async def _computed(compute: Callable[[], Result], is_long: bool) -> Result:
    """The result, computed in a thread if it is long: spelling tokens with scores takes seconds."""
    return await run_in_threadpool(compute) if is_long else compute()


def _event_stream(stream: AsyncIterator[str]) -> Response:
    headers = {"Cache-Control": "no-cache"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def _stream(reply: Reply, body: WireRequest, rows: Rows) -> AsyncIterator[str]:
    try:
        async for index, emitted in rows.events():
            event = body.returned(emitted)
            reply.count(event)
            if event.text or event.log_probs or event.prompt_log_probs or event.finish or event.tree:
                chunks = partial(reply.chunks, index, event)
                for chunk in await _computed(chunks, bool(event.prompt_log_probs)):
                    yield _sse(chunk)
        if body.include_usage:
            yield _sse(reply.last_chunk())
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status line is already sent, so the error goes into the stream
        yield _sse(error.body)
    except Exception:
        logging.getLogger(__name__).exception("a stream failed")
        yield _sse(ApiError(500, DEFECT).body)


async def _events(answer: Answer, rows: Rows) -> AsyncIterator[str]:
    """The stream of a response; every event has its type as its name, too."""
    try:
        for event in answer.begin():
            yield _named(event)
        async for _, emitted in rows.events():
            for event in answer.push(emitted):
                yield _named(event)
        if rows.are_done:
            for event in answer.end():
                yield _named(event)
    except ApiError as error:  # the status line is already sent, so the error goes into the stream
        yield _named({"type": "error", **error.body})
    except Exception:
        logging.getLogger(__name__).exception("a stream failed")
        yield _named({"type": "error", **ApiError(500, DEFECT).body})


def _named(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\n{_sse(event)}"


def _sse(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"
