"""Ctrl-C that waits until modules are imported.

An interrupt within an import leaves half a module. A library that catches the error tries another way, and
the user reads of a broken model or a missing package.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["between_imports"]

IMPORTING = "<frozen importlib._bootstrap>"  # the file of the frames that import
RETRY_S = 0.02


@contextmanager
def between_imports() -> Iterator[None]:
    """A block that an interrupt ends, but not within an import that began in the block.

    It changes nothing where Ctrl-C is handled already, and in threads, which get no signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = _num_importing(sys._getframe())

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, or send the signal again a little later."""
        if _num_importing(frame) <= before:
            raise KeyboardInterrupt
        again = threading.Timer(RETRY_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _num_importing(frame: FrameType | None) -> int:
    """Frames that import, from this one outwards."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == IMPORTING
        frame = frame.f_back
    return count
