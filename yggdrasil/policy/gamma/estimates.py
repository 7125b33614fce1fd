"""What Nightjar's variant learns from outcomes: acceptance by position, and how far step times are from their prediction."""

from __future__ import annotations

from collections.abc import Sequence

from yggdrasil.policy.gamma.prior import GoodputPrior

__all__ = ["GraphSeconds", "PositionAcceptance", "StepSeconds"]

PRIOR_TRIALS = 16.0  # draft tokens that the calibrated acceptance of a position counts for
TRIALS_MEMORY = 300.0  # draft tokens of a position after which an old one has faded: some steps of a great batch, whose rows go on as they are
STEPS_MEMORY = 64.0  # steps of an arm after which an old one has faded
PACE_MEMORY = 8.0  # steps after which the machine's pace has changed
LOWEST, HIGHEST = 0.01, 0.99


class PositionAcceptance:
    """P(the k-th draft token is accepted, given that those before it are), k = 1.., and the emitted tokens that follow from it.

    A row with n accepted of d drafted tokens is n successes at positions 1..n and, if n < d, one failure at n + 1. Positions learn for all batch
    sizes at once. Every position starts from its calibrated value times what learning has made of the position before, so that a text on
    which the first token is hard is not expected to be easy from the second on.

    Args:
        prior: Its `emitted` is the calibration.
        gamma_max: Greatest position.
    """

    def __init__(self, prior: GoodputPrior, gamma_max: int) -> None:
        gains = [prior.emitted(gamma) - prior.emitted(gamma - 1) for gamma in range(1, gamma_max + 1)]  # P(accepted >= k)
        self._prior = [_clipped(gain / before) if before > 0 else LOWEST for before, gain in zip([1.0, *gains], gains, strict=False)]
        self._mean = [0.0] * gamma_max
        self._trials = [0.0] * gamma_max
        self.rates: list[float] = []
        self.emitted: list[float] = []
        self._update_()

    def observe_(self, drafted: Sequence[int], emitted: Sequence[int]) -> None:
        """Tokens verified and emitted, row by row."""
        for index in range(max(drafted)):
            trials = sum(1 for width, tokens in zip(drafted, emitted, strict=True) if width > index and tokens > index)
            if not trials:
                break
            successes = sum(1 for width, tokens in zip(drafted, emitted, strict=True) if width > index and tokens > index + 1)
            self._trials[index] = max(min(self._trials[index] + trials, TRIALS_MEMORY), trials)
            self._mean[index] += trials / self._trials[index] * (successes / trials - self._mean[index])
        self._update_()

    def _update_(self) -> None:
        """`rates[k - 1]` by position and `emitted[gamma]` by speculative length."""
        self.rates, self.emitted = [], [1.0]
        growth = path = 1.0
        for prior, mean, trials in zip(self._prior, self._mean, self._trials, strict=True):
            rate = (PRIOR_TRIALS * _clipped(prior * growth) + trials * mean) / (PRIOR_TRIALS + trials)
            growth, path = rate / prior, path * rate
            self.rates.append(rate)
            self.emitted.append(self.emitted[-1] + path)


class StepSeconds:
    """By how much steps are slower than predicted, by batch size and gamma: all that is known of a step where its graph is not.

    The measured over the predicted time is averaged per gamma over all batch sizes, which corrects sizes never seen, and per (batch size, gamma),
    where the former counts as one step.

    Args:
        gamma_max: Greatest gamma.
    """

    def __init__(self, gamma_max: int) -> None:
        self._gammas = range(gamma_max + 1)
        self._shared = [_Ratio() for _ in self._gammas]
        self._sizes: dict[int, list[_Ratio]] = {}

    def corrections(self, batch_size: int) -> list[float]:
        """What to multiply predictions by, by gamma; the shared correction counts as one step."""
        return [(shared.estimate + own.weight * own.mean) / (1 + own.weight) for own, shared in zip(self._size(batch_size), self._shared, strict=True)]

    def observe_(self, batch_size: int, gamma: int, ratio: float) -> None:
        """One step of this arm: its measured over its predicted seconds."""
        self._size(batch_size)[gamma].add_(ratio)
        self._shared[gamma].add_(ratio)

    def steps(self, batch_size: int) -> list[int]:
        """How often every arm ran at this batch size."""
        return [ratio.steps for ratio in self._size(batch_size)]

    def _size(self, batch_size: int) -> list[_Ratio]:
        if batch_size not in self._sizes:
            self._sizes[batch_size] = [_Ratio() for _ in self._gammas]
        return self._sizes[batch_size]


class GraphSeconds:
    """By how much the graphs are slower than predicted, relative to the machine's pace.

    A machine that is slow for a minute is slow whatever runs: a quick mean of measured over predicted time over all steps is taken out, so that the arm which
    happened to run is not blamed. What is left belongs to the graph, whatever filled it: drafts or prompts.
    """

    def __init__(self) -> None:
        self._pace = _Ratio(PACE_MEMORY)
        self._graphs: dict[int, _Ratio] = {}

    def correction(self, width: int) -> float:
        """What to multiply the prediction of a step by that runs this graph."""
        return self._pace.estimate * (self._graphs[width].estimate if width in self._graphs else 1.0)

    def observe_(self, width: int, ratio: float) -> None:
        """One step that ran this graph: its measured over its predicted seconds."""
        self._pace.add_(ratio)
        self._graphs.setdefault(width, _Ratio()).add_(ratio / self._pace.estimate)


class _Ratio:
    """A running mean whose step never falls below 1 / STEPS_MEMORY; `estimate` counts a prediction that was right as one more step."""

    __slots__ = ("estimate", "mean", "memory", "steps", "weight")

    def __init__(self, memory: float = STEPS_MEMORY) -> None:
        self.memory = memory
        self.steps, self.weight, self.mean, self.estimate = 0, 0.0, 0.0, 1.0

    def add_(self, ratio: float) -> None:
        self.steps += 1
        self.weight = min(self.weight + 1.0, self.memory)
        self.mean += (ratio - self.mean) / self.weight
        self.estimate = (1.0 + self.weight * self.mean) / (1.0 + self.weight)


def _clipped(rate: float) -> float:
    return min(max(rate, LOWEST), HIGHEST)
