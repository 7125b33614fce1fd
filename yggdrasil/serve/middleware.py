"""Checks before the routes: host, key, size and time of a body; and every error in OpenAI's format."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
from collections.abc import Collection
from contextlib import suppress

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from yggdrasil.errors import CapacityError, ConfigError, QueueFull, ServiceEnded, YggError
from yggdrasil.serve.body import MAX_BODY_BYTES
from yggdrasil.serve.hosts import HostNames
from yggdrasil.serve.metrics import Metrics
from yggdrasil.serve.request import DEFECT
from yggdrasil.serve.wire import ApiError

__all__ = ["BODY_SECONDS", "OPEN_PATHS", "AuthMiddleware", "answer_error"]

BODY_SECONDS = 30.0  # from the end of the headers to the end of the body
MAX_HELD_BYTES = 64 * MAX_BODY_BYTES  # bodies of all requests together
DISCARD_SECONDS = 5.0
MAX_DISCARDED_BYTES = 16 * MAX_BODY_BYTES
OPEN_PATHS = ("/health", "/ping")  # for load balancers, which have no key
CLOSE = {"Connection": "close"}
TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
TOO_SLOW = f"the body did not arrive within {BODY_SECONDS:g} s"
FIELD_NAMES = {"max_new_tokens": "max_tokens", "stop_tokens": "stop_token_ids", "token": "logit_bias"}


class AuthMiddleware:
    """Admits requests that have the key or, if there is no key, name this server as their host.

    Args:
        app: The application that gets admitted requests.
        api_key: Required of clients; empty requires none. With a key any host name is allowed.
        hosts: Names of this server.
        open_paths: Paths that need no key.

    Attributes:
        held_bytes: Bytes of the bodies of all requests in progress.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str,
        hosts: HostNames,
        metrics: Metrics,
        open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._key = api_key.encode()
        self._hosts = hosts
        self._metrics = metrics
        self._open_paths = open_paths
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers)
        body = _Body(receive, self)
        if refusal is not None:
            body.is_refused = refusal.status == 413
            return await _error_response(refusal, self._metrics)(scope, receive, body.answering(send))
        try:
            await self._app(scope, body.receive, body.answering(send))
        finally:
            self.held_bytes -= body.num_bytes

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if (
            self._key
            and path not in self._open_paths
            and not self._is_key(headers.get(b"authorization", b""))
        ):
            message = "wrong or missing API key; send it as Authorization: Bearer KEY"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        host = headers.get(b"host", b"localhost").decode("latin-1")  # no browser leaves it out
        if not self._key and not self._hosts.allow(host):
            message = f"this server is not called {host[:100]!r}; start it with --allow-host NAME or a key"
            return ApiError(421, message, code="unknown_host")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > MAX_BODY_BYTES):
            return ApiError(413, TOO_LARGE, headers=CLOSE)
        return None

    def _is_key(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


class _Body:
    """Receives one body within limits: its time, its size, and the size of all bodies together."""

    def __init__(self, receive: Receive, auth: AuthMiddleware) -> None:
        self.num_bytes = 0
        self.is_refused = False
        self._receive = receive
        self._auth = auth
        self._is_complete = False
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS

    async def receive(self) -> Message:
        if self._is_complete:  # the next message is the client's disconnection
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, TOO_SLOW, headers=CLOSE) from None
        self._is_complete = not message.get("more_body", False)
        self._count(len(message.get("body", b"")))
        return message

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._auth.held_bytes += num_bytes
        if self.num_bytes > MAX_BODY_BYTES:
            self.is_refused = True
            raise ApiError(413, TOO_LARGE, headers=CLOSE)
        if self._auth.held_bytes > MAX_HELD_BYTES:
            message = "the server holds too many large requests; try again later"
            raise ApiError(503, message, headers={**CLOSE, "Retry-After": "5"})

    def answering(self, send: Send) -> Send:
        """A `send` that ends the answer to a refused body only after the rest of that body.

        Many clients read no answer before they have sent a body; a connection that is closed earlier is an
        error of the network to them.
        """

        async def answer(message: Message) -> None:
            is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
            if self.is_refused and is_end:
                await send({**message, "more_body": True})
                await self._discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        return answer

    async def _discard(self) -> None:
        num_bytes = 0
        has_more = True
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while has_more and num_bytes < MAX_DISCARDED_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    has_more = message.get("more_body", False)


async def answer_error(http: HttpRequest, error: Exception, *, metrics: Metrics) -> Response:
    """Convert any exception to a response in OpenAI's format."""
    return _error_response(_as_api_error(http, error), metrics)


def _error_response(error: ApiError, metrics: Metrics) -> JSONResponse:
    metrics.on_refusal(error.status)
    return JSONResponse(error.body, error.status, error.headers)


def _as_api_error(http: HttpRequest, error: Exception) -> ApiError:
    """The error that a client gets; it contains nothing about unexpected ones (the server logs them)."""
    match error:
        case ApiError():
            return error
        case YggError():
            return _refused(error)
        case HTTPException():
            path = http.scope["path"]
            known = {404: f"there is no {path}", 405: f"{path} does not take {http.method}"}
            message = known.get(error.status_code, error.detail)
            return ApiError(error.status_code, message, headers=dict(error.headers or {}))
        case _:
            return ApiError(500, DEFECT)


def _refused(error: YggError) -> ApiError:
    """The error of a request that the service, or one of our configs, refuses."""
    match error:
        case QueueFull():
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=headers)
        case ServiceEnded():
            return ApiError(503, str(error))
        case ConfigError():
            named = error.renamed(FIELD_NAMES.get(error.field, error.field))
            return ApiError(400, str(named), param=named.field)
        case CapacityError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case _:  # not the client's fault
            logging.getLogger(__name__).error("a request failed", exc_info=error)
            return ApiError(500, DEFECT)
