"""What Nightjar's variant learns from outcomes: acceptance by position and errors of predictions.

The predictions that it corrects are the draft's calibrated acceptance and the time of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from yggdrasil.policy.gamma.prior import GoodputPrior

__all__ = ["GraphSeconds", "PositionAcceptance", "StepSeconds", "ValueScale"]

PRIOR_TRIALS = 16.0  # the calibrated acceptance of a position counts as this many draft tokens
# The weight of a position's old draft tokens fades after this many: some steps of a large batch, whose rows
# hardly change meanwhile.
TRIALS_MEMORY = 300.0
STEPS_MEMORY = 64.0  # the weight of an arm's old steps fades after this many
PACE_MEMORY = 8.0  # the same for the speed of the machine
MIN_RATE = 0.01
MAX_RATE = 0.99


class PositionAcceptance:
    """Acceptance by position k = 1.. of a chain, given that all tokens before it are accepted.

    A row with n accepted of d verified tokens counts as n successes at positions 1..n and, if n < d, one
    failure at n + 1. If the rows to verify at a position were selected by the draft's probabilities, their
    share of successes is scaled to all rows by the same probabilities. Positions learn for all batch sizes
    at once. A position starts from its calibrated value times the correction learnt for the position
    before, so that a text whose first token is hard to guess is not expected to become easy at the second.

    Args:
        prior: Its `emitted` is the calibration.

    Attributes:
        rates: Acceptance; rates[k - 1] for position k.
        emitted: Expected tokens of a row in a step, by speculative length.
        gains: What one more draft token adds to `emitted`, by speculative length; 0 at the largest.
    """

    def __init__(self, prior: GoodputPrior, gamma_max: int) -> None:
        # P(accepted >= k)
        gains = [prior.emitted(gamma) - prior.emitted(gamma - 1) for gamma in range(1, gamma_max + 1)]
        self._prior = [
            _clipped(gain / before) if before > 0 else MIN_RATE
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
        """Learn from a step; arguments are those of `Outcome`."""
        for index in range(max(drafted)):
            tried = [
                row
                for row, (width, tokens) in enumerate(zip(drafted, emitted, strict=True))
                if width > index and tokens > index
            ]
            if not tried:
                break
            trials = len(tried)
            successes = sum(emitted[row] > index + 1 for row in tried)
            rate = successes / trials * _selection(values, tried, index)
            self._trials[index] = max(min(self._trials[index] + trials, TRIALS_MEMORY), trials)
            self._mean[index] += trials / self._trials[index] * (rate - self._mean[index])
        self._update_()

    def _update_(self) -> None:
        self.rates = []
        self.emitted = [1.0]
        self.gains = []
        growth = 1.0
        path = 1.0
        for prior, mean, trials in zip(self._prior, self._mean, self._trials, strict=True):
            expected = PRIOR_TRIALS * _clipped(prior * growth)
            rate = min((expected + trials * mean) / (PRIOR_TRIALS + trials), 1.0)
            growth = rate / prior
            path = path * rate
            self.rates.append(rate)
            self.emitted.append(self.emitted[-1] + path)
            self.gains.append(path)
        self.gains.append(0.0)


def _selection(values: Sequence[Sequence[float]], tried: Sequence[int], index: int) -> float:
    """Mean acceptance that the draft expects at a position: of all rows / of the rows that were tried."""
    if not values:
        return 1.0
    reached = [row[index - 1] if index else 1.0 for row in values if len(row) > index]
    mean_of_all = sum(row[index] for row in values if len(row) > index) / max(sum(reached), MIN_RATE)
    rates = [values[row][index] / max(values[row][index - 1] if index else 1.0, MIN_RATE) for row in tried]
    mean_of_tried = sum(rates) / len(tried)
    return mean_of_all / max(mean_of_tried, MIN_RATE)


class ValueScale:
    """Accepted / expected tokens of the drafts that were verified; the weight of old ones fades."""

    def __init__(self) -> None:
        self._expected = self._accepted = PRIOR_TRIALS

    @property
    def estimate(self) -> float:
        """The factor for calibrated acceptance."""
        return self._accepted / self._expected

    def observe_(
        self, drafted: Sequence[int], emitted: Sequence[int], values: Sequence[Sequence[float]]
    ) -> None:
        """Learn from a step; arguments are those of `Outcome`."""
        self._expected += sum(sum(row[:width]) for row, width in zip(values, drafted, strict=True))
        drafting_rows = [tokens for tokens, width in zip(emitted, drafted, strict=True) if width]
        self._accepted += sum(max(tokens - 1, 0) for tokens in drafting_rows)  # a row that failed emits 0
        if self._expected > TRIALS_MEMORY:
            self._accepted *= TRIALS_MEMORY / self._expected
            self._expected = TRIALS_MEMORY


class StepSeconds:
    """Measured / predicted time of steps by batch size and gamma, for priors that know no graphs.

    The ratio is averaged per gamma over all batch sizes, which also corrects sizes that never ran, and per
    (batch size, gamma), where the shared average counts as one step.
    """

    def __init__(self, gamma_max: int) -> None:
        self._gammas = range(gamma_max + 1)
        self._shared = [_Ratio() for _ in self._gammas]
        self._sizes: dict[int, list[_Ratio]] = {}

    def corrections(self, batch_size: int) -> list[float]:
        """Factors for predictions, by gamma."""
        return [
            (shared.estimate + own.weight * own.mean) / (1 + own.weight)
            for own, shared in zip(self._size(batch_size), self._shared, strict=True)
        ]

    def observe_(self, batch_size: int, gamma: int, ratio: float) -> None:
        """Add a step of this arm: its measured / predicted seconds."""
        self._size(batch_size)[gamma].add_(ratio)
        self._shared[gamma].add_(ratio)

    def steps(self, batch_size: int) -> list[int]:
        """Number of steps of every arm at this batch size."""
        return [ratio.steps for ratio in self._size(batch_size)]

    def _size(self, batch_size: int) -> list[_Ratio]:
        if batch_size not in self._sizes:
            self._sizes[batch_size] = [_Ratio() for _ in self._gammas]
        return self._sizes[batch_size]


class GraphSeconds:
    """Measured / predicted time of the graphs, relative to the current speed of the machine.

    If the machine is slow for a minute, every graph is slow. So a fast average of the ratio over all steps
    is divided out, and the arm that happened to run is not blamed. The rest belongs to the graph, whether
    drafts or prompts filled it.

    Attributes:
        corrections: Factors for predictions, by the graph that runs.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._pace = _Ratio(PACE_MEMORY)
        self._graphs = {width: _Ratio() for width in widths}
        self.corrections = dict.fromkeys(widths, 1.0)

    def observe_(self, width: int, ratio: float) -> None:
        """Add a step that ran this graph: its measured / predicted seconds."""
        self._pace.add_(ratio)
        self._graphs[width].add_(ratio / self._pace.estimate)
        pace = self._pace.estimate
        self.corrections = {width: pace * graph.estimate for width, graph in self._graphs.items()}


class _Ratio:
    """A running mean in which a new value has at least the weight 1 / `memory`.

    `estimate` counts one exact prediction as one more step.
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
    return min(max(rate, MIN_RATE), MAX_RATE)
