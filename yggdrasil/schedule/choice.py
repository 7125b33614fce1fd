"""Choose a pair's plans on this machine: measure stages, search, and test the best plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from math import comb
from statistics import median
from typing import Any

from yggdrasil.config import SamplingConfig
from yggdrasil.schedule.profile import NUM_STEPS, PROBES, StageProfile, profile_stages
from yggdrasil.schedule.search import MIN_GAIN, Timeline, best_plan, plans, simulate
from yggdrasil.schedule.workload import NoRoom, Workload
from yggdrasil.step.plan import SEQUENTIAL, Plan
from yggdrasil.trace import Trace

__all__ = ["FORMAT", "TEMPERATURES", "PlanChoice", "PlanSearch", "Trial", "choose_plans", "search_plan"]

FORMAT = 4
"""Format number of a stored `PlanChoice`."""

TEMPERATURES = (0.0, 1.0)
"""Greedy and sampled text have different stages ahead of time, and gain differently from them."""

BUDGET_S = {"cpu": 3.0, "cuda": 20.0}
"""Seconds for the search at all temperatures together, for models of any size.

A CPU gets less: a forward ahead of time shares the cores with all other work, so plans gain little there.
"""

PROFILE_SHARE = 1 / 3  # share of a search's time for measuring stages; the rest is for the trial
MAX_TURNS = 31
MIN_TURNS = 6  # fewer have no 95 % interval: five agree by chance once in sixteen
MIN_ITERATIONS = (len(PROBES) + 2 * MIN_TURNS) * (NUM_STEPS + 1)  # that a search needs to find a plan


@dataclass(frozen=True)
class Trial:
    """A plan compared with the step without a plan, in turns over the same text.

    Args:
        plan_ms: Milliseconds of an iteration with the plan, median over the turns.
        step_ms: Milliseconds of an iteration without it, median over the turns.
        num_turns: Pairs of runs.
        gain95: 95 % interval of the median over turns of 1 - plan / step; None for too few turns.
    """

    plan: Plan
    plan_ms: float
    step_ms: float
    num_turns: int
    gain95: tuple[float, float] | None

    @property
    def gains(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.gain95 is not None and self.gain95[0] > 0


@dataclass(frozen=True)
class PlanSearch:
    """The result of a search at one temperature.

    Args:
        temperature: Sampling temperature of the measured text.
        step_ms: Expected milliseconds of an iteration.
        profile: Times of all stages; None if time or context was too short to measure them.
        trial: Trial of the plan with the best prediction; None if that plan runs nothing ahead of time.
    """

    temperature: float
    step_ms: float
    profile: StageProfile | None = None
    trial: Trial | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan to run, if one gains."""
        return self.trial.plan if self.trial is not None and self.trial.gains else None

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Simulated iterations: the sequential plan and the plan that was tried."""
        if self.profile is None:
            return ()
        tried = [] if self.trial is None else [self.trial.plan]
        return tuple(simulate(plan, self.profile) for plan in (SEQUENTIAL, *tried))

    def why(self) -> str:
        """The plan or its absence, and the measured reason."""
        if self.profile is None:
            expected = f"an iteration was expected to take {self.step_ms:.2f} ms"
            return f"no plan: time or context did not suffice to measure any; {expected}"
        trial = self.trial
        if trial is None:
            num_plans = len(plans(has_streams=bool(self.profile.device_ms))) - 1
            return f"no plan: none of {num_plans} is predicted to gain {MIN_GAIN:.0%}"
        if trial.gain95 is None:
            return f"no plan: {trial.plan.name} had {trial.num_turns} turns, and needs {MIN_TURNS}"
        low, high = trial.gain95
        measured = f"{trial.plan_ms:.3f} ms an iteration, {trial.step_ms:.3f} without it"
        gain = f"gain {low:+.1%} to {high:+.1%} (95 %, {trial.num_turns} turns)"
        return f"{'' if trial.gains else 'no plan: '}{trial.plan.name}: {measured}, {gain}"


@dataclass(frozen=True)
class PlanChoice:
    """A pair's plans on a machine, with their measurements.

    Args:
        greedy: For requests at temperature 0.
        sampled: For all others.
    """

    greedy: PlanSearch
    sampled: PlanSearch

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> PlanChoice:
        """The inverse of `asdict`. Raises ConfigError, KeyError or TypeError on anything else."""
        return cls(*(_search(payload[kind]) for kind in ("greedy", "sampled")))


def _search(payload: Mapping[str, Any]) -> PlanSearch:
    profile = payload["profile"]
    trial = payload["trial"]
    if profile is not None:
        profile = StageProfile(**profile)
    if trial is not None:
        interval = trial["gain95"]
        gain95 = None if interval is None else (interval[0], interval[1])
        trial = Trial(**{**trial, "plan": Plan.from_json(trial["plan"]), "gain95": gain95})
    return PlanSearch(payload["temperature"], payload["step_ms"], profile, trial)


def choose_plans(work: Workload, *, tick: Callable[[], None] = lambda: None) -> PlanChoice:
    """Search at every temperature, with equal shares of the time.

    Args:
        work: The text to decode; each search sets its own temperature.
        tick: Called after each of `TEMPERATURES`.
    """
    found = []
    for temperature in TEMPERATURES:
        decoded = replace(work, sampling=SamplingConfig(temperature=temperature))
        found.append(search_plan(decoded, BUDGET_S[work.draft.device] / len(TEMPERATURES)))
        tick()
    return PlanChoice(*found)


def search_plan(work: Workload, budget_s: float) -> PlanSearch:
    """Profile the stages, simulate every plan, and try the best one.

    Nothing is measured if the time would be too short at the expected duration of an iteration.

    Source: Yggdrasil section 5.2. Departure: the paper runs the plan with the best prediction; here it must
    also gain when measured.
    """
    start = time.perf_counter()
    temperature = work.sampling.temperature
    if MIN_ITERATIONS * work.step_ms > budget_s * 1e3:
        return PlanSearch(temperature, work.step_ms)
    work.prefill()
    try:
        profile = profile_stages(work, start + budget_s * PROFILE_SHARE)
    except NoRoom:
        return PlanSearch(temperature, work.step_ms)
    best = best_plan(profile)
    trial = try_plan(work, best, start + budget_s) if best.helps(temperature) else None
    return PlanSearch(temperature, work.step_ms, profile, trial)


def try_plan(work: Workload, plan: Plan, deadline: float) -> Trial:
    """Run the plan and the step without it in turns until the deadline; each is first equally often.

    A pair of runs that the deadline interrupts does not count.

    Args:
        work: The text to decode; its prompt is in the caches.
        deadline: Value of `time.perf_counter`.
    """
    arms = {"plan": work.step_by(plan, Trace()), "step": work.step}
    turns: list[dict[str, float]] = []
    try:
        while len(turns) < MAX_TURNS:
            order = sorted(arms, reverse=len(turns) % 2 == 0)
            turns.append({arm: work.mean_ms(arms[arm], NUM_STEPS, deadline) for arm in order})
    except NoRoom:
        pass
    gain95 = median_interval([1 - turn["plan"] / turn["step"] for turn in turns])
    plan_ms, step_ms = (median(turn[arm] for turn in turns) if turns else 0.0 for arm in ("plan", "step"))
    return Trial(plan, plan_ms, step_ms, len(turns), gain95)


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of a median by the sign test: two order statistics, equally far from both ends.

    Returns:
        An interval that is valid for any distribution. None for fewer than `MIN_TURNS` samples, whose
        extremes are not yet a 95 % interval.
    """
    ordered = sorted(samples)
    ways = accumulate(comb(len(samples), place) for place in count())  # with at most `place` below
    place = next(place for place, num in enumerate(ways) if num > 0.025 * 2 ** len(samples))
    return (ordered[place - 1], ordered[-place]) if place else None
