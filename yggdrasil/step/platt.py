"""Platt scaling: from the draft's probability of a child to the probability that the target takes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["UNSCALED", "PlattScale"]


@dataclass(frozen=True)
class PlattScale:
    """P(target takes child | it took the parent) = sigmoid(slope * logit(p) + offset), p from the draft.

    A greedy target takes the draft's best token far more often than p, a target at high temperature less
    often. A path multiplies its edges. So the draft's own path probability is too low or too high for deep
    paths, and no monotone map of it can correct the order.

    Args:
        slope: Above 0, so siblings keep their order.
        offset: In log-odds.

    Example:
        >>> round(math.exp(PlattScale(slope=2.0, offset=1.0).log(math.log(0.7))), 3)
        0.937

    Source: Platt 1999. Departure from Yggdrasil section 4.2, where the draft's path probability itself
    orders the nodes.
    """

    slope: float
    offset: float

    def log(self, log_prob: float) -> float:
        """The scaled log-probability of a draft's log-probability."""
        if self == UNSCALED:
            return log_prob
        complement = -math.expm1(min(log_prob, 0.0))
        if complement == 0.0:
            return 0.0
        log_odds = self.slope * (log_prob - math.log(complement)) + self.offset
        return min(log_odds, 0.0) - math.log1p(math.exp(-abs(log_odds)))

    def logs(self, log_probs: Tensor) -> Tensor:
        """`log` of every entry, on its device. The unscaled scale returns its argument.

        Cost: a dozen small operators, no sync. `logsigmoid` would wake torch's threads for any size.
        """
        if self == UNSCALED:
            return log_probs
        exact = log_probs.double().clamp(max=0.0)  # rounding may lift a probability of 1 above it
        log_odds = self.slope * (exact - (-exact.expm1()).log()) + self.offset
        scaled = log_odds.clamp(max=0.0) - (-log_odds.abs()).exp().log1p()
        return scaled.to(log_probs.dtype)


UNSCALED = PlattScale(1.0, 0.0)  # the draft's probabilities as they are
