"""How many tokens the draft guesses ahead for every row of a batch: the protocol of all policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["GammaPolicy", "Load", "Outcome"]


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
    """

    batch_size: int
    deepest: int
    previous_gamma: int = 0
    max_lag: int = 0
    waiting_tokens: int = 0
    drafts_max: int | None = None

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
    """

    load: Load
    gamma: int
    drafted: Sequence[int]
    emitted: Sequence[int]
    seconds: float
    catch_up_seconds: float = 0.0
    prompt_tokens: int = 0
    values: Sequence[Sequence[float]] = ()

    @property
    def is_timed(self) -> bool:
        """Whether the time belongs to the arm alone."""
        return self.prompt_tokens == 0

    @property
    def goodput(self) -> float:
        """Realised tokens per second: the reward. Source: Nightjar section 4.1."""
        return sum(self.emitted) / self.seconds


class GammaPolicy(Protocol):
    """Selects gamma before a step and observes its outcome.

    A step may compute prompts as well. Its acceptance counts in any case; a policy whose reward is goodput
    ignores its time."""

    def select(self, load: Load) -> int:
        """Draft tokens for every row, from 0 (the draft does not run) to `load.gamma_max`.

        A policy whose `verified` leaves drafts out may go up to `load.deepest`. Cost: below 20
        microseconds.
        """
        ...

    def verified(self, load: Load, gamma: int, values: Sequence[Sequence[float]]) -> int:
        """Draft tokens of the batch to verify, at most `load.drafts_max`; the most probable are taken.

        Args:
            load: The load that was passed to `select`.
            gamma: The speculative length that was selected.
            values: For every row the calibrated acceptance of each token that it drafted. It is that of the
                token's whole path, so it never rises along a row.
        """
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """What the policy has learnt, for `/server_info`: JSON values."""
        ...
