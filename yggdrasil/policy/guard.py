"""Never slower: speculation runs on a credit of milliseconds, and plain decoding runs while there is none."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import NativeCosts, ShapePolicy
from yggdrasil.state import PLAIN, DecodeState, Shape, StepResult
from yggdrasil.step.platt import PlattScale

__all__ = ["Guard"]

START_STEPS = 2.25  # plain steps' worth of milliseconds that a session may lose before it is known to lose
PROBE_STEPS = 0.25  # plain steps' worth at which a stopped session tries again
SHARE = 0.0075  # of the time that passes becomes credit: what trying again may cost
MOST_STEPS = 16.0  # plain steps' worth that a winning session can save up for a losing passage
PLAIN_MEMORY = 0.8
SLOWER = 1.25  # times the pace of plain steps: more is a question of whose fault it is
MEASURED_STEPS = 64  # speculative steps after which a plain step's pace is too old an answer
ANSWER_STEPS = 2  # plain steps that give a new one


@dataclass
class Guard:
    """A policy that follows another one while speculation is measured to pay, and decodes plainly while it
    is not.

    A token bucket of milliseconds: a speculative step pays its wall clock and earns what plain decoding
    would have taken for its tokens; a small share of all time passing is earned as well, so an exhausted
    session probes again, the later the more it lost. What a session can lose against plain decoding is
    therefore START_STEPS steps and SHARE of its time, whatever the draft does. Before it probes, a draft
    that has fallen behind is caught up, a chunk a step; that is paid for as well.

    Where speculative steps take longer than the profile has them, the machine is busy, or the profile is
    wrong about them. Two plain steps decide which: until then the surplus does not count.

    Args:
        inner: Decides while there is credit.
        latency: What a plain step takes before this session has measured one.

    Source: design, "never slower"; the paper has no guard.
    """

    inner: ShapePolicy
    latency: LatencyModel
    speculating: bool = field(default=True, init=False)
    _credit_ms: float | None = field(default=None, init=False, repr=False)
    _plain_over_profile: float = field(default=1.0, init=False, repr=False)
    _slowness: dict[bool, float] = field(default_factory=dict, init=False, repr=False)
    _since_plain: int = field(default=MEASURED_STEPS, init=False, repr=False)
    _asking: int = field(default=0, init=False, repr=False)

    def choose(self, state: DecodeState) -> Shape:
        return self.inner.choose(state) if self.speculating and not self._asking else PLAIN

    @property
    def platt(self) -> PlattScale:
        return self.inner.platt

    @property
    def knots(self) -> Tensor:
        return self.inner.knots

    def verify_costs(
        self, shape: Shape, num_nodes: int, context_len: int, lag: int
    ) -> tuple[list[int], list[float]]:
        return self.inner.verify_costs(shape, num_nodes, context_len, lag)

    @property
    def native_costs(self) -> NativeCosts | None:
        return self.inner.native_costs

    def observe(self, result: StepResult) -> None:
        """Settle the step's account."""
        plain_ms = self.latency.plain_ms(result.context_len) * self._plain_over_profile
        if self._credit_ms is None:
            self._credit_ms = START_STEPS * plain_ms
        ms = self._settled_ms(result)
        if result.shape.depth > 0 or result.caught_up:
            self._credit_ms += len(result.tokens) * plain_ms - ms
        self._credit_ms = min(self._credit_ms + SHARE * ms, MOST_STEPS * plain_ms)
        self.speculating = result.caught_up or self._credit_ms >= (
            0.0 if self.speculating else PROBE_STEPS * plain_ms
        )
        self.inner.observe(result)

    def _settled_ms(self, result: StepResult) -> float:
        """The step's milliseconds; a hiccup of the machine is not the draft's fault, so slowness counts
        when two steps in a row have it.
        """
        if result.caught_up:
            return result.ms
        shape = result.shape
        predicted_ms = self.latency.step_ms(shape.width, shape.depth, result.verified, result.context_len)
        is_plain = shape.depth == 0
        slowness = result.ms / predicted_ms
        settled = min(slowness, self._slowness.get(is_plain, 1.0))
        self._slowness[is_plain] = slowness
        if is_plain:
            self._answer(settled)
        else:
            settled = self._unquestioned(settled)
            # a machine faster than its profile decodes plainly faster as well
            if True not in self._slowness:
                self._remember(min(1.0, settled))
        return settled * predicted_ms

    def _unquestioned(self, slowness: float) -> float:
        """What of a speculative step's slowness counts: all, once plain steps have shown their own pace."""
        self._since_plain += 1
        most = SLOWER * self._plain_over_profile
        if slowness <= most or self._since_plain <= MEASURED_STEPS:
            return slowness
        self._asking = ANSWER_STEPS
        return most

    def _answer(self, slowness: float) -> None:
        self._since_plain = 0
        if self._asking:
            self._asking -= 1
            if not self._asking:
                self._plain_over_profile = slowness
        else:
            self._remember(slowness)

    def _remember(self, slowness: float) -> None:
        self._plain_over_profile += (1 - PLAIN_MEMORY) * (slowness - self._plain_over_profile)
