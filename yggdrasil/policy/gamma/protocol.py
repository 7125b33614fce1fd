"""What every row of a batch drafts in a step: the protocol of all policies, and the base of chains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from yggdrasil.state import PLAIN, Row, Shape, StepResult
from yggdrasil.step.choice import Calibration, Choice, VerifyMenu

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
        calibrations: One for every row that decodes, in the order of the batch.
        depth_limits: Most draft tokens of a path that each of these rows can still use: the limit of its
            request and the rest of its output. Empty if only `deepest` limits them.
        rows: These rows; empty if unknown.
        nodes_max: Most nodes of each drafted tree, the root not counted: what the pages hold.
    """

    batch_size: int
    deepest: int
    previous_gamma: int = 0
    max_lag: int = 0
    waiting_tokens: int = 0
    drafts_max: int | None = None
    calibrations: tuple[Calibration, ...] = ()
    depth_limits: tuple[int, ...] = ()
    rows: Sequence[Row] = ()
    nodes_max: int = 0

    @property
    def row_limits(self) -> tuple[int, ...]:
        """Most draft tokens of a path, row by row."""
        return self.depth_limits or (self.deepest,) * self.batch_size

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
        gamma: Speculative length that was selected.
        drafted: Draft tokens verified, row by row.
        emitted: Tokens emitted, row by row: accepted + 1.
        seconds: Wall clock of the step.
        catch_up_seconds: The part of it that brought the draft's KV up to the text: after steps without
            the draft, and in rows whose prompt is new.
        draft_seconds: The part of it that grew the trees.
        verify_seconds: The part of it in the target's forward.
        prompt_tokens: Prompt tokens that ran in the same step, roots included. If there are any, the time
            does not belong to the arm alone.
        values: For every row the calibrated acceptance of each token that it drafted, verified or not;
            empty if unknown.
        results: Of every row; empty if unknown.
    """

    load: Load
    gamma: int
    drafted: Sequence[int]
    emitted: Sequence[int]
    seconds: float
    catch_up_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
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
    """Chooses what the rows draft and what is verified, and observes the outcome of the step.

    A step may compute prompts as well. Its acceptance counts in any case; a policy whose reward is goodput
    ignores its time.
    """

    def choose(self, load: Load) -> Choice:
        """One shape for every row that decodes, and the menu of the batch.

        No shape is deeper than `load.deepest` or the limit of its row, and the menu verifies at most
        `load.drafts_max` nodes. Cost: below 50 microseconds for chains.
        """
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step."""
        ...

    def plain_ms(self, load: Load) -> float:
        """Milliseconds of a plain step of these rows, as far as the policy knows them; 0 if it does not."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """What the policy has learnt, for `/server_info`: JSON values."""
        ...


class ChainPolicy(ABC):
    """A `BatchPolicy` of a speculative length: every row drafts a chain of gamma tokens."""

    def choose(self, load: Load) -> Choice:
        """Chains of gamma tokens, shorter in rows that can use fewer."""
        gamma = self.select(load)
        depths = [min(gamma, limit) for limit in load.row_limits]
        menu = self.menu(load, gamma, sum(depths))
        return Choice(tuple(map(_chain, depths)), load.calibrations, menu, gamma)

    @abstractmethod
    def select(self, load: Load) -> int:
        """Draft tokens for every row, from 0 (the draft does not run) to `load.gamma_max`.

        A policy whose menu leaves drafts out may go up to `load.deepest`. Cost: below 20 microseconds.
        """

    def menu(self, load: Load, gamma: int, num_drafts: int) -> VerifyMenu:
        """The numbers of drafts that may be verified; here all of them.

        Args:
            load: The load that was passed to `select`.
            gamma: The speculative length that was selected.
            num_drafts: Draft tokens of the batch; fewer than B * gamma if rows have limits.
        """
        return VerifyMenu((num_drafts,), (1.0,))

    @abstractmethod
    def observe(self, outcome: Outcome) -> None:
        """Learn from a step."""

    def plain_ms(self, load: Load) -> float:
        """Unknown: a policy of chains does not decide about cohorts."""
        return 0.0

    @property
    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What the policy has learnt: JSON values."""


@cache
def _chain(depth: int) -> Shape:
    """The shape of a chain; the menu of the batch limits what is verified of it."""
    return Shape(1, depth) if depth else PLAIN
