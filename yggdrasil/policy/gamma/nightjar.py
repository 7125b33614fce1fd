"""Nightjar: learns the speculative length for every batch size from realised goodput.

`PrintedNightjar` is the algorithm as printed, `Nightjar` the variant that serves by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from yggdrasil.policy.gamma.bins import BinClock, MeanGoodput
from yggdrasil.policy.gamma.budget import PROMPT_VALUE, draft_budget
from yggdrasil.policy.gamma.estimates import GraphSeconds, PositionAcceptance, StepSeconds, ValueScale
from yggdrasil.policy.gamma.prior import Budget, GoodputPrior, SwitchingCost
from yggdrasil.policy.gamma.protocol import ChainPolicy, Load, Outcome
from yggdrasil.step.choice import VerifyMenu

__all__ = ["Nightjar", "PrintedNightjar"]

# Share of the first step's time that may be lost to exploring; of the n-th step it is 1 / sqrt(n) of that.
EXPLORATION = 0.05
# The share is at least this, so that an old server still notices when its workload changes.
MIN_EXPLORATION = 0.0005
MIN_LOSS = 0.01  # share of a step: the smallest loss that trying another arm counts for
STAY_STEPS = 32.0  # steps that the draft is expected to run after it has caught up
# A way to verify an arm is dropped if its predicted goodput is below this share of the best way's.
WELL_PREDICTED = 0.8
WAITING_STEP = 8  # waiting prompt tokens are rounded up to a multiple, to have fewer loads to predict
# Loads whose predictions are kept: twice as many as 64 rows with up to 128 prompt tokens have.
WAYS_KEPT = 2048


class PrintedNightjar(ChainPolicy):
    """Algorithm 1 and Eq. (3) as printed: for every batch size a block and bin clock and a mean per arm.

    A bin explores as a whole, a new arm every round, so about 2 H^(3/4) rounds of a block of H explore. The
    regret grows as T^0.75, not as the sqrt(T) of Theorem 1 (see `BinClock`; `bench/claim_bandits.py`
    measures it).

    Args:
        random: Draws the types of bins and the arms of exploring rounds.

    Source: Nightjar Algorithm 1 and Eq. (3). Departure: a bin that exploits before any arm of its batch
    size has run takes gamma = 0; the paper has 1/0 for every arm. As printed, an arm that has not run costs
    infinity (its mean starts at 0), so only exploration ever tries it."""

    def __init__(self, switching_cost: SwitchingCost, random: np.random.Generator) -> None:
        self.switching_cost = switching_cost
        self.random = random
        self.clocks: dict[int, BinClock] = {}
        self.goodput: dict[int, MeanGoodput] = {}

    def select(self, load: Load) -> int:
        clock = self.clocks.setdefault(load.batch_size, BinClock())
        if clock.explores(self.random):
            return int(self.random.integers(load.gamma_max + 1))
        return self._exploit(load)

    def _exploit(self, load: Load) -> int:
        """Eq. (3): argmin of 1 / g + [the draft was off and would run] * c_prefill / gamma.

        If two are equal, the smaller gamma is taken.
        """
        goodput = self.goodput.setdefault(load.batch_size, MeanGoodput())
        restart = self.switching_cost(load.max_lag, load.batch_size) if load.previous_gamma == 0 else 0.0
        costs = [
            goodput.seconds_per_token(gamma) + (restart / gamma if gamma else 0.0)
            for gamma in range(load.gamma_max + 1)
        ]
        return costs.index(min(costs))

    def observe(self, outcome: Outcome) -> None:
        batch_size = outcome.load.batch_size
        if outcome.is_timed:
            self.goodput.setdefault(batch_size, MeanGoodput()).add_(outcome.gamma, outcome.goodput)
            self.clocks.setdefault(batch_size, BinClock()).tick_()

    @property
    def state(self) -> dict[str, Any]:
        sizes = sorted(self.goodput)
        return {
            "batch_sizes": {
                str(size): {"block": self.clocks[size].block, **self.goodput[size].to_json()}
                for size in sizes
                if size in self.clocks
            }
        }


_Step = tuple[float, float]
"""A predicted step: emitted tokens plus the value of its prompt tokens; seconds."""
_Way = tuple[int, float, float, float, int, float]
"""A way to verify an arm:

