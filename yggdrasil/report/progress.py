"""Progress of a compilation on standard error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["RichProgress"]

LOG_EVERY_S = 10.0
BEGUN_S = 3.0  # a phase is announced after this time; a shorter one prints only its end


class RichProgress:
    """Draws a bar per phase on a terminal; elsewhere prints lines: at its begin, every 10 s, at its end.

    Args:
        log_every_s: Seconds between two lines of a phase.
        begun_s: Seconds after which the begin of a phase is printed.
    """

    def __init__(self, log_every_s: float = LOG_EVERY_S, begun_s: float = BEGUN_S) -> None:
        self._console = Console(stderr=True)
        self._log_every_s = log_every_s
        self._begun_s = begun_s
        self._phase: _Bar | _Log | None = None

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[None]:
        """A block during which `advance` counts up to `total`."""
        start = time.perf_counter()
        shown = (
            _bar(self._console, name, total)
            if self._console.is_terminal
            else _log(self._console, name, total, self._begun_s, self._log_every_s)
        )
        with shown as phase:
            self._phase = phase
            try:
                yield
            finally:
                self._phase = None
        self.note(f"{name:<22} {time.perf_counter() - start:6.1f} s")

    def advance(self, count: int = 1) -> None:
        if self._phase is not None:
            self._phase.advance(count)

    def note(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Bar:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, count: int) -> None:
        self._bars.advance(self._task, count)


@contextmanager
def _bar(console: Console, name: str, total: int) -> Iterator[_Bar]:
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield _Bar(bars, bars.add_task(name, total=total))


class _Log:
    """Counts the steps of a phase, from several threads, and describes its state."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._start = time.perf_counter()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count

    def line(self) -> str:
        elapsed = time.perf_counter() - self._start
        left = (
            f", about {elapsed * (self._total - self._done) / self._done:.0f} s left"
            if 0 < self._done < self._total
            else ""
        )
        return f"{self._name:<22} {elapsed:6.1f} s so far, {self._done} of {self._total}{left}"


@contextmanager
def _log(console: Console, name: str, total: int, begun_s: float, every_s: float) -> Iterator[_Log]:
    """Print lines from a thread, so that they also come while a long step runs."""
    log = _Log(name, total)
    is_over = threading.Event()

    def repeat() -> None:
        if is_over.wait(begun_s):
            return
        console.print(f"{name} ...", highlight=False, markup=False, soft_wrap=True)
        while not is_over.wait(every_s):
            console.print(log.line(), highlight=False, markup=False, soft_wrap=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield log
    finally:
        is_over.set()
        thread.join()
