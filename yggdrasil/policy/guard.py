"""Never slower than plain decoding: speculation may lose only a small allowance of milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.state import Row, StepResult
from yggdrasil.step.choice import Choice

__all__ = ["Guard"]

# The allowance, in multiples of what a speculative step loses that emits one token:
START_LOSSES = 4.5  # at the start of a session
PROBE_LOSSES = 0.5  # at which a stopped session tries speculation again
# and in multiples of a plain step's milliseconds:
MIN_LOSS_STEPS = 0.5  # the smallest such loss
MAX_STEPS = 16.0  # that a session can collect by winning
REFILL_SHARE = 0.0075  # share of all elapsed time that is added to the allowance
PLAIN_MEMORY = 0.8  # weight of the past in the running mean of plain steps' slowness
SUSPECT_SLOWNESS = 1.25  # times the slowness of plain steps: above it, plain steps are measured again
CHECK_INTERVAL = 64  # speculative steps after which the last measured plain step is too old
CHECK_STEPS = 2  # plain steps of a new measurement


@dataclass
class Guard(ShapePolicy):
    """Follows another policy while speculation is measured to be faster, else uses plain decoding.

    The allowance is a token bucket of milliseconds. A speculative step subtracts its wall clock and adds
    the time that plain decoding would have taken for its tokens. A small share of all elapsed time is added
    too, so a stopped session tries again; the more it lost, the later. So a session can lose at most
    START_LOSSES steps that emit one token, and REFILL_SHARE of its time, for any draft. Before a new
    attempt the draft catches up with the text, a chunk a step; this time is subtracted, too.

    If speculative steps take longer than the profile predicts, either the machine is busy or the profile is
    wrong about them. Two plain steps decide which. Until then the excess time is not subtracted.

    Args:
        inner: Chooses shapes while the allowance lasts.
        latency: Predicts a plain step before this session has measured one.

    Source: design, "never slower"; the paper has no guard.
    """

    is_guard: ClassVar[bool] = True

    inner: ShapePolicy
    latency: LatencyModel
    plain: ShapePolicy = field(default_factory=plain_policy, repr=False)
    speculating: bool = field(default=True, init=False)
    _allowance_ms: float | None = field(default=None, init=False, repr=False)
    _loss_ms: float = field(default=0.0, init=False, repr=False)
    # measured over predicted milliseconds: running mean of plain steps, and the last step by `is_plain`
    _plain_slowness: float = field(default=1.0, init=False, repr=False)
    _last_slowness: dict[bool, float] = field(default_factory=dict, init=False, repr=False)
    _steps_since_plain: int = field(default=CHECK_INTERVAL, init=False, repr=False)
    _checks_left: int = field(default=0, init=False, repr=False)

    def choose(self, rows: Sequence[Row]) -> Choice:
        is_plain = not self.speculating or self._checks_left
        return (self.plain if is_plain else self.inner).choose(rows)

    def observe(self, result: StepResult) -> None:
        """Update the allowance, and decide whether the next step speculates."""
        predicted_ms = self._predicted_ms(result)
        plain_ms = self.latency.plain_ms(result.context_len) * self._plain_slowness
        self._loss_ms = max(self._loss_ms, MIN_LOSS_STEPS * plain_ms)
        if not result.is_plain:
            self._loss_ms = max(predicted_ms - plain_ms, MIN_LOSS_STEPS * plain_ms)
        if self._allowance_ms is None:
            self._allowance_ms = START_LOSSES * self._loss_ms
        ms = self._counted_ms(result, predicted_ms)
        if not result.is_plain or result.caught_up:
            self._allowance_ms += len(result.tokens) * plain_ms - ms
        self._allowance_ms = min(self._allowance_ms + REFILL_SHARE * ms, MAX_STEPS * plain_ms)
        needed_ms = 0.0 if self.speculating else PROBE_LOSSES * self._loss_ms
        self.speculating = result.caught_up or self._allowance_ms >= needed_ms
        self.inner.observe(result)

    def _counted_ms(self, result: StepResult, predicted_ms: float) -> float:
        """The step's milliseconds; slowness counts only if two consecutive steps of a kind have it.

        A single slow step is an interruption by the machine, not the draft's fault.
        """
        if result.caught_up:
            return result.ms
        is_plain = result.is_plain
        slowness = result.ms / predicted_ms
        counted = min(slowness, self._last_slowness.get(is_plain, 1.0))
        self._last_slowness[is_plain] = slowness
        if is_plain:
            self._observe_plain(counted)
        else:
            counted = self._limit_unchecked(counted)
            # a machine faster than its profile is also faster in plain steps
            if True not in self._last_slowness:
                self._average_plain(min(1.0, counted))
        return counted * predicted_ms

    def _predicted_ms(self, result: StepResult) -> float:
        shape = result.shape
        return self.latency.step_ms(shape.width, shape.depth, result.verified, result.context_len)

    def _limit_unchecked(self, slowness: float) -> float:
        """A speculative step's slowness, limited and checked if plain steps were not measured recently."""
        self._steps_since_plain += 1
        limit = SUSPECT_SLOWNESS * self._plain_slowness
        if slowness <= limit or self._steps_since_plain <= CHECK_INTERVAL:
            return slowness
        self._checks_left = CHECK_STEPS
        return limit

    def _observe_plain(self, slowness: float) -> None:
        self._steps_since_plain = 0
        if not self._checks_left:
            self._average_plain(slowness)
            return
        self._checks_left -= 1
        if not self._checks_left:
            self._plain_slowness = slowness

    def _average_plain(self, slowness: float) -> None:
        self._plain_slowness += (1 - PLAIN_MEMORY) * (slowness - self._plain_slowness)
