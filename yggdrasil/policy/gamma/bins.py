"""The block and bin clock of ADA-BINGREEDY, and the running means that it exploits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["BinClock", "MeanGoodput"]


class BinClock:
    """Blocks of growing length, divided into bins of rounds; a bin explores or exploits as a whole.

        block j: H = 2^(j-1)
        |  bin b = 1  |  bin b = 2  | ...         sqrt(H) bins (rounded down)
        | . . . . . . | . . . . . . |             sqrt(H) rounds each

    A bin explores with probability 1 / sqrt(b). So a block explores in up to the sum over b of sqrt(H) /
    sqrt(b) of its rounds, which is about 2 H^(3/4). The regret of whole exploring bins grows as T^(3/4).
    Nightjar's Lemma 2 counts sqrt(T) exploration *steps*; that holds for a schedule that explores one round
    per bin.

    Source: Nightjar Algorithm 1, lines 3, 6-8 and 16-22.
    """

    def __init__(self) -> None:
        self.block = self.bin = self.round = 1
        self._exploring: bool | None = None

    @property
    def rounds_per_bin(self) -> int:
        """Rounds per bin and bins per block: each counter ends when it exceeds sqrt(H)."""
        return math.isqrt(2 ** (self.block - 1))

    def explores(self, random: np.random.Generator) -> bool:
        """Whether the current bin explores; drawn once per bin."""
        if self._exploring is None:
            self._exploring = bool(random.random() < 1 / math.sqrt(self.bin))
        return self._exploring

    def tick_(self) -> None:
        """Count one observed round."""
        self.round += 1
        if self.round > self.rounds_per_bin:
            self.bin = self.bin + 1
            self.round = 1
            self._exploring = None
            if self.bin > self.rounds_per_bin:
                self.block = self.block + 1
                self.bin = 1


class MeanGoodput:
    """Mean realised goodput of every arm; 0 before its first round.

    Source: Nightjar section 4.2, the incremental average below Eq. (3).
    """

    def __init__(self) -> None:
        self.rounds: dict[int, int] = {}
        self.means: dict[int, float] = {}

    def add_(self, gamma: int, goodput: float) -> None:
        """Add a round of this arm, in tokens per second."""
        self.rounds[gamma] = self.rounds.get(gamma, 0) + 1
        mean = self.means.get(gamma, 0.0)
        self.means[gamma] = mean + (goodput - mean) / self.rounds[gamma]

    def seconds_per_token(self, gamma: int) -> float:
        """1 / mean; infinite before the first round."""
        mean = self.means.get(gamma, 0.0)
        return 1 / mean if mean > 0 else math.inf

    def best(self, arms: Iterable[int]) -> int:
        """The arm with the largest mean; the smaller arm if two are equal."""
        return max(arms, key=lambda gamma: (self.means.get(gamma, 0.0), -gamma))

    def to_json(self) -> dict[str, Any]:
        """The best arm, its goodput and how often every arm ran."""
        if not self.means:
            return {"rounds": {}}
        best = self.best(sorted(self.means))
        return {
            "gamma": best,
            "tok_per_s": round(self.means[best], 2),
            "rounds": {str(gamma): self.rounds[gamma] for gamma in sorted(self.rounds)},
        }
