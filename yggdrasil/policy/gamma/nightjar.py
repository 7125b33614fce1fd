"""Nightjar: learns the speculative length of every batch size from realised goodput; the printed algorithm
and the variant that serves by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import numpy as np

from yggdrasil.policy.gamma.bins import BinClock, MeanGoodput
from yggdrasil.policy.gamma.budget import draft_room
from yggdrasil.policy.gamma.estimates import GraphSeconds, PositionAcceptance, StepSeconds, ValueScale
from yggdrasil.policy.gamma.fixed import VerifiesAll
from yggdrasil.policy.gamma.prior import Budget, GoodputPrior, SwitchingCost
from yggdrasil.policy.gamma.protocol import Load, Outcome

__all__ = ["Nightjar", "PrintedNightjar"]

# of a step's time is what the first one may spend on exploring, of the n-th 1 / sqrt(n) of that
EXPLORATION = 0.05
# of every step's time, so that a server of any age notices that its world has changed
LEAST_EXPLORATION = 0.0005
LEAST_LOSS = 0.01  # of a step: what trying an arm counts for that is predicted to cost nothing
STAY_STEPS = 32.0  # steps that the draft is expected to run once it has been caught up
WELL_PREDICTED = 0.8  # of an arm's best way's goodput: what is predicted to be worse is not looked at again
# waiting prompt tokens are rounded up to a multiple, so that there are few loads to evaluate
WAITING_STEP = 8
# loads whose predictions are kept: 64 rows with up to 128 tokens of prompts are half as many
WAYS_KEPT = 2048
# of an emitted token, for one of a prompt: at 1 prompts crowd drafts out, at 0.5 rows wait for them
# (bench/LOG.md)
PROMPT_VALUE = 0.8


class PrintedNightjar(VerifiesAll):
    """Algorithm 1 and Eq. (3) as printed: per batch size a block and bin clock and a running mean of every
    arm.

    A bin explores as a whole, a new arm every round, so about 2 H^(3/4) rounds of a block of H explore: the
    regret grows as T^0.75, not as the sqrt(T) of Theorem 1 (`BinClock` explains why;
    `bench/claim_bandits.py` measures it).

    Args:
        random: Draws the types of bins and the arms of exploring rounds.

    Source: Nightjar Algorithm 1 and Eq. (3). Departure: a bin that exploits before any arm of its batch
    size has run takes gamma = 0, where the paper has 1/0 for every arm. An arm that has not run costs
    infinity (its mean starts at 0), so only exploration ever tries it, as printed."""

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
        """Eq. (3): argmin of 1 / g + [the draft was off and would run] * c_prefill / gamma; of equals the
        smaller gamma.
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
"""A predicted step: tokens emitted, and what those of prompts count for; seconds."""
_Way = tuple[int, float, float, float, int, float]
"""A way to verify an arm: positions of every row; rows, and those with one more, times what picking is
gain; other tokens; graph; predicted seconds.
"""


