"""One text, decoded over and over while forms of an iteration are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import ConfigError
from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.state import DecodeState, StepResult
from yggdrasil.step.draft import prefill
from yggdrasil.step.sampling import gumbel_noise

__all__ = ["OutOfTime", "Step", "Workload"]

Step = Callable[[DecodeState, ShapePolicy], StepResult]


class OutOfTime(Exception):
    """The deadline comes before the end of the next iteration."""


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

    Raises:
        ConfigError: the context has no room for two iterations after the prompt.
    """

    target: TokenModel
    draft: TokenModel
    step: Step
    step_ms: float
    prompt: Sequence[int]
    policy: ShapePolicy
    max_context: int
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        allowed = self._last_root - self.draft.max_depth - 1
        if not 1 <= len(self.prompt) <= allowed:
            allows = f"1 to {allowed} for a context of {self.max_context}"
            raise ConfigError("prompt", f"{len(self.prompt)} tokens", allows)

    @property
    def _last_root(self) -> int:
        return self.max_context - self.draft.max_depth - 1

    def prefill(self) -> None:
        """Put the prompt into both caches, where `iterations` finds it."""
        for model in (self.target, self.draft):
            model.cache.rollback_(0)
            prefill(model, [*self.prompt[:-1]])

    def iterations(self, step: Step, num_steps: int, deadline: float) -> Iterator[float]:
        """Decode the prompt from its start; the text, and so the work of the i-th iteration, is the same every time.

        Args:
            step: Runs an iteration.
            num_steps: How many to run behind the first, which has no head ahead of time and should not count.
            deadline: Of `time.perf_counter`.

        Yields:
            Milliseconds of every iteration on the calling thread; `wait` for what it left to the device. Ends early at the end of the context.

        Raises:
            OutOfTime: before an iteration that would end after the deadline if it took as long as the last one.
        """
        state, seconds = self._start(), self.step_ms / 1e3
        for _ in range(num_steps + 1):
            if len(state.tokens) > self._last_root:
                return
            begin = time.perf_counter()
            if begin + seconds > deadline:
                raise OutOfTime
            step(state, self.policy)
            seconds = time.perf_counter() - begin
            yield seconds * 1e3

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.draft.device == "cuda":
            torch.cuda.synchronize()  # sync: a measured run has a duration when all of it is done

    def _start(self) -> DecodeState:
        for model in (self.target, self.draft):
            model.cache.rollback_(len(self.prompt) - 1)
        gumbel_noise.cache_clear()  # the last run drew the noise of these very positions
        return DecodeState(list(self.prompt), self.sampling)
