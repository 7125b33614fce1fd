"""The gate before the routes, and what is said to those who do not pass it: the key, the size of a body, every error in OpenAI's shape."""

from __future__ import annotations

import hmac
import math

from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from yggdrasil.errors import CapacityError, ConfigError, QueueFull, ServiceEnded, YggError
from yggdrasil.serve.metrics import Metrics
from yggdrasil.serve.openai import ApiError

__all__ = ["MAX_BODY_BYTES", "Gate", "answer_error"]

MAX_BODY_BYTES = 4 << 20
TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
FIELD_NAMES = {"max_new_tokens": "max_tokens"}


class Gate:
    """Lets in who has the key, and no more of a body than a request can need."""

    def __init__(self, app: ASGIApp, *, api_key: str, metrics: Metrics) -> None:
        self._app = app
        self._key = api_key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            return await _error_response(refusal, self._metrics)(scope, receive, send)
        await self._app(scope, _bounded(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._key and path != "/health" and not self._is_key(headers.get(b"authorization", b"")):
            return ApiError(
                401, "wrong or missing API key; send it as Authorization: Bearer KEY", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return ApiError(413, TOO_LARGE, headers={"Connection": "close"})
        return None

    def _is_key(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def _bounded(receive: Receive) -> Receive:
    """A body without a length is counted as it comes."""
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, TOO_LARGE)
        return message

    return counted


async def answer_error(http: HttpRequest, error: Exception, *, metrics: Metrics) -> Response:
    """Any exception as a response in OpenAI's shape."""
    return _error_response(_as_api_error(http, error), metrics)


def _error_response(error: ApiError, metrics: Metrics) -> JSONResponse:
    metrics.on_refusal(error.status)
    return JSONResponse(error.body, error.status, error.headers)


def _as_api_error(http: HttpRequest, error: Exception) -> ApiError:
    """What a client should know; of anything unexpected nothing but that it happened (the server logs the traceback)."""
    match error:
        case ApiError():
            return error
        case YggError():
            return _refused(error)
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            known = {404: f"there is no {http.url.path}", 405: f"{http.url.path} does not take {http.method}"}
            return ApiError(error.status_code, known.get(error.status_code, error.detail), headers=dict(error.headers or {}))
        case _:
            return ApiError(500, "internal error; see the server's log")


def _refused(error: YggError) -> ApiError:
    """A request that the service, or one of our configs, does not take."""
    match error:
        case QueueFull():
            return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": str(math.ceil(error.retry_after_s))})
        case ServiceEnded():
            return ApiError(503, str(error))
        case ConfigError():
            return ApiError(400, str(error), param=FIELD_NAMES.get(error.field, error.field))
        case CapacityError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case _:
            return ApiError(400, str(error))


def _invalid(error: RequestValidationError) -> ApiError:
    """The first field that pydantic complains of, with all that it could have been."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']} at character {path[0]}")
    if not path:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{'.'.join(path)} is not a field that this server knows; leave it out", param=path[0], code="unknown_parameter")
    complaints = [entry["msg"] for entry in error.errors() if list(map(str, entry["loc"][1:2])) == path[:1]]
    return ApiError(400, f"{'.'.join(path)}: {' or '.join(dict.fromkeys(complaints))}", param=path[0])
