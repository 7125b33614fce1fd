"""Milliseconds per stage: one format for profiling, metrics and `--stats`."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["DeviceTrace", "Trace"]


class Trace:
    """Accumulated wall-clock time of named stages.

    Attributes:
        total_ms: Milliseconds by stage.
        count: Times each stage ran.
    """

    def __init__(self) -> None:
        self.total_ms: dict[str, float] = defaultdict(float)
        self.count: dict[str, int] = defaultdict(int)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as one run of stage `name`. Cost: about a microsecond; no device sync."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.note((name,), (start * 1e3, time.perf_counter() * 1e3))

    def note(self, names: Sequence[str], marks_ms: Sequence[float]) -> None:
        """Enter a run of stages one after another, in milliseconds of `time.perf_counter`: when the first
        began, and when each of them ended.
        """
        total_ms = self.total_ms
        count = self.count
        begin_ms = marks_ms[0]
        for name, end_ms in zip(names, marks_ms[1:], strict=True):
            total_ms[name] += end_ms - begin_ms
            count[name] += 1
            begin_ms = end_ms


class DeviceTrace(Trace):
    """Stages as a CUDA device ran them: launches return at once, so the host's clock would give a forward's
    time to whatever waits for it.

    A stage is entered in the books at the end of the first stage, itself or a later one, that finds the
    device done with it. In the batch that is acceptance, which waits for all before it; a step that emits
    nothing waits for nothing, and its forward is entered in the next."""

    def __init__(self) -> None:
        super().__init__()
        self._running: deque[tuple[str, Any, Any]] = deque()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what the block gives the current stream, and the host where the stream is idle. Cost: two
        events; no device sync.
        """
        begin = _mark()
        try:
            yield
        finally:
            self._running.append((name, begin, _mark()))
            self._enter_finished()

    def _enter_finished(self) -> None:
        while self._running and self._running[0][2].query():
            name, begin, end = self._running.popleft()
            self.total_ms[name] += begin.elapsed_time(end)
            self.count[name] += 1


def _mark() -> Any:
    import torch  # here: the host's clock is wanted where torch is not

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
