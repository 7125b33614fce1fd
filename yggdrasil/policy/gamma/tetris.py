"""TETRIS: a fixed speculative length; only the most probable draft tokens of the batch are verified."""

from __future__ import annotations

import math
from typing import Any

from yggdrasil.errors import ConfigError
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.policy.gamma.protocol import Load
from yggdrasil.step.choice import VerifyMenu

__all__ = ["Tetris"]


class Tetris(FixedGamma):
    """Drafts gamma tokens for every row and verifies a share of them: the likeliest of the batch.

    Args:
        gamma: Draft tokens of every row.
        share: Share of the batch's draft tokens to verify; above 0, at most 1.

    Source: Wu et al. 2025 as described in Nightjar section 6.1. Departures: the budget is a share of the
    drafts instead of a capacity in tokens, and never more than the menu holds; the batcher ranks tokens by
    their path probability.

    >>> Tetris(5, share=0.6).choose(Load(batch_size=3, deepest=5)).menu.nodes
    (9,)
    """

    def __init__(self, gamma: int, *, share: float) -> None:
        if not 0 < share <= 1:
            raise ConfigError("share", share, "above 0 and at most 1")
        super().__init__(gamma)
        self.share = share

    def select(self, load: Load) -> int:
        return min(self.gamma, load.deepest)

    def menu(self, load: Load, gamma: int, num_drafts: int) -> VerifyMenu:
        """One entry: the share of the drafts."""
        # rounding: 0.6 * 15 is not 9 in binary
        num_verified = math.ceil(round(self.share * num_drafts, 6))
        if load.drafts_max is not None:
            num_verified = min(num_verified, load.drafts_max)
        return VerifyMenu((num_verified,), (1.0,))

    @property
    def state(self) -> dict[str, Any]:
        return {"gamma": self.gamma, "share": self.share}
