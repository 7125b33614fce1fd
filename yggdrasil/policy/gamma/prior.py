"""What a step is predicted to do before anything has been observed: from measured latencies and calibrated
acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from yggdrasil.errors import ConfigError
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.gamma.budget import PROMPT_TOKENS, prompt_room
from yggdrasil.policy.latency import Curve, LatencyModel

__all__ = ["Budget", "GoodputPrior", "SwitchingCost", "predicted_goodput"]

SwitchingCost = Callable[[int, int], float]
"""c_prefill: seconds until the draft's KV is there again, by lag in tokens and batch size. Source: Nightjar
section 4.2, Table 3.
"""


class Budget(NamedTuple):
    """Numbers of draft tokens and prompt tokens of a step, and its seconds."""

    verified: int
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True)
class GoodputPrior:
    """The predicted step of B rows at a speculative length.

    Args:
        drafting: Seconds of drafting, by batch size and gamma; 0 at gamma 0.
        verifying: Seconds of everything else, by the tokens that are verified: roots, drafts and prompts
            next to them.
        emitted: Tokens of a row in a step, by gamma; 1 at gamma 0.
        widths: Tokens beyond which `verifying` jumps, ascending: the sizes of the graphs.
        picking: By gamma and the draft tokens verified a row: what picking the likeliest of a great batch
            gains, as a multiple of the tokens that are accepted when the last positions of rows are left
            out.

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
    widths: tuple[int, ...] = ()
    picking: Callable[[int, float], float] = lambda gamma, drafts_per_row: 1.0

    def width(self, tokens: int) -> int:
        """The graph that holds this many tokens; 0 where graphs are not known."""
        return next(
            (width for width in self.widths if width >= tokens), self.widths[-1] if self.widths else 0
        )

    def seconds(
        self, batch_size: int, gamma: int, verified: int | None = None, prompt_tokens: int = 0
    ) -> float:
        """Seconds of a step that verifies this many draft tokens, by default all, and computes this many of
        prompts.
        """
        drafts = batch_size * gamma if verified is None else verified
        return self.drafting(batch_size, gamma) + self.verifying(batch_size + drafts + prompt_tokens)

    def budgets(
        self,
        batch_size: int,
        gamma: int,
        waiting: int = 0,
        drafts: int | None = None,
        most: int | None = None,
    ) -> list[Budget]:
        """What of a batch's drafts may be verified: all that can be, or what fills a narrower graph.

        Args:
            gamma: Draft tokens of a row.
            waiting: Prompt tokens that wait.
            drafts: Draft tokens that there are, where not every row has gamma of them.
            most: Draft tokens that can be verified, where that is not all.
        """
        drafts = batch_size * gamma if drafts is None else drafts
        taken = batch_size + min(waiting, PROMPT_TOKENS)
        most = drafts if most is None else min(drafts, most)
        filling = [width - taken for width in self.widths if 0 < width - taken < most]
        return [self._budget(batch_size, gamma, verified, waiting) for verified in (*filling, most)]

    def left_out(self, gamma: int, drafts_per_row: float) -> float:
        """Accepted tokens of a row when every row leaves out its last positions."""
        whole = min(int(drafts_per_row), gamma - 1)
        return (
            self.emitted(whole)
            + (drafts_per_row - whole) * (self.emitted(whole + 1) - self.emitted(whole))
            - 1.0
        )

    def _budget(self, batch_size: int, gamma: int, verified: int, waiting: int) -> Budget:
        prompt_tokens = prompt_room(self.widths, batch_size + verified, waiting) if waiting else 0
        return Budget(verified, prompt_tokens, self.seconds(batch_size, gamma, verified, prompt_tokens))


def predicted_goodput(latency: LatencyModel, acceptance: Acceptance, context_len: int) -> GoodputPrior:
    """The prior of a compiled pair.

    A step is gamma draft forwards of B tokens, one verification of B * (gamma + 1) tokens, and the host's
    share. Beyond the calibrated depth a longer chain is taken to emit no more.

    Args:
        acceptance: Calibration of this pair; width 1 must be in it.
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
        draft_ms = (
            _graphs_ms(latency.draft, batch_size, latency.draft.widest, context_len)
            + latency.growth_host_ms
        )
        return (gamma * draft_ms + latency.step_host_ms - latency.plain_host_ms) / 1e3

    @cache
    def verifying(num_tokens: int) -> float:
        return (
            _graphs_ms(latency.verify, num_tokens, latency.verify.sizes[-1], context_len)
            + latency.plain_host_ms
        ) / 1e3

    @cache
    def emitted(gamma: int) -> float:
        depth = min(gamma, acceptance.max_depth)
        return acceptance.expected_emitted(1, depth, depth + 1) if depth else 1.0

    def picking(gamma: int, drafts_per_row: float) -> float:
        depth = min(gamma, len(acceptance.pooled))
        drafts_per_row = min(drafts_per_row, depth)
        accepted = prior.left_out(depth, drafts_per_row) if depth else 0.0
        return (
            max(1.0, acceptance.pooled_accepted(depth, drafts_per_row) / accepted) if accepted > 0 else 1.0
        )

    prior = GoodputPrior(drafting, verifying, emitted, latency.verify.sizes, picking)
    return prior


def _graphs_ms(curve: Curve, num_tokens: int, widest: int, context_len: int) -> float:
    """Full graphs one after the other and one for the rest."""
    full, rest = divmod(num_tokens, widest)
    return full * curve.at(widest, context_len) + (curve.at(rest, context_len) if rest else 0.0)
