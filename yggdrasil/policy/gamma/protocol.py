"""How many tokens the draft guesses ahead for every row of a batch: one protocol, its policies side by
side.
"""

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
        deepest: Greatest speculative length that settings and pages allow; may be 0.
        previous_gamma: Of the step before, at whatever batch size; 0 before the first.
        max_lag: L_max: tokens that the draft's KV lags behind in the worst row that may speculate.
        waiting_tokens: Tokens of prompts that wait; more than the largest graph holds count as
            that.
        drafts_max: Draft tokens of the whole batch that can be verified: what the menu holds next to the
            roots. None where it holds all.
    """

    batch_size: int
    deepest: int
    previous_gamma: int = 0
    max_lag: int = 0
    waiting_tokens: int = 0
    drafts_max: int | None = None

    @property
    def gamma_max(self) -> int:
        """Greatest speculative length whose verification, B * (gamma + 1) tokens, the menu holds."""
        return (
            self.deepest
            if self.drafts_max is None
            else min(self.deepest, self.drafts_max // self.batch_size)
        )


@dataclass(frozen=True)
class Outcome:
    """What a step did.

    Args:
        drafted: Draft tokens verified, row by row.
        emitted: Tokens emitted, row by row: accepted + 1.
        seconds: Wall clock of the step.
        catch_up_seconds: What of it brought the draft's KV up to the text: after steps without it, and of
            rows whose prompt is new.
        prompt_tokens: Tokens of prompts in the same step, roots included: where there are any, the time is
            not the arm's alone.
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
        """Whether the time is the arm's alone."""
        return self.prompt_tokens == 0

    @property
    def goodput(self) -> float:
        """Realised tokens per second: the reward. Source: Nightjar section 4.1."""
        return sum(self.emitted) / self.seconds


class GammaPolicy(Protocol):
    """Selects gamma before a step and sees what came of it.

    A step may compute prompts as well. What it shows about acceptance counts all the same; a policy whose
    reward is the goodput leaves it out."""

    def select(self, load: Load) -> int:
        """Draft tokens for every row, from 0 (the draft does not run) to `load.gamma_max`; to
        `load.deepest` by who picks. Cost: below 20 microseconds.
        """
        ...

    def verified(self, load: Load, gamma: int, values: Sequence[Sequence[float]]) -> int:
        """How many of the batch's draft tokens are verified, at most `load.drafts_max`; the most probable
        ones are.

        Args:
            load: As it was selected for.
            gamma: What was selected.
            values: For every row the calibrated acceptance of each token that it drafted: that of its whole
                path, so never rising.
        """
        ...

    def observe(self, outcome: Outcome) -> None:
        """What the step did."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """What it has learnt, for `/server_info`: JSON values."""
        ...
