"""The predicted step before any observation, from measured latencies and calibrated acceptance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from yggdrasil.errors import ConfigError
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.gamma.budget import PROMPT_TOKENS, prompt_budget
from yggdrasil.policy.latency import Curve, LatencyModel

__all__ = ["Budget", "GoodputPrior", "SwitchingCost", "predicted_goodput"]

SwitchingCost = Callable[[int, int], float]
"""c_prefill: seconds until the draft's KV is complete again, by lag in tokens and batch size.

Source: Nightjar section 4.2, Table 3.
"""


class Budget(NamedTuple):
    """Tokens of a step and its predicted time.

    Args:
        verified: Draft tokens of the batch that are verified.
        prompt_tokens: Prompt tokens that run in the same step.
        seconds: Predicted time of the step.
    """

    verified: int
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True)
class GoodputPrior:
    """The predicted step of B rows at a speculative length.

    Args:
        drafting: Seconds of drafting, by batch size and gamma; 0 at gamma 0.
        verifying: Seconds of everything else, by the tokens of the forward: roots, drafts and prompts.
        emitted: Tokens of a row in a step, by gamma; 1 at gamma 0.
        undrafted: The same of a step at gamma 0, whose target may still be in the caches; None takes
            `verifying`.
        widths: Sizes of the graphs, ascending; above each of them `verifying` jumps.
        selection_gain: Factor for accepted tokens, by gamma and draft tokens verified per row: the
            likeliest tokens of a large batch are verified, compared with leaving out the last positions of
            every row.

    >>> prior = GoodputPrior(
    ...     drafting=lambda batch_size, gamma: 0.002 * gamma,
    ...     verifying=lambda tokens: 0.01,
    ...     emitted=lambda gamma: 1 + 0.5 * gamma,
    ... )
    >>> prior.seconds(8, 2)
    0.014
    """

    drafting: Callable[[int, int], float]
    verifying: Callable[[int], float]
    emitted: Callable[[int], float]
    undrafted: Callable[[int], float] | None = None
    widths: tuple[int, ...] = ()
    selection_gain: Callable[[int, float], float] = lambda gamma, drafts_per_row: 1.0

    def width(self, tokens: int) -> int:
        """The size of the graph that runs this many tokens; 0 if graphs are not known."""
        largest = self.widths[-1] if self.widths else 0
        return next((width for width in self.widths if width >= tokens), largest)

    def seconds(
        self, batch_size: int, gamma: int, verified: int | None = None, prompt_tokens: int = 0
    ) -> float:
        """Seconds of a step; `verified` is the number of draft tokens that are verified, None for all."""
        drafts = batch_size * gamma if verified is None else verified
        forward = self.verifying if gamma or self.undrafted is None else self.undrafted
        return self.drafting(batch_size, gamma) + forward(batch_size + drafts + prompt_tokens)

    def budgets(
        self,
        batch_size: int,
        gamma: int,
        waiting: int = 0,
        drafts: int | None = None,
        drafts_max: int | None = None,
    ) -> list[Budget]:
        """The choices of how many drafts to verify: as many as possible, or as fill a narrower graph.

        Args:
            gamma: Draft tokens of a row.
            waiting: Prompt tokens that wait.
            drafts: Draft tokens of the batch, if some rows have fewer than gamma; None for B * gamma.
            drafts_max: Draft tokens that can be verified; None for all.

        Returns:
            At least one; `verified` ascends and does not repeat.
        """
        drafts = batch_size * gamma if drafts is None else drafts
        reserved = batch_size + min(waiting, PROMPT_TOKENS)
        most = drafts if drafts_max is None else min(drafts, drafts_max)
        filling = [width - reserved for width in self.widths if 0 < width - reserved < most]
        return [self._budget(batch_size, gamma, verified, waiting) for verified in (*filling, most)]

    def accepted_when_truncated(self, gamma: int, drafts_per_row: float) -> float:
        """Accepted tokens of a row if every row leaves out its last positions."""
        whole = min(int(drafts_per_row), gamma - 1)
        gain = self.emitted(whole + 1) - self.emitted(whole)
        return self.emitted(whole) + (drafts_per_row - whole) * gain - 1.0

    def _budget(self, batch_size: int, gamma: int, verified: int, waiting: int) -> Budget:
        prompt_tokens = prompt_budget(self.widths, batch_size + verified, waiting) if waiting else 0
        return Budget(verified, prompt_tokens, self.seconds(batch_size, gamma, verified, prompt_tokens))


def predicted_goodput(latency: LatencyModel, acceptance: Acceptance, context_len: int) -> GoodputPrior:
    """The prior of a compiled pair.

    A step is gamma draft forwards of B tokens, one verification of B * (gamma + 1) tokens, and the time of
    the host. A chain longer than the calibrated depth is expected to emit no more.

    Args:
        acceptance: Calibration of this pair; it must contain width 1.
        context_len: Tokens of context of a typical row.

    Raises:
        ConfigError: The pair was calibrated without chains.
    """
    if 1 not in acceptance.aal:
        raise ConfigError(
            "widths",
            sorted(acceptance.aal),
            "a menu with width 1, for batches draft chains",
            "compile the pair again",
        )

    @cache
    def drafting(batch_size: int, gamma: int) -> float:
        if gamma == 0:
            return 0.0
        forward_ms = _graphs_ms(latency.draft, batch_size, latency.draft.widest, context_len)
        draft_ms = forward_ms + latency.growth_host_ms
        return (gamma * draft_ms + latency.step_host_ms - latency.plain_host_ms) / 1e3

    @cache
    def forward_ms(num_tokens: int) -> float:
        return _graphs_ms(latency.verify, num_tokens, latency.verify.sizes[-1], context_len)

    def verifying(num_tokens: int) -> float:
        return (forward_ms(num_tokens) + latency.plain_host_ms) / 1e3

    def undrafted(num_tokens: int) -> float:
        return (latency.plain_share * forward_ms(num_tokens) + latency.plain_host_ms) / 1e3

    @cache
    def emitted(gamma: int) -> float:
        depth = min(gamma, acceptance.max_depth)
        return acceptance.expected_emitted(1, depth, depth + 1) if depth else 1.0

    def selection_gain(gamma: int, drafts_per_row: float) -> float:
        depth = min(gamma, len(acceptance.pooled))
        drafts_per_row = min(drafts_per_row, depth)
        accepted = prior.accepted_when_truncated(depth, drafts_per_row) if depth else 0.0
        if accepted <= 0:
            return 1.0
        return max(1.0, acceptance.pooled_accepted(depth, drafts_per_row) / accepted)

    prior = GoodputPrior(drafting, verifying, emitted, undrafted, latency.verify.sizes, selection_gain)
    return prior


def _graphs_ms(curve: Curve, num_tokens: int, widest: int, context_len: int) -> float:
    """Milliseconds of full graphs one after another, and of one graph for the rest."""
    full, rest = divmod(num_tokens, widest)
    return full * curve.at(widest, context_len) + (curve.at(rest, context_len) if rest else 0.0)
