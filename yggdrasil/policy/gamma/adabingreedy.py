"""ADA-BINGREEDY: Nightjar's blocks and bins without the batch size."""

from __future__ import annotations

from typing import Any

import numpy as np

from yggdrasil.policy.gamma.bins import BinClock, MeanGoodput
from yggdrasil.policy.gamma.protocol import ChainPolicy, Load, Outcome

__all__ = ["AdaBinGreedy"]


class AdaBinGreedy(ChainPolicy):
    """One clock and one mean per arm for all batch sizes; no switching cost.

    Args:
        random: Draws the types of bins and the arms of exploring rounds.

    Source: Luo et al. 2018, as in the ablation of Nightjar section 6.3.1. Departure: like Nightjar, it
    omits the tests for a changed environment that Luo et al. add to their bins."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.clock = BinClock()
        self.goodput = MeanGoodput()

    def select(self, load: Load) -> int:
        if self.clock.explores(self.random):
            return int(self.random.integers(load.gamma_max + 1))
        return self.goodput.best(range(load.gamma_max + 1))

    def observe(self, outcome: Outcome) -> None:
        if outcome.is_timed:
            self.goodput.add_(outcome.gamma, outcome.goodput)
            self.clock.tick_()

    @property
    def state(self) -> dict[str, Any]:
        return {"block": self.clock.block, **self.goodput.to_json()}
