"""The same speculative length for every step."""

from __future__ import annotations

from typing import Any

from yggdrasil.policy.gamma.protocol import ChainPolicy, Load, Outcome

__all__ = ["FixedGamma"]


class FixedGamma(ChainPolicy):
    """Standard speculative decoding ("SD"); at gamma 0 the draft never runs ("w/o SD").

    Args:
        gamma: Draft tokens of every row; fewer if the menu holds fewer.

    Source: Nightjar section 6.1, baselines.

    >>> FixedGamma(3).select(Load(batch_size=8, deepest=2))
    2
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def select(self, load: Load) -> int:
        return min(self.gamma, load.gamma_max)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""

    @property
    def state(self) -> dict[str, Any]:
        return {"gamma": self.gamma}
