"""How likely the target takes an edge of the tree, given what the draft says of it: Platt scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

__all__ = ["UNSCALED", "PlattScale"]


@dataclass(frozen=True)
class PlattScale:
    """P(the target takes a child, having taken its parent) = sigmoid(slope * logit(p) + offset), where the
    draft gives the child p.

    A greedy target takes the draft's best token far more often than p says, a hot one less often. A path
    multiplies its edges, so the draft's own path probability calls deep paths too unlikely, or too likely,
    and no monotone map of it can mend the order.

    Args:
        slope: Above 0: siblings keep their order.
        offset: In log-odds.

    Example:
        >>> round(math.exp(PlattScale(slope=2.0, offset=1.0).log(math.log(0.7))), 3)
        0.937

    Source: Platt 1999. Departure from Yggdrasil section 4.2, where the draft's path probability itself
    orders the nodes."""

    slope: float
    offset: float

    def log(self, log_prob: float) -> float:
        """The logarithm of that probability, from the draft's log-probability."""
        if self == UNSCALED:
            return log_prob
        complement = -math.expm1(min(log_prob, 0.0))
        if complement == 0.0:
            return 0.0
        log_odds = self.slope * (log_prob - math.log(complement)) + self.offset
        return min(log_odds, 0.0) - math.log1p(math.exp(-abs(log_odds)))

    def logs(self, log_probs: Tensor) -> Tensor:
        """`log` of every entry, where they are: seven small operators, no sync. Unscaled, they are returned
        as they are.
        """
        if self == UNSCALED:
            return log_probs
        log_probs = log_probs.clamp(max=0.0)  # rounding may lift a certainty above it
        return logsigmoid(self.slope * (log_probs - (-log_probs.expm1()).log()) + self.offset)


UNSCALED = PlattScale(1.0, 0.0)  # takes the draft at its word
