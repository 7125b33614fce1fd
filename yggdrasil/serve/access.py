"""A number for every request, and a line for every response:

```
2026-01-31T12:00:00Z POST /v1/completions 200 152.3 ms 4+16 tokens 6f1c...
```

The tokens are those of the prompts and of the output. The last word is the request's id: the `X-Request-Id`
that the client sent, if it is a short word, or a random one. The response has it as a header.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["REQUEST_ID", "Access", "AccessLog", "access_of"]

REQUEST_ID = "X-Request-Id"
GIVEN_ID = re.compile(rb"[!-~]{1,128}")
MAX_PATH = 200  # characters of a path in the log
GONE = 499  # status in the log if the client went before any response


@dataclass
class Access:
    """What the log reports of one request; routes that decode count its tokens.

    Attributes:
        status: Of the response, once it has begun.
    """

    request_id: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    status: int = GONE


class AccessLog:
    """Numbers requests and logs responses.

    Args:
        app: The whole application, so that refusals have a number and a line, too.
        write: Gets every line; None writes no lines.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], None] | None) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        access = Access(_request_id(dict(scope["headers"])))
        scope["state"] = {**scope.get("state", {}), "access": access}

        async def send_numbered(message: Message) -> None:
            if message["type"] == "http.response.start":
                access.status = message["status"]
                number = REQUEST_ID.lower().encode(), access.request_id.encode()
                message = {**message, "headers": [*message.get("headers", ()), number]}
            await send(message)

        with self._logged(scope, access):
            await self._app(scope, receive, send_numbered)

    @contextmanager
    def _logged(self, scope: Scope, access: Access) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._write is not None:
                self._write(_line(scope, access, (time.perf_counter() - start) * 1e3))


def access_of(http: HttpRequest) -> Access:
    """The record of a request that `AccessLog` has numbered."""
    access: Access = http.state.access
    return access


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(REQUEST_ID.lower().encode(), b"")
    return given.decode() if GIVEN_ID.fullmatch(given) else secrets.token_hex(16)


def _line(scope: Scope, access: Access, spent_ms: float) -> str:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path = _one_word(scope.get("raw_path") or scope["path"].encode())
    tokens = f" {access.prompt_tokens}+{access.output_tokens} tokens" if access.prompt_tokens else ""
    answer = f"{access.status} {spent_ms:.1f} ms{tokens}"
    return f"{now} {scope['method']} {path} {answer} {access.request_id}"


def _one_word(path: bytes) -> str:
    """The beginning of a path, of printable characters: a client may send a line of its own."""
    shown = re.sub(rb"[^!-~]", lambda found: b"%%%02X" % found[0][0], path).decode()
    return shown if len(shown) <= MAX_PATH else f"{shown[:MAX_PATH]}..."
