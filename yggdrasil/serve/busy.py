"""Warn when the machine is busy: forwards then take several times the time that the profile predicts."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from yggdrasil.policy.latency import BUSY_FACTOR, LatencyModel
from yggdrasil.serve.request import Observer, RequestReport, ShadowReport, StepReport

__all__ = ["BusyWatch"]

NUM_STEPS = 64  # the median of this many steps counts, so that single slow steps do not
EVERY_S = 60.0
CONTEXT_LEN = 512  # the context length changes a forward's time far less than the number of tokens


class BusyWatch(Observer):
    """Forwards reports to another observer, and logs at most one warning a minute.

    Args:
        latency: The profile of the pair.
        now: The clock, in seconds.
    """

    def __init__(
        self, observer: Observer, latency: LatencyModel, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._observer = observer
        self._latency = latency
        self._now = now
        self._ratios: deque[float] = deque(maxlen=NUM_STEPS)
        self._silent_until = now()

    def on_step(self, report: StepReport) -> None:
        self._observer.on_step(report)
        num_tokens = sum(report.drafted) + len(report.emitted) + report.prompt_tokens
        if num_tokens:
            self._ratios.append(report.verify_ms / self._latency.verify.at(num_tokens, CONTEXT_LEN))
        if len(self._ratios) == NUM_STEPS and self._now() >= self._silent_until:
            self._warn(median(self._ratios))

    def on_finish(self, report: RequestReport) -> None:
        self._observer.on_finish(report)

    def on_shadow(self, report: ShadowReport) -> None:
        self._observer.on_shadow(report)

    def _warn(self, slowdown: float) -> None:
        if slowdown >= BUSY_FACTOR:
            self._silent_until = self._now() + EVERY_S
            message = "the machine is busy: steps take %.1f times as long as the pair's profile predicts"
            logging.getLogger(__name__).warning(message, slowdown)