class Nightjar:
    """The variant of Nightjar that serves by default: a corrected model exploits, a budget explores.

    Exploit. The goodput of every arm is predicted as tokens / seconds from the pair's calibration and
    profile, and both are corrected by what was observed: acceptance by position for all batch sizes at
    once, seconds by graph (`PositionAcceptance`, `GraphSeconds`; by arm, `StepSeconds`, where the prior
    knows no graphs). Old observations fade.

    Fill. A step costs what its graph costs, so of B * gamma drafts all are verified, or the likeliest of
    the batch that fill a narrower graph, or the largest, where rows draft deeper than it holds: an arm is
    the best of its ways, valued by what such picking brought on calibration text. When the drafts are
    there, the graph is chosen once more by the draft's probabilities of these very tokens, as a tree's
    verified width is. Prompts in the same step are counted, in the time as in the tokens.

    Explore. Every step adds a share of its own time, EXPLORATION / sqrt(n) for the n-th, to an allowance.
    Among the arms that are not the best, the one that has waited longest, measured in what it is predicted
    to lose, is next; it runs for one step as soon as the allowance covers that loss, a restart of the draft
    included. So exploring costs 2 * EXPLORATION * sqrt(T) steps at most (1 % of the first 100 steps'
    time), cheap arms are tried often, expensive ones seldom, and none never: as the allowance grows without
    bound there is no decision deadlock.

    Switch. Catching the draft up is paid once and serves the steps that follow, so it is spread over
    STAY_STEPS of them.

    Args:
        gamma_max: Greatest arm; a load that allows more gets no more.
        max_batch: Loads of up to this many rows are evaluated here, a sixth of a millisecond each, so that
            no selection has to; others when they are met.

    Source: the arms, the reward and the indicator of Nightjar Eq. (3). Departures: blocks and bins are
    replaced by the allowance, whose sum grows as the sqrt(T) that Theorem 1 asks for, whereas the printed
    bins explore T^(3/4) rounds; the running mean of realised goodput by the model above, which knows
    something of arms and batch sizes that never ran; drafts are left out to fit a graph, the unlikeliest as
    in TETRIS, by Yggdrasil's Eq. 3; steps with prompts are valued and learnt from, of which the paper has
    none; c_prefill is divided by the tokens of STAY_STEPS steps of the whole batch instead of gamma, the
    drafts of one row; and as estimates fade, a stationary world costs a small constant share of its time,
    LEAST_EXPLORATION included.

    >>> prior = GoodputPrior(
    ...     drafting=lambda batch_size, gamma: 0.001 * gamma,
    ...     verifying=lambda tokens: 0.010 if tokens <= 8 else 0.019,
    ...     emitted=lambda gamma: [1.0, 1.7, 2.2][gamma],
    ...     widths=(8, 16),
    ... )
    >>> policy = Nightjar(prior, lambda lag, batch_size: 0.0, gamma_max=2)
    >>> load = Load(batch_size=3, deepest=2)
    >>> policy.select(load), policy.verified(load, 2, [[0.7, 0.5]] * 3)  # of 6 drafts 5 fill the graph of 8
    (2, 5)
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
        self.allowance_s = 0.0
        self.steps = 0
        self._last_step: dict[int, list[int]] = {}
        waiting = range(0, prior.widths[-1] + 1, WAITING_STEP) if prior.widths else ()
        for batch_size, waits in product(range(1, max_batch + 1), waiting):
            self._ways_at(
                Load(
                    batch_size,
                    gamma_max,
                    waiting_tokens=waits,
                    drafts_max=draft_room(prior.widths, batch_size, waits),
                )
            )

    def select(self, load: Load) -> int:
        """The best arm, or another one whose turn it is; the allowance is used here, for an explored step
        need not be observed.
        """
        num_arms = min(load.deepest, self.gamma_max) + 1
        steps = self._steps(load, num_arms)
        restart = self.switching_cost(load.max_lag, load.batch_size) if load.previous_gamma == 0 else 0.0
        spread = restart / STAY_STEPS
        costs = [
            (seconds + (spread if gamma else 0.0)) / tokens for gamma, (tokens, seconds) in enumerate(steps)
        ]
        least = min(costs)
        best = costs.index(least)
        if num_arms == 1 or self.allowance_s <= 0:
            return best
        # after a step without the draft it has to catch up
        stop = self._stop_cost(load.batch_size) if best and load.previous_gamma else 0.0
        turn, loss = self._longest_waiting(
            self._last_steps(load.batch_size), steps, best, least, stop, restart
        )
        if loss > self.allowance_s:
            return best
        self.allowance_s -= loss
        return turn

    def verified(self, load: Load, gamma: int, values: Sequence[Sequence[float]]) -> int:
        """The drafts that fill the graph with the best goodput by these very values. Source: Yggdrasil
        section 4.2, "Verification Width Pruning".
        """
        likeliest = sorted((value for row in values for value in row), reverse=True)
        sums = [0.0, *accumulate(likeliest)]
        scale = self.values.estimate

        def goodput(budget: Budget) -> float:
            width = self._prior.width(load.batch_size + budget.verified + budget.prompt_tokens)
            tokens = load.batch_size + scale * sums[budget.verified] + PROMPT_VALUE * budget.prompt_tokens
            return tokens / (budget.seconds * self.graphs.corrections[width])

        return max(
            self._prior.budgets(
                load.batch_size, gamma, load.waiting_tokens, len(likeliest), load.drafts_max
            ),
            key=goodput,
        ).verified

    def _steps(self, load: Load, num_arms: int) -> list[_Step]:
        """For every arm the step with the best predicted goodput: all drafts verified that can be, or as
        many as fill a narrower graph.
        """
        steps = []
        emitted = self.acceptance.emitted
        gains = self.acceptance.gains
        by_graph = self.graphs.corrections
        by_arm = self._as_predicted if self._prior.widths else self.seconds.corrections(load.batch_size)
        for ways, slower in zip(self._ways_at(load)[:num_arms], by_arm, strict=False):
            best = most = least = 0.0
            for whole, share, more, others, width, predicted in ways:
                seconds = predicted * by_graph[width]
                tokens = others + share * emitted[whole] + more * gains[whole]
                goodput = tokens / seconds
                if goodput > best:
                    best = goodput
                    most = tokens
                    least = seconds
            steps.append((most, slower * least))
        return steps

    def _ways_at(self, load: Load) -> list[list[_Way]]:
        if not load.waiting_tokens:
            return self._ways(load.batch_size, 0, load.drafts_max)
        waiting = -(-load.waiting_tokens // WAITING_STEP) * WAITING_STEP
        most = load.drafts_max
        if most is not None and self._prior.widths:
            most = min(most, draft_room(self._prior.widths, load.batch_size, waiting))
        return self._ways(load.batch_size, waiting, most)

    def _new_ways(self, batch_size: int, waiting_tokens: int, drafts_max: int | None) -> list[list[_Way]]:
        """The ways to verify every arm that may be best, as far as they do not change."""
        return [
            self._ways_of(batch_size, gamma, waiting_tokens, drafts_max)
            for gamma in range(self.gamma_max + 1)
        ]

    def _ways_of(
        self, batch_size: int, gamma: int, waiting_tokens: int, drafts_max: int | None
    ) -> list[_Way]:
        ways = []
        goodputs = []
        for budget in self._prior.budgets(batch_size, gamma, waiting_tokens, most=drafts_max):
            whole, rest = divmod(budget.verified, batch_size)
            # Rows are few: what a great batch gains by picking, one row cannot.
            picking = (
                1.0
                + (self._prior.picking(gamma, budget.verified / batch_size) - 1.0)
                * (1.0 - 1.0 / batch_size)
                if budget.verified
                else 1.0
            )
            of_prompts = PROMPT_VALUE * budget.prompt_tokens
            width = self._prior.width(batch_size + budget.verified + budget.prompt_tokens)
            ways.append(
                (
                    whole,
                    batch_size * picking,
                    rest * picking,
                    batch_size * (1.0 - picking) + of_prompts,
                    width,
                    budget.seconds,
                )
            )
            accepted = picking * self._prior.left_out(gamma, budget.verified / batch_size) if gamma else 0.0
            goodputs.append((batch_size * (1.0 + accepted) + of_prompts) / budget.seconds)
        return [
            way
            for way, goodput in zip(ways, goodputs, strict=True)
            if goodput >= WELL_PREDICTED * max(goodputs)
        ]

    def _longest_waiting(
        self,
        last_steps: Sequence[int],
        steps: Sequence[_Step],
        best: int,
        least: float,
        stop: float,
        restart: float,
    ) -> tuple[int, float]:
        """The arm but the best with the most steps since it ran for every second that it is predicted to
        lose, and that loss.
        """
        turn = best
        max_loss = math.inf
        longest = -1.0
        gamma = 0
        switch = stop
        # without `enumerate` and `max`: most of a selection is spent here and in `_steps`
        for tokens, seconds in steps:
            if gamma != best:
                loss = seconds - tokens * least
                least_loss = LEAST_LOSS * seconds
                loss = (loss if loss > least_loss else least_loss) + switch
                waited = (self.steps + 1 - last_steps[gamma]) / loss
                if waited > longest:
                    turn = gamma
                    max_loss = loss
                    longest = waited
            gamma = gamma + 1
            switch = restart
        return turn, max_loss

    def observe(self, outcome: Outcome) -> None:
        load = outcome.load
        gamma = outcome.gamma
        self.steps += 1
        # where there is nothing to explore, nothing is saved up for later
        if min(load.deepest, self.gamma_max) > 0:
            self.allowance_s += (
                max(EXPLORATION / math.sqrt(self.steps), LEAST_EXPLORATION) * outcome.seconds
            )
        self._last_steps(load.batch_size)[gamma] = self.steps
        predicted = self._prior.seconds(load.batch_size, gamma, sum(outcome.drafted), outcome.prompt_tokens)
        width = self._prior.width(load.batch_size + sum(outcome.drafted) + outcome.prompt_tokens)
        if width:
            self.graphs.observe_(width, (outcome.seconds - outcome.catch_up_seconds) / predicted)
        # catching up is charged by `select`
        self.seconds.observe_(
            load.batch_size, gamma, (outcome.seconds - outcome.catch_up_seconds) / predicted
        )
        if gamma:
            self.acceptance.observe_(outcome.drafted, outcome.emitted, outcome.values)
            if outcome.values:
                self.values.observe_(outcome.drafted, outcome.emitted, outcome.values)

    def _last_steps(self, batch_size: int) -> list[int]:
        """When every arm ran last at this batch size."""
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
        drafts_max = draft_room(self._prior.widths, batch_size, 0) if self._prior.widths else None
        steps = self._steps(Load(batch_size, self.gamma_max, drafts_max=drafts_max), self.gamma_max + 1)
        goodput = [tokens / seconds for tokens, seconds in steps]
        best = goodput.index(max(goodput))
        rounds = {str(gamma): steps for gamma, steps in enumerate(self.seconds.steps(batch_size)) if steps}
        return {"gamma": best, "tok_per_s": round(goodput[best], 2), "rounds": rounds}
