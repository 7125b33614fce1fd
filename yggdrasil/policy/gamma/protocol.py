"""What the draft does for every row of a batch: the protocol of all policies, and the base of chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from yggdrasil.state import PLAIN, Row, Shape, StepResult
from yggdrasil.step.choice import VERIFY_ALL, Calibration, Choice, VerifyMenu

__all__ = ["BatchPolicy", "ChainPolicy", "Load", "Outcome"]


@dataclass(frozen=True)
class Load:
    """What is known before a step.

    Args:
        batch_size: B, rows that decode, at least 1.
        deepest: Largest speculative length that settings and pages allow; may be 0.
        previous_gamma: Speculative length of the previous step, at any batch size; 0 before the first.
        max_lag: L_max: tokens by which the draft's KV lags in the worst row that may speculate.
        waiting_tokens: Prompt tokens that wait to run in the same step, at most the largest graph.
        drafts_max: Draft tokens of the whole batch that can be verified: what the menu holds in addition
            to the roots. None if there is no limit.
        rows: The rows that decode.
        limits: Most draft tokens of a path of each row: what its request allows and can still emit.
        calibrations: Of each row, by its temperature.
        nodes_max: Most nodes of each drafted tree but the root: what the pages hold.
    """

    batch_size: int
    deepest: int
    previous_gamma: int = 0
    max_lag: int = 0
    waiting_tokens: int = 0
    drafts_max: int | None = None
    rows: Sequence[Row] = ()
    limits: Sequence[int] = ()
    calibrations: Sequence[Calibration] = ()
    nodes_max: int = 0

    @property
    def gamma_max(self) -> int:
        """Largest speculative length whose verification, B * (gamma + 1) tokens, the menu holds."""
        if self.drafts_max is None:
            return self.deepest
        return min(self.deepest, self.drafts_max // self.batch_size)


@dataclass(frozen=True)
class Outcome:
    """What a step did.

    Args:
        load: The load before the step.
        gamma: Speculative length that ran.
        drafted: Draft tokens verified, row by row.
        emitted: Tokens emitted, row by row: accepted + 1.
        seconds: Wall clock of the step.
        catch_up_seconds: The part of it that brought the draft's KV up to the text: after steps without
            the draft, and in rows whose prompt is new.
        prompt_tokens: Prompt tokens that ran in the same step, roots included. If there are any, the time
            does not belong to the arm alone.
        values: For every row the calibrated acceptance of each token that it drafted, verified or not;
            empty if unknown.
        results: Of every row.
    """

    load: Load
    gamma: int
    drafted: Sequence[int]
    emitted: Sequence[int]
    seconds: float
    catch_up_seconds: float = 0.0
    prompt_tokens: int = 0
    values: Sequence[Sequence[float]] = ()
    results: Sequence[StepResult] = ()

    @property
    def is_timed(self) -> bool:
        """Whether the time belongs to the arm alone."""
        return self.prompt_tokens == 0

    @property
    def goodput(self) -> float:
        """Realised tokens per second: the reward. Source: Nightjar section 4.1."""
        return sum(self.emitted) / self.seconds


class BatchPolicy(Protocol):
    """Chooses the trees of a step over rows and observes its outcome.

    A step may compute prompts as well. Its acceptance counts in any case; a policy whose reward is goodput
    ignores its time."""

    def choose(self, load: Load) -> Choice:
        """A shape for every row of the load, and the numbers that the step reads; once per step."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """What the policy has learnt, for `/server_info`: JSON values."""
        ...


class ChainPolicy:
    """The base of policies of a speculative length: every row drafts a chain of gamma tokens.

    A policy defines `select`, `observe` and `state`; one that leaves drafts out also defines `menu`.
    """

    def choose(self, load: Load) -> Choice:
        gamma = self.select(load)
        depths = [min(gamma, limit) for limit in load.limits]
        shapes = tuple(Shape(1, depth) if depth else PLAIN for depth in depths)
        menu = self.menu(load, gamma, sum(depths)) if gamma else VERIFY_ALL
        return Choice(shapes, tuple(load.calibrations), menu)

    def select(self, load: Load) -> int:
        """Draft tokens for every row, from 0 (the draft does not run) to `load.gamma_max`.

        A policy whose `menu` leaves drafts out may go up to `load.deepest`. Cost: below 20 microseconds.
        """
        raise NotImplementedError

    def menu(self, load: Load, gamma: int, num_drafts: int) -> VerifyMenu:
        """How many drafts of the batch may be verified, at most `load.drafts_max`: all of them here.

        Args:
            load: The load that was passed to `select`.
            gamma: The speculative length that was selected.
            num_drafts: Draft tokens of all rows.
        """
        return VERIFY_ALL

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step; does nothing here."""

    @property
    def state(self) -> dict[str, Any]:
        return {}
