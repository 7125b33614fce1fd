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
PATIENCE_S = 120.0
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

    def wait_for(self, text: str) -> str:
        """Read until a text comes that was not waited for yet; returns what came up to it, uncoloured."""
        while text not in CONTROL.sub("", self.screen[self._seen :]):
            assert self._read(), f"{text!r} is not in {self.screen[self._seen :]!r}"
        new = CONTROL.sub("", self.screen[self._seen :])
        self._seen = len(self.screen)
        return new

    def wait_for_end(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    @property
    def text(self) -> str:
        """What was written, without control characters and carriage returns."""
        return CONTROL.sub("", self.screen).replace("\r\n", "\n")

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
def terminal(*words: str) -> Iterator[Terminal]:
    """`ygg` with these words in a pseudo terminal of its own."""
    end, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-c", PROGRAM, *words]
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
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C reaches this process
from yggdrasil.cli import main
sys.exit(main(sys.argv[1:]))
"""
