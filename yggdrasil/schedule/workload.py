"""One text that is decoded repeatedly while forms of an iteration are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from yggdrasil.config import SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.state import DecodeState, StepResult
from yggdrasil.step.growth import prefill
from yggdrasil.step.plan import Plan
from yggdrasil.step.rows import StepOverRows
from yggdrasil.step.sampling import gumbel_noise
from yggdrasil.trace import Trace

__all__ = ["NoRoom", "Step", "Workload"]

Step = Callable[[DecodeState, ShapePolicy], StepResult]


class NoRoom(Exception):
    """The next iteration would end after the deadline, or after the end of the context."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The text that is decoded while a plan is measured.

    Args:
        target: Its cache is overwritten.
        draft: Its cache is overwritten.
        step: The step without a plan: `Engine.step` of an engine without plans.
        step_ms: Expected milliseconds of an iteration.
        prompt: At least one token.
        policy: Preferably a fixed shape, so that every run does the same work.
        max_context: Maximum tokens of prompt and output together.
        sampling: Greedy when not given.
    """

    target: TokenModel
    draft: TokenModel
    step: Step
    step_ms: float
    prompt: Sequence[int]
    policy: ShapePolicy
    max_context: int
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def prefill(self) -> None:
        """Put the prompt into both caches, where `iterations` finds it."""
        for model in (self.target, self.draft):
            model.cache.rollback_(0)
            prefill(model, [*self.prompt[:-1]])

    def step_by(self, plan: Plan, trace: Trace) -> Step:
        """The step by a plan."""
        stepper = StepOverRows(self.target, self.draft, trace, plan)
        models = self.target, self.draft
        return Engine(*models, max_context=self.max_context, trace=trace, stepper=stepper).step

    def iterations(self, step: Step, num_steps: int, deadline: float) -> Iterator[float]:
        """Decode from the end of the prompt; the text, and the work of each iteration, is always the same.

        Args:
            num_steps: Iterations after the first one, which has no head drafted ahead of time.
            deadline: Value of `time.perf_counter`.

        Yields:
            Milliseconds of every iteration on the calling thread; call `wait` for the device's work.

        Raises:
            NoRoom: before an iteration that would end too late if it took as long as the last one, or that
                would not fit the context.
        """
        state = self._start()
        seconds = self.step_ms / 1e3
        last_root = self.max_context - self.draft.max_depth - 1
        for _ in range(num_steps + 1):
            begin = time.perf_counter()
            if begin + seconds > deadline or len(state.tokens) > last_root:
                raise NoRoom
            step(state, self.policy)
            seconds = time.perf_counter() - begin
            yield seconds * 1e3

    def mean_ms(self, step: Step, num_steps: int, deadline: float) -> float:
        """Mean milliseconds of the iterations after the first, with the device's time.

        Only the start and the end of the run wait for the device, since a form may leave work to the next
        iteration. Arguments and errors as for `iterations`.
        """
        run = self.iterations(step, num_steps, deadline)
        next(run)
        self.wait()
        start = time.perf_counter()
        for _ in run:
            pass
        self.wait()
        return (time.perf_counter() - start) * 1e3 / num_steps

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.draft.device == "cuda":
            torch.cuda.synchronize()  # sync: a run is measured until all its work is done

    def _start(self) -> DecodeState:
        for model in (self.target, self.draft):
            model.cache.rollback_(len(self.prompt) - 1)
        gumbel_noise.cache_clear()  # the last run drew the noise of the same positions
        return DecodeState(list(self.prompt), self.sampling)
