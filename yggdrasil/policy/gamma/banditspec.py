"""BanditSpec: an upper confidence bound over speculative lengths that ignores the batch size."""

from __future__ import annotations

import math
from typing import Any

from yggdrasil.policy.gamma.bins import MeanGoodput
from yggdrasil.policy.gamma.protocol import ChainPolicy, Load, Outcome

__all__ = ["BanditSpec"]


class BanditSpec(ChainPolicy):
    """UCB1: the arm with the largest mean / maximum + sqrt(2 ln t / n), after every arm has run once.

    t counts the observed steps and n the steps of the arm. The maximum is the highest goodput of any step,
    so rewards lie between 0 and 1.

    Source: Hou et al. 2025 as described in Nightjar section 6.1 (a UCB variant without batch context).
    Departures: one bandit per server instead of one per request, because all rows of a batch share gamma;
    the reward is goodput, as for every policy here, and the radius is that of UCB1.

    >>> ucb = BanditSpec()
    >>> load = Load(batch_size=1, deepest=1)
    >>> ucb.observe(Outcome(load, 0, [0], [1], 0.01))
    >>> ucb.select(load)
    1
    """

    def __init__(self) -> None:
        self.goodput = MeanGoodput()
        self.max_goodput = 0.0
        self.steps = 0

    def select(self, load: Load) -> int:
        rounds = self.goodput.rounds
        for gamma in range(load.gamma_max + 1):
            if gamma not in rounds:
                return gamma
        two_log_steps = 2 * math.log(self.steps)

        def bound(gamma: int) -> float:
            radius = math.sqrt(two_log_steps / rounds[gamma])
            return self.goodput.means[gamma] / self.max_goodput + radius

        return max(range(load.gamma_max + 1), key=bound)

    def observe(self, outcome: Outcome) -> None:
        if outcome.is_timed:
            self.steps += 1
            self.max_goodput = max(self.max_goodput, outcome.goodput)
            self.goodput.add_(outcome.gamma, outcome.goodput)

    @property
    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, **self.goodput.to_json()}
