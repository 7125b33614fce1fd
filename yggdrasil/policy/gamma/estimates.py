"""What Nightjar's variant learns from outcomes: acceptance by position, how good the draft's probabilities
are, and how far step times are from their prediction."""

from __future__ import annotations

from collections.abc import Sequence

from yggdrasil.policy.gamma.prior import GoodputPrior

__all__ = ["GraphSeconds", "PositionAcceptance", "StepSeconds", "ValueScale"]

PRIOR_TRIALS = 16.0  # draft tokens that the calibrated acceptance of a position counts for
# draft tokens of a position after which an old one has faded: some steps of a great batch, whose rows go on
# as they are
TRIALS_MEMORY = 300.0
STEPS_MEMORY = 64.0  # steps of an arm after which an old one has faded
PACE_MEMORY = 8.0  # steps after which the machine's pace has changed
LOWEST = 0.01
HIGHEST = 0.99


class PositionAcceptance:
    """P(the k-th draft token is accepted, given that those before it are), k = 1.., and the emitted tokens
    that follow from it.

    A row with n accepted of d verified tokens is n successes at positions 1..n and, if n < d, one failure
    at n + 1. Which rows are verified at a position may follow from what the draft thinks of them; then
    their share of successes is scaled to what it thinks of all rows. Positions learn for all batch sizes at
    once. Every position starts from its calibrated value times what learning has made of the position
    before, so that a text on which the first token is hard is not expected to be easy from the second on.

    Args:
        prior: Its `emitted` is the calibration.
    """

    def __init__(self, prior: GoodputPrior, gamma_max: int) -> None:
        # P(accepted >= k)
        gains = [prior.emitted(gamma) - prior.emitted(gamma - 1) for gamma in range(1, gamma_max + 1)]
        self._prior = [
            _clipped(gain / before) if before > 0 else LOWEST
            for before, gain in zip([1.0, *gains], gains, strict=False)
        ]
        self._mean = [0.0] * gamma_max
        self._trials = [0.0] * gamma_max
        self.rates: list[float] = []
        self.emitted: list[float] = []
        self.gains: list[float] = []
        self._update_()

    def observe_(
        self, drafted: Sequence[int], emitted: Sequence[int], values: Sequence[Sequence[float]] = ()
    ) -> None:
        """Tokens verified and emitted, row by row, and the calibrated acceptance of all that was drafted;
        see `Outcome`.
        """
        for index in range(max(drafted)):
            tried = [
                row
                for row, (width, tokens) in enumerate(zip(drafted, emitted, strict=True))
                if width > index and tokens > index
            ]
            if not tried:
                break
            trials = len(tried)
            rate = (
                sum(emitted[row] > index + 1 for row in tried) / trials * _selection(values, tried, index)
            )
            self._trials[index] = max(min(self._trials[index] + trials, TRIALS_MEMORY), trials)
            self._mean[index] += trials / self._trials[index] * (rate - self._mean[index])
        self._update_()

    def _update_(self) -> None:
        """`rates[k - 1]` by position; `emitted[gamma]` by speculative length, and `gains[gamma]`, what one
        more adds, of the longest nothing.
        """
        self.rates = []
        self.emitted = [1.0]
        self.gains = []
        growth = path = 1.0
        for prior, mean, trials in zip(self._prior, self._mean, self._trials, strict=True):
            rate = min(
                (PRIOR_TRIALS * _clipped(prior * growth) + trials * mean) / (PRIOR_TRIALS + trials), 1.0
            )
            growth = rate / prior
            path = path * rate
            self.rates.append(rate)
            self.emitted.append(self.emitted[-1] + path)
            self.gains.append(path)
        self.gains.append(0.0)


def _selection(values: Sequence[Sequence[float]], tried: Sequence[int], index: int) -> float:
    """What the draft expects of a position given those before it, in the mean of all rows that drafted it,
    over the mean of those that were tried.
    """
    if not values:
        return 1.0
    reached = [row[index - 1] if index else 1.0 for row in values if len(row) > index]
    of_all = sum(row[index] for row in values if len(row) > index) / max(sum(reached), LOWEST)
    of_tried = sum(
        values[row][index] / max(values[row][index - 1] if index else 1.0, LOWEST) for row in tried
    ) / len(tried)
    return of_all / max(of_tried, LOWEST)


class ValueScale:
    """How right the calibrated acceptance of drafts was: accepted over expected tokens of what was
    verified; old ones fade.
    """

    def __init__(self) -> None:
        self._expected = self._accepted = PRIOR_TRIALS

    @property
    def estimate(self) -> float:
        """What to multiply calibrated acceptance by."""
        return self._accepted / self._expected

    def observe_(
        self, drafted: Sequence[int], emitted: Sequence[int], values: Sequence[Sequence[float]]
    ) -> None:
        """As for `PositionAcceptance`."""
        self._expected += sum(sum(row[:width]) for row, width in zip(values, drafted, strict=True))
        # a row that broke emits nothing
        self._accepted += sum(
            max(tokens - 1, 0) for tokens, width in zip(emitted, drafted, strict=True) if width
        )
        if self._expected > TRIALS_MEMORY:
            self._accepted *= TRIALS_MEMORY / self._expected
            self._expected = TRIALS_MEMORY


class StepSeconds:
    """By how much steps are slower than predicted, by batch size and gamma: all that is known of a step
    where its graph is not.

    The measured over the predicted time is averaged per gamma over all batch sizes, which corrects sizes
    never seen, and per (batch size, gamma), where the former counts as one step.
    """

    def __init__(self, gamma_max: int) -> None:
        self._gammas = range(gamma_max + 1)
        self._shared = [_Ratio() for _ in self._gammas]
        self._sizes: dict[int, list[_Ratio]] = {}

    def corrections(self, batch_size: int) -> list[float]:
        """What to multiply predictions by, by gamma; the shared correction counts as one step."""
        return [
            (shared.estimate + own.weight * own.mean) / (1 + own.weight)
            for own, shared in zip(self._size(batch_size), self._shared, strict=True)
        ]

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

    A machine that is slow for a minute is slow whatever runs: a quick mean of measured over predicted time
    over all steps is taken out, so that the arm which happened to run is not blamed. What is left belongs
    to the graph, whatever filled it: drafts or prompts.

    Attributes:
        corrections: What to multiply the prediction of a step by, by the graph that runs.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._pace = _Ratio(PACE_MEMORY)
        self._graphs = {width: _Ratio() for width in widths}
        self.corrections = dict.fromkeys(widths, 1.0)

    def observe_(self, width: int, ratio: float) -> None:
        """One step that ran this graph: its measured over its predicted seconds."""
        self._pace.add_(ratio)
        self._graphs[width].add_(ratio / self._pace.estimate)
        pace = self._pace.estimate
        self.corrections = {width: pace * graph.estimate for width, graph in self._graphs.items()}


class _Ratio:
    """A running mean whose step never falls below 1 / STEPS_MEMORY; `estimate` counts a prediction that was
    right as one more step.
    """

    __slots__ = ("estimate", "mean", "memory", "steps", "weight")

    def __init__(self, memory: float = STEPS_MEMORY) -> None:
        self.memory = memory
        self.steps = 0
        self.weight = 0.0
        self.mean = 0.0
        self.estimate = 1.0

    def add_(self, ratio: float) -> None:
        self.steps += 1
        self.weight = min(self.weight + 1.0, self.memory)
        self.mean += (ratio - self.mean) / self.weight
        self.estimate = (1.0 + self.weight * self.mean) / (1.0 + self.weight)


def _clipped(rate: float) -> float:
    return min(max(rate, LOWEST), HIGHEST)
