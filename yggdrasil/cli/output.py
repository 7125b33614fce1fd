"""Standard streams that may be closed, full or of another encoding."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from yggdrasil.errors import UsageError

__all__ = ["guarded_messages", "guarded_output"]


@contextlib.contextmanager
def guarded_messages() -> Iterator[None]:
    """A block that standard input and standard error cannot end.

    A closed input is an empty one. Messages that cannot be written are dropped: the text goes on.
    """
    with contextlib.ExitStack() as opened:
        # a new file takes the number of the closed one, which another file could get otherwise
        if sys.stdin is None:
            sys.stdin = opened.enter_context(open(os.devnull, encoding="utf-8"))
            opened.callback(setattr, sys, "stdin", None)
        stream = sys.stderr or opened.enter_context(open(os.devnull, "w", encoding="utf-8"))
        opened.enter_context(contextlib.redirect_stderr(_Dropped(stream)))
        yield


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """A block whose output is UTF-8 in every locale, and is flushed at the end.

    Raises:
        UsageError: standard output is closed, or cannot be written, as on a full disk.
        BrokenPipeError: the reader has closed the pipe.
    """
    stream = sys.stdout
    if stream is None:
        raise UsageError("standard output is closed; send it somewhere", "ygg ... > /dev/null")
    if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
        stream.reconfigure(encoding="utf-8")
    with contextlib.redirect_stdout(_Guarded(stream)):
        try:
            yield
        finally:
            sys.stdout.flush()


class _Guarded:
    """A stream that turns its write errors into UsageError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # libraries ask whether it is a terminal

    def write(self, text: str) -> int:
        with self._explained():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._explained():
            self._stream.flush()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._drop()
            raise
        except OSError as error:
            self._drop()
            problem = f"standard output cannot be written ({error.strerror}); send it elsewhere"
            raise UsageError(problem, "ygg ... > FILE") from None

    def _drop(self) -> None:
        """Discard the buffer: the interpreter flushes it at exit, which would fail again."""
        with contextlib.suppress(OSError):  # a stream without a descriptor has no pipe to close
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class _Dropped(_Guarded):
    """A stream that drops what cannot be written."""

    def write(self, text: str) -> int:
        with self._explained():
            return self._stream.write(text)
        return len(text)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._drop()
