"""BanditSpec: an upper confidence bound over speculative lengths, blind to the batch size."""

from __future__ import annotations

import math
from typing import Any

from yggdrasil.policy.gamma.bins import MeanGoodput
from yggdrasil.policy.gamma.fixed import VerifiesAll
from yggdrasil.policy.gamma.protocol import Load, Outcome

__all__ = ["BanditSpec"]


class BanditSpec(VerifiesAll):
    """UCB1: the arm with the largest mean / best + sqrt(2 ln t / n), after every arm has run once.

    Here t counts the observed steps, n those of the arm, and "best" is the highest goodput of any step,
    so that rewards lie between 0 and 1.

    Source: Hou et al. 2025 as described in Nightjar section 6.1 (a UCB variant without batch context).
    Departures: one bandit for the server instead of one for a request, because all rows of a batch share
    gamma; the reward is goodput, as for every policy here, and the radius is UCB1's.

    >>> ucb, load = BanditSpec(), Load(batch_size=1, deepest=1)
    >>> ucb.observe(Outcome(load, 0, [0], [1], 0.01))
    >>> ucb.select(load)
    1
    """

    def __init__(self) -> None:
        self.goodput = MeanGoodput()
        self.best = 0.0
        self.steps = 0

    def select(self, load: Load) -> int:
        rounds = self.goodput.rounds
        for gamma in range(load.gamma_max + 1):
            if gamma not in rounds:
                return gamma
        width = 2 * math.log(self.steps)
        return max(
            range(load.gamma_max + 1),
            key=lambda gamma: self.goodput.means[gamma] / self.best + math.sqrt(width / rounds[gamma]),
        )

    def observe(self, outcome: Outcome) -> None:
        if outcome.is_timed:
            self.steps += 1
            self.best = max(self.best, outcome.goodput)
            self.goodput.add_(outcome.gamma, outcome.goodput)

    @property
    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, **self.goodput.to_json()}
