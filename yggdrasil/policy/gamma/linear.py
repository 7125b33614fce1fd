"""LinUCB and linear Thompson sampling: goodput as a linear function of the batch size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from yggdrasil.policy.gamma.fixed import VerifiesAll
from yggdrasil.policy.gamma.protocol import Load, Outcome

__all__ = ["LinThompson", "LinUCB"]

EXPLORATION = 1.0  # LinUCB's alpha: standard deviations of optimism, rewards being at most 1
POSTERIOR_SCALE = 0.5  # linear Thompson's v


class _RidgeArms:
    """Ridge regression of goodput on x = [1, B / B_max], one per arm; the inverse Gram matrices are kept up
    to date by rank-1 updates.
    """

    def __init__(self, gamma_max: int, max_batch: int) -> None:
        self.max_batch = max_batch
        self.inverse_A22 = np.tile(np.eye(2), (gamma_max + 1, 1, 1))
        self.moment_A2 = np.zeros((gamma_max + 1, 2))
        self.theta_A2 = np.zeros((gamma_max + 1, 2))
        self.best = 1e-9
        self._untried = set(range(gamma_max + 1))

    def untried(self, load: Load) -> int | None:
        """The smallest legal arm that has not run: a regression of nothing predicts nothing, and the first
        arm would stay.
        """
        return min((gamma for gamma in self._untried if gamma <= load.gamma_max), default=None)

    def scores(self, load: Load) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Predicted goodput over the best seen, and its standard deviation in units of the noise's, of
        every legal arm.
        """
        num_arms = min(load.gamma_max + 1, len(self.theta_A2))
        share = load.batch_size / self.max_batch
        theta = self.theta_A2[:num_arms]
        inverse = self.inverse_A22[:num_arms]
        variance = inverse[:, 0, 0] + 2 * share * inverse[:, 0, 1] + share * share * inverse[:, 1, 1]
        return (theta[:, 0] + share * theta[:, 1]) / self.best, np.sqrt(variance)

    def add_(self, outcome: Outcome) -> None:
        """Sherman-Morrison; moments stay in tokens per second, so a new best goodput rescales the past
        as well.
        """
        gamma = outcome.gamma
        x = np.array([1.0, outcome.load.batch_size / self.max_batch])
        self._untried.discard(gamma)
        self.best = max(self.best, outcome.goodput)
        along = self.inverse_A22[gamma] @ x
        self.inverse_A22[gamma] -= np.outer(along, along) / (1 + x @ along)
        self.moment_A2[gamma] += outcome.goodput * x
        self.theta_A2[gamma] = self.inverse_A22[gamma] @ self.moment_A2[gamma]

    def to_json(self) -> dict[str, Any]:
        """The regressions in tokens per second."""
        return {"intercept_and_slope_tok_per_s": np.round(self.theta_A2, 2).tolist()}


class LinUCB(VerifiesAll):
    """The arm with the largest x . theta + alpha sqrt(x' A^-1 x).

    Args:
        max_batch: B_max, which scales the context.

    Source: Li et al. 2010, disjoint arms, as the ablation of Nightjar section 6.3.1. Departures: rewards
    are scaled by the best goodput seen; every arm runs once first."""

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


class LinThompson(VerifiesAll):
    """The arm whose goodput, drawn from its posterior at this context, is largest.

    Args:
        max_batch: B_max, which scales the context.

    Source: Agrawal and Goyal 2013, as the ablation of Nightjar section 6.3.1. Departures: one parameter
    vector per arm; x . theta is drawn directly, which is normal with the same mean and variance as if theta
    had been; rewards are scaled by the best goodput seen; every arm runs once first."""

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
