"""The "side" of a plan: one worker thread on a CPU, a second stream on CUDA."""

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
    """Runs named jobs in order. A job may read everything that was computed before it was submitted."""

    def submit(self, name: str, job: Job) -> None:
        """Start a job as soon as the jobs before it have ended."""
        ...

    def wait(self, name: str) -> None:
        """Wait until the job of that name, if there is one, has ended; raises the job's error."""
        ...

    def join(self) -> None:
        """Wait until no job runs; raises no job's error."""
        ...


def side_of(device: str) -> Side:
    """The side of a device, "cpu" or "cuda"."""
    kinds: dict[str, Callable[[], Side]] = {"cpu": SideThread, "cuda": SideStream}
    return kinds[device]()


class SideThread:
    """A worker thread; its operators use one thread, because the others serve the calling thread.

    Cost: a job costs the calling thread a few microseconds, and starts tens of microseconds later.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[object, Job] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()
        self._pending: set[str] = set()
        num_threads = torch.get_num_threads()
        Thread(target=_work, args=(self._jobs, self._ended), name="yggdrasil-side", daemon=True).start()
        self._ended.get()
        # the worker changed its own setting, which is also the default of later threads
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
        # a pending name would not do: an interrupt may have come before its job was queued
        barrier = object()
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
        except BaseException as raised:  # raised again in the calling thread
            error = raised
        del entry, job  # so that the waiting thread can free the iteration and its tensors at once
        ended.put((name, error))


class SideStream:
    """A second CUDA stream, used by the calling thread and ordered by events. No sync.

    Memory is safe without `record_stream`: a job starts after all earlier work of the calling stream, and
    the calling stream waits for every job before the iteration ends.
    """

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
