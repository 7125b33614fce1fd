"""DSD: the speculative length with the largest modelled goodput at the average acceptance of the past."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from yggdrasil.policy.gamma.protocol import ChainPolicy, Load, Outcome

__all__ = ["DSD"]

RATE_STEP = 0.1  # weight of the last step in the acceptance rate
MAX_RATE = 0.99  # keeps the geometric sum finite


class DSD(ChainPolicy):
    """Goodput from a linear latency model, fitted offline, and one acceptance rate, averaged over the past.

    A step without drafts shows nothing about acceptance. So once gamma = 0 wins, the rate stays the same
    and gamma = 0 wins at that load for ever. This decision deadlock is part of the method, so it is kept.

    Args:
        points: Offline measurements: batch size, gamma, seconds of the step.
        rate: Acceptance of a draft token before any was observed.

    Source: Liu et al. 2024 (SmartSpec), as described in Nightjar sections 6.1 and 7.1. Departures: the
    regressors are 1, gamma and the batch's tokens; the acceptance rate is an exponential average; no
    predicted latency is below the smallest measured one, because the linear fit can become negative.

    >>> dsd = DSD([(1, 0, 0.010), (1, 2, 0.012), (2, 0, 0.010), (2, 2, 0.012), (4, 1, 0.011)], rate=0.9)
    >>> dsd.select(Load(batch_size=1, deepest=3))
    3
    """

    def __init__(self, points: Sequence[tuple[int, int, float]], *, rate: float) -> None:
        rows = np.array([_regressors(batch_size, gamma) for batch_size, gamma, _ in points])
        seconds: npt.NDArray[np.float64] = np.array([point[2] for point in points])
        self.coefficients = [float(value) for value in np.linalg.lstsq(rows, seconds, rcond=None)[0]]
        self.min_seconds = float(seconds.min())
        self.rate = rate

    def select(self, load: Load) -> int:
        rate = min(self.rate, MAX_RATE)

        def goodput(gamma: int) -> float:
            emitted = (1 - rate ** (gamma + 1)) / (1 - rate)
            return emitted / self.seconds(load.batch_size, gamma)

        return max(range(load.gamma_max + 1), key=goodput)

    def seconds(self, batch_size: int, gamma: int) -> float:
        """The fitted latency of a step."""
        constant, per_gamma, per_token = self.coefficients
        return max(constant + per_gamma * gamma + per_token * batch_size * (gamma + 1), self.min_seconds)

    def observe(self, outcome: Outcome) -> None:
        accepted = sum(outcome.emitted) - len(outcome.emitted)
        rows = zip(outcome.drafted, outcome.emitted, strict=True)
        rejected = sum(1 for drafted, emitted in rows if emitted <= drafted)  # a chain ends at its first
        if trials := accepted + rejected:
            self.rate += RATE_STEP * (accepted / trials - self.rate)

    @property
    def state(self) -> dict[str, Any]:
        return {"acceptance_rate": round(self.rate, 4), "latency_coefficients_s": self.coefficients}


def _regressors(batch_size: int, gamma: int) -> tuple[float, float, float]:
    return 1.0, float(gamma), float(batch_size * (gamma + 1))
