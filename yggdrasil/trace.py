"""Milliseconds per stage: one format for profiling, metrics and `--stats`."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

__all__ = ["DeviceTrace", "Trace"]

MOST_NOTED = 256  # calls of `note` whose times wait for a reader


class Trace:
    """Accumulated wall-clock time of named stages.

    Times are summed when they are read: after a forward, a sum of six stages takes 40 us.
    """

    def __init__(self) -> None:
        self._total_ms: dict[str, float] = defaultdict(float)
        self._count: dict[str, int] = defaultdict(int)
        self._noted: list[tuple[Sequence[str], Sequence[float]]] = []
        self._summing = threading.Lock()  # a server's state is read by other threads

    @property
    def total_ms(self) -> dict[str, float]:
        """Milliseconds by stage."""
        self._sum_()
        return self._total_ms

    @property
    def count(self) -> dict[str, int]:
        """Times each stage ran."""
        self._sum_()
        return self._count

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as one run of stage `name`. Cost: about a microsecond; no device sync."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.note((name,), (start * 1e3, time.perf_counter() * 1e3))

    def note(self, names: Sequence[str], marks_ms: Sequence[float]) -> None:
        """Add a run of consecutive stages.

        Args:
            marks_ms: Milliseconds of `time.perf_counter`: when the first stage began, then when each ended.
        """
        self._noted.append((names, marks_ms))
        if len(self._noted) >= MOST_NOTED:
            self._sum_()

    def _sum_(self) -> None:
        with self._summing:
            noted = self._noted[:]
            for names, marks_ms in noted:
                for name, (begin_ms, end_ms) in zip(names, pairwise(marks_ms), strict=True):
                    self._total_ms[name] += end_ms - begin_ms
                    self._count[name] += 1
            del self._noted[: len(noted)]


class DeviceTrace(Trace):
    """Stage times on a CUDA device.

    Launches return at once, so the host's clock would add a forward's time to the stage that waits for it.
    A stage is recorded once the device has finished it, at the end of that stage or of a later one. In a
    batch that is acceptance, which waits for all stages before it. A step that emits nothing does not wait,
    so its forward is recorded in the next step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: deque[tuple[str, Any, Any]] = deque()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block's work on the current stream, and host time in which the stream is idle.

        Cost: two events; no device sync.
        """
        begin = _mark()
        try:
            yield
        finally:
            self._running.append((name, begin, _mark()))
            self._record_finished()

    def _record_finished(self) -> None:
        while self._running and self._running[0][2].query():
            name, begin, end = self._running.popleft()
            self.total_ms[name] += begin.elapsed_time(end)
            self.count[name] += 1


def _mark() -> Any:
    import torch  # imported here: `Trace` is used without torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
