"""What runs beside the calling thread: one worker thread on a CPU, a second stream on CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch

from yggdrasil.kernels.threads import stay_alone

__all__ = ["Side", "SideStream", "SideThread", "side_of"]

Job = Callable[[], None]


class Side(Protocol):
    """Takes named jobs and runs them in order. A job may read whatever was done before it was submitted."""

    def submit(self, name: str, job: Job) -> None:
        """Start a job as soon as those before it have ended."""
        ...

    def wait(self, name: str) -> None:
        """Until the job of that name, if there is one, has ended; raises what it raised."""
        ...

    def join(self) -> None:
        """Until no job runs; raises nothing that a job raised."""
        ...


def side_of(device: str) -> Side:
    """The side of a device, "cpu" or "cuda"."""
    return SideStream() if device == "cuda" else SideThread()


class SideThread:
    """A worker thread whose operators run on that thread alone: their partners are the calling thread's.

    Cost: a job costs the calling thread a few microseconds, and starts tens of microseconds later.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[object, Job] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()
        self._pending: set[str] = set()
        num_threads = torch.get_num_threads()
        Thread(target=_work, args=(self._jobs, self._ended), name="yggdrasil-side", daemon=True).start()
        self._ended.get()
        # the worker's setting is its own, but also what later threads would start with
        torch.set_num_threads(num_threads)
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, name: str, job: Job) -> None:
        self._pending.add(name)
        self._jobs.put((name, job))

    def wait(self, name: str) -> None:
        while name in self._pending:
            ended, error = self._ended.get()
            self._pending.discard(str(ended))
            if error is not None:
                raise error

    def join(self) -> None:
        if not self._pending:
            return
        barrier = object()  # not the pending names: an interrupt may have struck before a job was queued
        self._jobs.put((barrier, _nothing))
        while self._ended.get()[0] is not barrier:
            pass
        self._pending.clear()


def _nothing() -> None:
    pass


def _work(jobs: SimpleQueue[tuple[object, Job] | None], ended: SimpleQueue[Any]) -> None:
    stay_alone()
    ended.put((None, None))
    while (entry := jobs.get()) is not None:
        name, job = entry
        error = None
        try:
            job()
        except BaseException as raised:  # it belongs to the calling thread
            error = raised
        del entry, job  # whoever waits may drop the iteration, and its tensors, at once
        ended.put((name, error))


class SideStream:
    """A second CUDA stream that the calling thread launches on; events order it against the calling
    thread's stream. No sync.

    Memory is safe without `record_stream`: every job starts after all that the calling stream was given
    before it, and the calling stream waits for every job before the iteration ends."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._events: dict[str, Any] = {}

    def submit(self, name: str, job: Job) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            job()
            self._events[name] = self._stream.record_event()

    def wait(self, name: str) -> None:
        if name in self._events:
            torch.cuda.current_stream().wait_event(self._events.pop(name))

    def join(self) -> None:
        self._events.clear()
        torch.cuda.current_stream().wait_stream(self._stream)
