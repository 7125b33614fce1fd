"""The batcher in its own thread: any thread can submit requests; events are sent from the batcher's.

Shapes: P = pages of a row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from yggdrasil.config import GrammarConfig
from yggdrasil.errors import QueueFull, ServiceEnded
from yggdrasil.kernels.compilations import no_compilation
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.request import Observer, Request, RequestReport, StepReport
from yggdrasil.serve.shadow import Shadow
from yggdrasil.serve.ticket import Ticket

__all__ = ["Service"]

NUM_RECENT = 32  # finished requests from which the speed of the queue is estimated
MAX_RETRY_S = 60.0
ACCEPTANCE_MEMORY = 0.95


class Service(Observer):
    """Runs a batcher; every method may be called from any thread.

    Args:
        batcher: No other code may use it from now on.
        max_queue: Largest number of requests that wait for a row.
        policy_name: Name of the policy, for `info`.
        observer: Receives the batcher's reports, in the service's thread.
        shadow_rate: Share of the requests that are decoded twice; see shadow.py.
    """

    def __init__(
        self,
        batcher: Batcher,
        *,
        max_queue: int,
        policy_name: str,
        observer: Observer,
        shadow_rate: float = 0.0,
    ) -> None:
        self.max_queue = max_queue
        self._batcher = batcher
        self._policy_name = policy_name
        self._observer = observer
        self._shadow = Shadow(shadow_rate, observer.on_shadow) if shadow_rate else None
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._stopping = False
        self._is_draining = False
        self._has_died = False
        self._num_queued = 0
        self._arriving: set[Ticket] = set()  # submitted, but not in the batcher's queue yet
        self._finished: deque[float] = deque(maxlen=NUM_RECENT)
        self._accept_length = 0.0
        self._thread = threading.Thread(target=self._run, name="ygg-batcher", daemon=True)
        batcher.observer = self

    def start(self) -> None:
        """Begin to accept requests."""
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def max_context(self) -> int:
        """Largest number of tokens of prompt and output together that the pair and the KV pages allow."""
        return self._batcher.served_context

    def knows(self, grammar: GrammarConfig) -> bool:
        """Whether a grammar is compiled."""
        return self._batcher.grammars.knows(grammar)

    def prepare(self, grammar: GrammarConfig) -> None:
        """Compile a grammar, so that `submit` finds it; raises the errors of `Grammars.state`."""
        self._batcher.grammars.state(grammar)

    def check(self, grammar: GrammarConfig) -> None:
        """Raise the error of `prepare` if a grammar does not compile; keeps none."""
        self._batcher.grammars.check(grammar)

    def submit(self, request: Request) -> Ticket:
        """Queue a request.

        Raises:
            ServiceEnded: the thread does not run.
            QueueFull: too many requests wait.
            ConfigError, CapacityError: the request cannot be served.
        """
        if not self.is_healthy:
            raise ServiceEnded
        if self._num_queued >= self.max_queue:
            raise QueueFull(self._num_queued, self._retry_after_s())
        if self._shadow is not None and self._may_shadow and self._num_queued == 0:
            request = self._shadow.served(request, self._submit_shadow)
        ticket = self._batcher.ticket(request)
        self._num_queued += 1
        self._arriving.add(ticket)
        self._call(lambda: self._queue(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request, free its pages and send a last event; does nothing if it has already ended."""
        self._call(lambda: self._batcher.cancel(ticket))

    def set_speculation(self, enabled: bool) -> None:
        """Let all requests speculate, or none, from the next step on; waits for it."""
        done: Future[None] = Future()

        def switch() -> None:
            self._batcher.speculates = enabled
            done.set_result(None)

        self._call(switch)
        done.result(timeout=MAX_RETRY_S)

    def info(self) -> dict[str, Any]:
        """Configuration and state of the server in JSON values, read between two steps."""
        info: Future[dict[str, Any]] = Future()
        self._call(lambda: info.set_result(self._info()))
        return info.result(timeout=MAX_RETRY_S)

    def drain(self, timeout_s: float) -> bool:
        """Finish running and waiting requests, then stop the thread; returns at once if it has died.

        Args:
            timeout_s: Seconds after which the remaining requests are cancelled.

        Returns:
            Whether every request finished.
        """
        if not self.is_healthy:
            return not self._has_died
        self._is_draining = True
        deadline = time.monotonic() + timeout_s
        self._idle.clear()
        self._call(lambda: None)
        is_done = not self._has_died and self._idle.wait(max(0.0, deadline - time.monotonic()))
        if not is_done:
            self._call(self._batcher.cancel_all)
        self._stopping = True
        self._wake.set()
        self._thread.join()
        return is_done and not self._has_died

    def on_step(self, report: StepReport) -> None:
        self._num_queued = report.waiting + len(self._arriving)
        if sum(report.drafted):
            accepted = sum(report.emitted) / len(report.emitted) - 1
            self._accept_length += (1 - ACCEPTANCE_MEMORY) * (accepted - self._accept_length)
        self._observer.on_step(report)

    def on_finish(self, report: RequestReport) -> None:
        self._finished.append(time.monotonic())
        self._observer.on_finish(report)

    @property
    def _may_shadow(self) -> bool:
        """Whether a shadow would speculate, and delay no shutdown."""
        return self._batcher.speculates and not self._is_draining

    def _queue(self, ticket: Ticket) -> None:
        self._batcher.submit(ticket)
        self._arriving.remove(ticket)

    def _submit_shadow(self, request: Request) -> None:
        """Queue the second decoding of a request that has just ended; called within a step."""
        if self._may_shadow and self._batcher.num_waiting == 0:
            self._call(lambda: self._begin_shadow(request))

    def _begin_shadow(self, request: Request) -> None:
        """Queue it, unless its grammar is gone: compiling one in this thread would delay all rows."""
        grammar = request.config.grammar
        if grammar is None or self.knows(grammar):
            self._batcher.submit(self._batcher.ticket(request))

    def _call(self, command: Callable[[], object]) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _retry_after_s(self) -> float:
        """Seconds until half of the queue is served, at the rate of recent requests."""
        if len(self._finished) < 2:
            return 1.0
        rate = (len(self._finished) - 1) / max(1e-3, time.monotonic() - self._finished[0])
        return min(MAX_RETRY_S, max(1.0, self.max_queue / 2 / rate))

    def _info(self) -> dict[str, Any]:
        batcher = self._batcher
        return {
            "policy": self._policy_name,
            "policy_state": batcher.policy.state,
            "speculation": batcher.speculates,
            "cohorts": batcher.cohorts.state,
            "speculative_num_steps": batcher.gamma,
            "avg_spec_accept_length": round(self._accept_length, 4),
            "running": batcher.num_running,
            "waiting": batcher.num_waiting,
            "max_batch": len(batcher.pool.table_BP),
            "max_queue": self.max_queue,
            "max_context": self.max_context,
            "gamma_max": batcher.gamma_max,
            "free_pages": batcher.pool.num_free,
            "num_pages": batcher.pool.num_pages,
            "draft_in_memory": batcher.elastic is None or batcher.elastic.is_draft_in,
            "stages_ms": dict(batcher.trace.total_ms),
            **({} if self._shadow is None else {"shadow": self._shadow.state}),
        }

    def _run(self) -> None:
        try:
            with no_compilation():
                self._serve()
        except Exception:
            logging.getLogger(__name__).exception("the decoding thread died; start the server again")
            self._has_died = True
            self._idle.set()  # `drain` must not wait any longer

    def _serve(self) -> None:
        while True:
            self._run_calls()
            if self._step() or self._inbox:
                continue
            self._wait_for_call()
            if self._stopping:
                break
        self._run_calls()  # those that arrived during the last wait
        self._batcher.cancel_all()

    def _run_calls(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _step(self) -> bool:
        """Run one step; returns whether there was work. A defect ends its requests, not the server."""
        try:
            return self._batcher.step() is not None
        except Exception:
            logging.getLogger(__name__).exception("a step failed; the requests in it end with an error")
            self._batcher.fail()
            return True

    def _wait_for_call(self) -> None:
        """With nothing to do, check the batcher's state, then wait for a call."""
        self._batcher.scheduler.check()
        self._num_queued = 0
        self._finished.clear()  # the rate of requests is not that of the time without any
        self._idle.set()
        if not self._stopping:
            self._wake.wait()
        self._wake.clear()
        self._idle.clear()
