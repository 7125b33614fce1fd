"""One text, decoded over and over while forms of an iteration are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from yggdrasil.config import SamplingConfig
from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.state import DecodeState, StepResult
from yggdrasil.step.draft import prefill
from yggdrasil.step.sampling import gumbel_noise

__all__ = ["NoRoom", "Step", "Workload"]

Step = Callable[[DecodeState, ShapePolicy], StepResult]


class NoRoom(Exception):
    """The next iteration would end after the deadline, or after the end of the context."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is decoded while a plan is measured.

    Args:
        target: Its cache is used up.
        draft: Its cache is used up.
        step: What runs without a plan: `Engine.fast_step` of an engine over both that has none.
        step_ms: What an iteration is expected to take.
        prompt: At least one token.
        policy: Best a fixed shape, so that every run does the same work.
        max_context: Most tokens of prompt and output together.
        sampling: Of the text; greedy when not given.
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

    def iterations(self, step: Step, num_steps: int, deadline: float) -> Iterator[float]:
        """Decode the prompt from its start: the text, and the work of an iteration, is always the same.

        Args:
            step: Runs an iteration.
            num_steps: How many to run behind the first, which has no head ahead of time.
            deadline: Of `time.perf_counter`.

        Yields:
            Milliseconds of every iteration on the calling thread; `wait` for what it left to the device.

        Raises:
            NoRoom: before an iteration that would end too late if it took as long as the last one.
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
        """Milliseconds of an iteration behind the first, the device's included.

        Only the ends of the run wait for the device: what it does from one iteration into the next is
        part of a form. Arguments and errors as for `iterations`.
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
        """Until the device has done what it was given."""
        if self.draft.device == "cuda":
            torch.cuda.synchronize()  # sync: a measured run has a duration when all of it is done

    def _start(self) -> DecodeState:
        for model in (self.target, self.draft):
            model.cache.rollback_(len(self.prompt) - 1)
        gumbel_noise.cache_clear()  # the last run drew the noise of these very positions
        return DecodeState(list(self.prompt), self.sampling)
