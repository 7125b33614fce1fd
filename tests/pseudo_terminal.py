"""A command in a pseudo terminal, as a person runs it: what it writes, and what is typed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

ROWS = 40
COLUMNS = 100
PATIENCE_S = 60.0
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """The person's end of a pseudo terminal.

    Attributes:
        screen: Everything that was written so far, with control characters.
    """

    def __init__(self, end: int, process: subprocess.Popen[bytes]) -> None:
        self._end = end
        self._seen = 0
        self.process = process
        self.screen = ""

    def type(self, text: str) -> None:
        """Press keys; `\\x03` is Ctrl-C, `\\x04` on an empty line the end of the input."""
        os.write(self._end, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until a text comes, after the one that was waited for before."""
        while not self._has(text):
            assert self._read(), f"{text!r} is not in {self._readable[self._seen :]!r}"

    def type_until(self, key: str, text: str) -> None:
        """Press a key, again after a while, until a text comes: a line editor can miss a signal."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self.type(key)
            again = time.monotonic() + 2
            while time.monotonic() < again:  # the key's own echo is no reason to press it again
                if self._has(text):
                    return
                if select.select([self._end], [], [], 0.1)[0]:
                    self._read()
        raise AssertionError(f"{text!r} is not in {self._readable[self._seen :]!r}")

    @property
    def _readable(self) -> str:
        return CONTROL.sub("", self.screen)

    def _has(self, text: str) -> bool:
        """Whether a text has come that was not seen yet; it then was."""
        found = self._readable.find(text, self._seen)
        if found >= 0:
            self._seen = found + len(text)
        return found >= 0

    def wait_for_end(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    @property
    def text(self) -> str:
        """What was written, without control characters and carriage returns."""
        return self._readable.replace("\r\n", "\n")

    def _read(self) -> bool:
        """Read what comes next; whether something came before the end of the process."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    data = os.read(self._end, 1 << 16)
                except OSError:  # Linux's way to report that nobody has the other end open
                    return False
                self.screen += data.decode(errors="replace")
                return bool(data)
            if self.process.poll() is not None:
                return False
        return False


@contextmanager
def terminal(*words: str, first: str = "") -> Iterator[Terminal]:
    """`ygg` with these words in a pseudo terminal of its own.

    Args:
        first: Python that runs before it.
    """
    end, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-c", PROGRAM.format(first=first), *words]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Terminal(end, process)
    finally:
        process.kill()
        process.wait()
        os.close(end)


PROGRAM = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C reaches this process
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
{first}
from yggdrasil.cli import main
sys.exit(main(sys.argv[1:]))
"""
