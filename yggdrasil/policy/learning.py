"""A policy of shapes for one request that corrects its profile by what its own steps take."""

from __future__ import annotations

from collections.abc import Sequence

from yggdrasil.policy.measured import MeasuredLatency
from yggdrasil.policy.shape import CONTEXT_STEP, BestShape, ShapePolicy
from yggdrasil.state import Row, StepResult
from yggdrasil.step.choice import Choice

__all__ = ["LearningShape"]

# Milliseconds of decoding between two steps that are observed, which then takes less than a hundredth.
OBSERVING_INTERVAL_MS = 10.0


class LearningShape(ShapePolicy):
    """Follows a policy of shapes, at the latency of this process.

    A machine whose memory or load has changed since the pair was compiled has other latency curves. Only
    steps in C++ know the times of their parts; others change nothing.

    Args:
        calibrated: Chooses shapes by the profile.
        measured: The profile as corrected by all requests of the pair.

    Source: design; the paper's objective uses the profile alone.
    """

    def __init__(self, calibrated: BestShape, measured: MeasuredLatency) -> None:
        self._calibrated = calibrated
        self._corrected = calibrated
        self._measured = measured
        self._lag = 0
        self._unobserved_ms = OBSERVING_INTERVAL_MS

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._calibrated!r})"

    def choose(self, rows: Sequence[Row]) -> Choice:
        latency = self._measured.in_use
        if self._corrected.latency is not latency:
            self._corrected = self._calibrated.corrected(latency, 1.0)
        self._lag = sum(row.state.root_pos - row.target_len for row in rows)
        return self._corrected.choose(rows)

    def observe(self, result: StepResult) -> None:
        self._unobserved_ms += result.ms
        ms = result.parts
        if result.caught_up or ms is None or self._unobserved_ms < OBSERVING_INTERVAL_MS:
            return
        self._unobserved_ms = 0.0
        context_len = result.context_len // CONTEXT_STEP * CONTEXT_STEP
        self._measured.observe_([result.shape], result.verified + self._lag, context_len, ms)
        if self._measured.is_due_():
            self._measured.use_()
