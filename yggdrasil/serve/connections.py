"""Connections with deadlines and a limit on their number.

uvicorn waits for headers without end, accepts connections until no descriptor is free, and then logs every
attempt. Here connections end:

```
accepted --(HEAD_SECONDS)--> request --> response --(keep-alive)--> request ...
    |                                        |
    +-- closed if the limit is reached and   +-- closed if the client reads nothing for STALL_SECONDS
        no other one waits for longer
```
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from typing import Any, ClassVar

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["ACCEPTED_AT_ONCE", "Connection", "limited", "log_errors_rarely", "raise_descriptor_limit"]

HEAD_SECONDS = 10.0  # from the connection, or the last response, to the end of a request's headers
STALL_SECONDS = 60.0
MAX_CONNECTIONS = 4096  # about 30 KB each
ACCEPTED_AT_ONCE = 64
OWN_DESCRIPTORS = 64  # files, libraries, the event loop
# Iterations of the event loop between accepting one connection too many and closing another; in each of
# them it accepts more.
TURNS_TO_CLOSE = 3
BUSY = b'{"error":{"message":"too many connections; try again later","type":"server_error"}}'
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as allowed; returns how many connections this permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # macOS refuses its own "unlimited"
            pass
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - OWN_DESCRIPTORS - TURNS_TO_CLOSE * ACCEPTED_AT_ONCE))


def log_errors_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """Log at most once a second that descriptors have run out; by default the loop logs every attempt."""
    last_log = -1.0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last_log
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in NO_DESCRIPTOR:
            return loop.default_exception_handler(context)
        if time.monotonic() - last_log >= 1:
            last_log = time.monotonic()
            logging.getLogger(__name__).warning("no connection can be accepted now: %s", error.strerror)

    loop.set_exception_handler(handle)


class Connection(H11Protocol):
    """uvicorn's connection with deadlines and a limit; `limited` makes the class of one server.

    Attributes:
        waiting: Connections that wait for headers, the oldest first.
    """

    max_connections: ClassVar[int]
    waiting: ClassVar[dict[Connection, None]]
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self.max_connections:
            self._close_oldest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_served:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # otherwise the next request has already arrived
        if not self._is_served and not self.transport.is_closing():
            self._wait_for_head()

    def timeout_keep_alive_handler(self) -> None:
        """Keep an idle connection for HEAD_SECONDS, longer than its client does.

        Clients keep one for 5 s, and so would uvicorn: a request sent while the server closes it is lost.
        """

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    @property
    def _is_served(self) -> bool:
        """Whether a request has arrived whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self.waiting[self] = None
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            del self.waiting[self]

    def _close_oldest(self) -> None:
        """Close the connection that waits longest; if all others are served, this one gets a 503."""
        oldest = next(iter(self.waiting))
        if oldest is self:
            self.app = _busy
        else:
            oldest._stop_waiting()
            self.connections.discard(oldest)  # now: many more may arrive before the loop closes it
            oldest.transport.abort()


def limited(max_connections: int) -> type[Connection]:
    """The connection class of one server with at most `max_connections` at once."""

    class Limited(Connection):
        waiting: ClassVar[dict[Connection, None]] = {}

    Limited.max_connections = max_connections
    return Limited


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(BUSY)).encode())]
    headers += [(b"connection", b"close"), (b"retry-after", b"5")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": BUSY})
