"""Progress of a compilation on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["RichProgress"]


class RichProgress:
    """Draws a bar a phase on a terminal; prints a line a phase elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[None]:
        """A block during which `advance` counts up to `total`."""
        start = time.perf_counter()
        columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal, transient=True) as bars:
            self._bars, self._task = bars, bars.add_task(name, total=total)
            yield
        self._bars = None
        self._console.print(f"{name:<22} {time.perf_counter() - start:6.1f} s", highlight=False)

    def advance(self) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task)
