"""LinUCB and linear Thompson sampling: goodput as a linear function of the batch size.

Shapes: G = arms, one per speculative length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from yggdrasil.policy.gamma.protocol import ChainPolicy, Load, Outcome

__all__ = ["LinThompson", "LinUCB"]

EXPLORATION = 1.0  # alpha of LinUCB: how many standard deviations are added; rewards are at most 1
POSTERIOR_SCALE = 0.5  # v of linear Thompson sampling


class _RidgeArms:
    """Ridge regression of goodput on x = [1, B / B_max], one per arm, by rank-1 updates of the inverses."""

    def __init__(self, gamma_max: int, max_batch: int) -> None:
        self.max_batch = max_batch
        self.inverse_G22 = np.tile(np.eye(2), (gamma_max + 1, 1, 1))
        self.moment_G2 = np.zeros((gamma_max + 1, 2))
        self.theta_G2 = np.zeros((gamma_max + 1, 2))
        self.max_goodput = 1e-9
        self._untried = set(range(gamma_max + 1))

    def untried(self, load: Load) -> int | None:
        """The smallest legal arm that has not run, if any.

        Without data a regression predicts 0, so an arm that has not run would never be chosen.
        """
        return min((gamma for gamma in self._untried if gamma <= load.gamma_max), default=None)

    def scores(self, load: Load) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Predicted goodput / largest observed one, and its standard deviation in units of the noise."""
        num_arms = min(load.gamma_max + 1, len(self.theta_G2))
        share = load.batch_size / self.max_batch
        theta = self.theta_G2[:num_arms]
        inverse = self.inverse_G22[:num_arms]
        variance = inverse[:, 0, 0] + 2 * share * inverse[:, 0, 1] + share * share * inverse[:, 1, 1]
        return (theta[:, 0] + share * theta[:, 1]) / self.max_goodput, np.sqrt(variance)

    def add_(self, outcome: Outcome) -> None:
        """Add a step (Sherman-Morrison).

        Moments stay in tokens per second, so a new largest goodput rescales the past as well.
        """
        gamma = outcome.gamma
        x = np.array([1.0, outcome.load.batch_size / self.max_batch])
        self._untried.discard(gamma)
        self.max_goodput = max(self.max_goodput, outcome.goodput)
        along = self.inverse_G22[gamma] @ x
        self.inverse_G22[gamma] -= np.outer(along, along) / (1 + x @ along)
        self.moment_G2[gamma] += outcome.goodput * x
        self.theta_G2[gamma] = self.inverse_G22[gamma] @ self.moment_G2[gamma]

    def to_json(self) -> dict[str, Any]:
        """The regressions in tokens per second."""
        return {"intercept_and_slope_tok_per_s": np.round(self.theta_G2, 2).tolist()}


class LinUCB(ChainPolicy):
    """The arm with the largest x . theta + alpha sqrt(x' A^-1 x).

    Args:
        max_batch: B_max, which scales the context.

    Source: Li et al. 2010, disjoint arms, as in the ablation of Nightjar section 6.3.1. Departures: rewards
    are divided by the largest observed goodput; every arm runs once first."""

    def __init__(self, gamma_max: int, max_batch: int) -> None:
        self.arms = _RidgeArms(gamma_max, max_batch)

    def select(self, load: Load) -> int:
        if (gamma := self.arms.untried(load)) is not None:
            return gamma
        mean, deviation = self.arms.scores(load)
        return int((mean + EXPLORATION * deviation).argmax())

    def observe(self, outcome: Outcome) -> None:
        if outcome.is_timed:
            self.arms.add_(outcome)

    @property
    def state(self) -> dict[str, Any]:
        return self.arms.to_json()


class LinThompson(ChainPolicy):
    """The arm whose goodput, drawn from its posterior at this context, is largest.

    Args:
        max_batch: B_max, which scales the context.

    Source: Agrawal and Goyal 2013, as in the ablation of Nightjar section 6.3.1. Departures: one parameter
    vector per arm; x . theta is drawn directly from its normal distribution, which has the mean and
    variance that drawing theta would give; rewards are divided by the largest observed goodput; every arm
    runs once first."""

    def __init__(self, gamma_max: int, max_batch: int, random: np.random.Generator) -> None:
        self.arms = _RidgeArms(gamma_max, max_batch)
        self.random = random

    def select(self, load: Load) -> int:
        if (gamma := self.arms.untried(load)) is not None:
            return gamma
        mean, deviation = self.arms.scores(load)
        return int((mean + POSTERIOR_SCALE * deviation * self.random.standard_normal(len(mean))).argmax())

    def observe(self, outcome: Outcome) -> None:
        if outcome.is_timed:
            self.arms.add_(outcome)

    @property
    def state(self) -> dict[str, Any]:
        return self.arms.to_json()