positions verified in every row; number of rows * selection gain; number of rows that verify one position
more * selection gain; tokens to add; graph; predicted seconds
"""


class Nightjar(ChainPolicy):
    """The variant of Nightjar that serves by default: a corrected model exploits, a time budget explores.

    Exploit. The goodput of every arm is predicted as tokens / seconds from the pair's calibration and
    profile. Observations correct both: acceptance by position for all batch sizes at once
    (`PositionAcceptance`), seconds by graph (`GraphSeconds`) or, if the prior knows no graphs, by arm
    (`StepSeconds`). The weight of old observations fades.

    Fill. The time of a step is that of its graph. So a step verifies all B * gamma drafts, or the likeliest
    of the batch that fill a narrower graph, or those that fill the largest graph if the rows draft more
    than it holds. An arm is predicted by its best way to verify, with the gain that this selection had on
    calibration text. Once the drafts exist, the graph is chosen again from the draft's probabilities for
    these tokens, like the verified width of a tree. Prompts of the same step count in time and in tokens.

    Explore. Every step adds a share of its own time to the exploration budget, EXPLORATION / sqrt(n) for
    the n-th. The next arm to try is the one with the most steps since it ran per second of its predicted
    loss; it runs for one step as soon as the budget covers that loss, a restart of the draft included. So
    exploring loses at most the time of 2 * EXPLORATION * sqrt(T) steps (1 % of the first 100 steps). Arms
    with a small loss are tried often and others rarely, but all are tried: the sum of the budget has no
    bound, so there is no decision deadlock.

    Switch. The draft catches up once for all steps that follow, so the cost is spread over STAY_STEPS
    steps.

    Args:
        gamma_max: Largest arm, also for a load that allows more.
        max_batch: Loads of up to this many rows are predicted at construction, a sixth of a millisecond
            each, so that `select` need not; other loads are predicted when they occur.

    Source: the arms, the reward and the indicator of Nightjar Eq. (3). Departures: the exploration budget,
    whose sum grows as the sqrt(T) that Theorem 1 requires, replaces blocks and bins, which explore T^(3/4)
    rounds as printed; the model above replaces the running mean of realised goodput, so that something is
    known of arms and batch sizes that never ran; drafts are left out to fit a graph, the unlikeliest as in
    TETRIS, by Yggdrasil's Eq. 3; steps with prompts, which the paper does not have, are predicted and
    learnt from; c_prefill is divided by the tokens of STAY_STEPS steps of the whole batch instead of gamma,
    the drafts of one row; because estimates fade, a stationary workload loses a small constant share of its
    time, MIN_EXPLORATION included.

    >>> prior = GoodputPrior(
    ...     drafting=lambda batch_size, gamma: 0.001 * gamma,
    ...     verifying=lambda tokens: 0.010 if tokens <= 8 else 0.019,
    ...     emitted=lambda gamma: [1.0, 1.7, 2.2][gamma],
    ...     widths=(8, 16),
    ... )
    >>> policy = Nightjar(prior, lambda lag, batch_size: 0.0, gamma_max=2)
    >>> choice = policy.choose(Load(batch_size=3, deepest=2))
    >>> choice.shapes[0].depth, choice.menu.nodes  # 5 of 6 drafts fill the graph of 8
    (2, (5, 6))
    >>> choice.menu.best([0.0, 0.7, 1.4, 2.1, 2.6, 3.1, 3.6], num_rows=3, depth=0)
    5
    """

    def __init__(
        self, prior: GoodputPrior, switching_cost: SwitchingCost, *, gamma_max: int, max_batch: int = 0
    ) -> None:
        self.switching_cost = switching_cost
        self.gamma_max = gamma_max
        self.acceptance = PositionAcceptance(prior, gamma_max)
        self.values = ValueScale()
        self.seconds = StepSeconds(gamma_max)
        self.graphs = GraphSeconds(prior.widths or (0,))
        self._as_predicted = [1.0] * (gamma_max + 1)
        self._prior = prior
        self._ways = lru_cache(maxsize=WAYS_KEPT)(self._new_ways)
        self._stop_cost = lru_cache(maxsize=WAYS_KEPT)(lambda batch_size: switching_cost(1, batch_size))
        self.exploration_s = 0.0
        self.steps = 0
        self._last_step: dict[int, list[int]] = {}
        waiting = range(0, prior.widths[-1] + 1, WAITING_STEP) if prior.widths else ()
        for batch_size, waits in product(range(1, max_batch + 1), waiting):
            drafts_max = draft_budget(prior.widths, batch_size, waits)
            self._ways_at(Load(batch_size, gamma_max, waiting_tokens=waits, drafts_max=drafts_max))

    def select(self, load: Load) -> int:
        """The best arm, or another one to explore.

        The loss is subtracted from the budget here, because an explored step need not be observed.
        """
        num_arms = min(load.deepest, self.gamma_max) + 1
        steps = self._steps(load, num_arms)
        restart = self.switching_cost(load.max_lag, load.batch_size) if load.previous_gamma == 0 else 0.0
        spread = restart / STAY_STEPS
        costs = [
            (seconds + (spread if gamma else 0.0)) / tokens for gamma, (tokens, seconds) in enumerate(steps)
        ]
        lowest = min(costs)
        best = costs.index(lowest)
        if num_arms == 1 or self.exploration_s <= 0:
            return best
        # after a step without the draft it has to catch up
        stop = self._stop_cost(load.batch_size) if best and load.previous_gamma else 0.0
        last_steps = self._last_steps(load.batch_size)
        candidate, loss = self._longest_waiting(last_steps, steps, best, lowest, stop, restart)
        if loss > self.exploration_s:
            return best
        self.exploration_s -= loss
        return candidate

    def menu(self, load: Load, gamma: int, num_drafts: int) -> VerifyMenu:
        """The numbers of drafts that fill a graph, with the corrected times of these graphs."""
        batch_size = load.batch_size
        budgets = self._prior.budgets(batch_size, gamma, load.waiting_tokens, num_drafts, load.drafts_max)
        return VerifyMenu(
            nodes=tuple(budget.verified for budget in budgets),
            ms=tuple(self._corrected_seconds(batch_size, budget) * 1e3 for budget in budgets),
            scale=self.values.estimate,
            extra=tuple(PROMPT_VALUE * budget.prompt_tokens for budget in budgets),
        )

    def _corrected_seconds(self, batch_size: int, budget: Budget) -> float:
        """Seconds of the step, drafting included, at the observed time of its graph."""
        width = self._prior.width(batch_size + budget.verified + budget.prompt_tokens)
        return budget.seconds * self.graphs.corrections[width]

    def _steps(self, load: Load, num_arms: int) -> list[_Step]:
        """For every arm the step with the best predicted goodput of all its ways."""
        steps = []
        emitted = self.acceptance.emitted
        gains = self.acceptance.gains
        by_graph = self.graphs.corrections
        by_arm = self._as_predicted if self._prior.widths else self.seconds.corrections(load.batch_size)
        for ways, slower in zip(self._ways_at(load)[:num_arms], by_arm, strict=False):
            best = 0.0
            best_tokens = 0.0
            best_seconds = 0.0
            for whole, rows, longer_rows, added, width, predicted in ways:
                seconds = predicted * by_graph[width]
                tokens = added + rows * emitted[whole] + longer_rows * gains[whole]
                goodput = tokens / seconds
                if goodput > best:
                    best = goodput
                    best_tokens = tokens
                    best_seconds = seconds
            steps.append((best_tokens, slower * best_seconds))
        return steps

    def _ways_at(self, load: Load) -> list[list[_Way]]:
        if not load.waiting_tokens:
            return self._ways(load.batch_size, 0, load.drafts_max)
        waiting = -(-load.waiting_tokens // WAITING_STEP) * WAITING_STEP
        drafts_max = load.drafts_max
        if drafts_max is not None and self._prior.widths:
            drafts_max = min(drafts_max, draft_budget(self._prior.widths, load.batch_size, waiting))
        return self._ways(load.batch_size, waiting, drafts_max)

    def _new_ways(self, batch_size: int, waiting_tokens: int, drafts_max: int | None) -> list[list[_Way]]:
        """The good ways to verify every arm: the part of a prediction that observations do not change."""
        return [
            self._ways_of(batch_size, gamma, waiting_tokens, drafts_max)
            for gamma in range(self.gamma_max + 1)
        ]

    def _ways_of(
        self, batch_size: int, gamma: int, waiting_tokens: int, drafts_max: int | None
    ) -> list[_Way]:
        ways = []
        goodputs = []
        for budget in self._prior.budgets(batch_size, gamma, waiting_tokens, drafts_max=drafts_max):
            whole, rest = divmod(budget.verified, batch_size)
            drafts_per_row = budget.verified / batch_size
            gain = self._selection_gain(batch_size, gamma, drafts_per_row)
            prompt_value = PROMPT_VALUE * budget.prompt_tokens
            added = batch_size * (1.0 - gain) + prompt_value
            width = self._prior.width(batch_size + budget.verified + budget.prompt_tokens)
            ways.append((whole, batch_size * gain, rest * gain, added, width, budget.seconds))
            accepted = gain * self._prior.accepted_when_truncated(gamma, drafts_per_row) if gamma else 0.0
            goodputs.append((batch_size * (1.0 + accepted) + prompt_value) / budget.seconds)
        enough = WELL_PREDICTED * max(goodputs)
        return [way for way, goodput in zip(ways, goodputs, strict=True) if goodput >= enough]

    def _selection_gain(self, batch_size: int, gamma: int, drafts_per_row: float) -> float:
        """The prior's gain is that of a large batch; a small one gains less, a single row nothing."""
        if not drafts_per_row:
            return 1.0
        return 1.0 + (self._prior.selection_gain(gamma, drafts_per_row) - 1.0) * (1.0 - 1.0 / batch_size)

    def _longest_waiting(
        self,
        last_steps: Sequence[int],
        steps: Sequence[_Step],
        best: int,
        lowest: float,
        stop: float,
        restart: float,
    ) -> tuple[int, float]:
        """The arm other than the best with the most steps since it ran per second of loss, and its loss."""
        candidate = best
        candidate_loss = math.inf
        longest = -1.0
        gamma = 0
        switch = stop
        # without `enumerate` and `max`: most of the time of `select` is spent here and in `_steps`
        for tokens, seconds in steps:
            if gamma != best:
                loss = seconds - tokens * lowest
                min_loss = MIN_LOSS * seconds
                loss = (loss if loss > min_loss else min_loss) + switch
                waited = (self.steps + 1 - last_steps[gamma]) / loss
                if waited > longest:
                    candidate = gamma
                    candidate_loss = loss
                    longest = waited
            gamma = gamma + 1
            switch = restart
        return candidate, candidate_loss

    def observe(self, outcome: Outcome) -> None:
        load = outcome.load
        gamma = outcome.gamma
        self.steps += 1
        # a step with a single arm adds nothing to the budget
        if min(load.deepest, self.gamma_max) > 0:
            share = max(EXPLORATION / math.sqrt(self.steps), MIN_EXPLORATION)
            self.exploration_s += share * outcome.seconds
        self._last_steps(load.batch_size)[gamma] = self.steps
        num_drafts = sum(outcome.drafted)
        predicted = self._prior.seconds(load.batch_size, gamma, num_drafts, outcome.prompt_tokens)
        # `select` accounts for catching up
        ratio = (outcome.seconds - outcome.catch_up_seconds) / predicted
        width = self._prior.width(load.batch_size + num_drafts + outcome.prompt_tokens)
        if width:
            self.graphs.observe_(width, ratio)
        self.seconds.observe_(load.batch_size, gamma, ratio)
        if gamma:
            self.acceptance.observe_(outcome.drafted, outcome.emitted, outcome.values)
            if outcome.values:
                self.values.observe_(outcome.drafted, outcome.emitted, outcome.values)

    def _last_steps(self, batch_size: int) -> list[int]:
        """The last step of every arm at this batch size."""
        if batch_size not in self._last_step:
            self._last_step[batch_size] = [0] * (self.gamma_max + 1)
        return self._last_step[batch_size]

    @property
    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance.rates],
            "batch_sizes": {str(size): self._size_state(size) for size in sorted(self._last_step)},
        }

    def _size_state(self, batch_size: int) -> dict[str, Any]:
        drafts_max = draft_budget(self._prior.widths, batch_size, 0) if self._prior.widths else None
        steps = self._steps(Load(batch_size, self.gamma_max, drafts_max=drafts_max), self.gamma_max + 1)
        goodput = [tokens / seconds for tokens, seconds in steps]
        best = goodput.index(max(goodput))
        rounds = {str(gamma): steps for gamma, steps in enumerate(self.seconds.steps(batch_size)) if steps}
        return {"gamma": best, "tok_per_s": round(goodput[best], 2), "rounds": rounds}
