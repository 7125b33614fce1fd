"""Choose a pair's plans on this machine: measure the stages, search, and try the best against the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from math import comb
from statistics import median
from typing import Any

from yggdrasil.config import SamplingConfig
from yggdrasil.schedule.executor import Executor
from yggdrasil.schedule.plan import SEQUENTIAL, Plan
from yggdrasil.schedule.profile import NUM_STEPS, PROBES, StageProfile, profile_stages
from yggdrasil.schedule.search import LEAST_GAIN, Timeline, best_plan, plans, simulate
from yggdrasil.schedule.workload import NoRoom, Workload
from yggdrasil.trace import Trace

__all__ = ["FORMAT", "TEMPERATURES", "PlanChoice", "PlanSearch", "Trial", "choose_plans", "search_plan"]

FORMAT = 2
"""Of a stored `PlanChoice`."""

TEMPERATURES = (0.0, 1.0)
"""A greedy text and a sampled one: what runs ahead of time, and what it saves, differ."""

BUDGET_S = {"cpu": 3.0, "cuda": 20.0}
"""Of a search at all temperatures together, whatever the size of the models. A CPU gets less: where a
forward ahead of time shares the cores with all else, there is little to find."""

PROFILE_SHARE = 1 / 3  # of a search's time for the stages; the rest is for the trial
MOST_TURNS = 31
LEAST_TURNS = 6  # fewer have no 95 % interval: all of five agree by chance once in sixteen
LEAST_ITERATIONS = (len(PROBES) + 2 * LEAST_TURNS) * (NUM_STEPS + 1)  # that a search needs to take a plan


@dataclass(frozen=True)
class Trial:
    """A plan against what runs without it, in turns over the same text.

    Args:
        plan: Which.
        plan_ms: Of an iteration by the plan, median over the turns.
        step_ms: Of an iteration without it.
        num_turns: Pairs of runs.
        gain95: 95 % interval of the median over turns of 1 - plan / step; None of too few turns.
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
    """What was found for requests of one kind.

    Args:
        temperature: At which it was measured.
        step_ms: What an iteration was expected to take.
        profile: Of every stage; None where time or context did not suffice to measure it.
        trial: Of the plan with the best prediction; None where that was to run nothing ahead of time.
    """

    temperature: float
    step_ms: float
    profile: StageProfile | None = None
    trial: Trial | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan to run."""
        return self.trial.plan if self.trial is not None and self.trial.gains else None

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Simulated iterations: stages one after another, and the plan that was tried."""
        if self.profile is None:
            return ()
        tried = [] if self.trial is None else [self.trial.plan]
        return tuple(simulate(plan, self.profile) for plan in (SEQUENTIAL, *tried))

    def why(self) -> str:
        """The plan, or that there is none, and the reason in numbers."""
        if self.profile is None:
            expected = f"an iteration was expected to take {self.step_ms:.2f} ms"
            return f"no plan: time or context did not suffice to measure any; {expected}"
        trial = self.trial
        if trial is None:
            num_plans = len(plans(has_streams=bool(self.profile.device_ms))) - 1
            return f"no plan: none of {num_plans} is predicted to gain {LEAST_GAIN:.0%}"
        if trial.gain95 is None:
            return f"no plan: {trial.plan.name} had {trial.num_turns} turns, and needs {LEAST_TURNS}"
        low, high = trial.gain95
        measured = f"{trial.plan_ms:.3f} ms an iteration, {trial.step_ms:.3f} without it"
        gain = f"gain {low:+.1%} to {high:+.1%} (95 %, {trial.num_turns} turns)"
        return f"{'' if trial.gains else 'no plan: '}{trial.plan.name}: {measured}, {gain}"


@dataclass(frozen=True)
class PlanChoice:
    """A pair's plans on a machine, and why.

    Args:
        greedy: For requests at temperature 0.
        sampled: For all others.
    """

    greedy: PlanSearch
    sampled: PlanSearch

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> PlanChoice:
        """Of `asdict`. Raises ConfigError, KeyError or TypeError on anything else."""
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
    """Search at every temperature, each with its share of the time.

    Args:
        work: What is decoded meanwhile, at the temperature of each search.
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

    A search for which the time would not suffice at the expected duration of an iteration is not begun.

    Source: Yggdrasil section 5.2. Departure: the paper runs the best by prediction; here it must gain.
    """
    start = time.perf_counter()
    temperature = work.sampling.temperature
    if LEAST_ITERATIONS * work.step_ms > budget_s * 1e3:
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
    """Run a plan and what runs without it in turns, either first as often, until the deadline.

    A pair of runs that the deadline breaks off does not count.

    Args:
        work: What is decoded; its prompt is in the caches.
        plan: What to try.
        deadline: Of `time.perf_counter`.
    """
    arms = {"plan": Executor(plan, work.target, work.draft, Trace()).step, "step": work.step}
    turns: list[dict[str, float]] = []
    try:
        while len(turns) < MOST_TURNS:
            order = sorted(arms, reverse=len(turns) % 2 == 0)
            turns.append({arm: work.mean_ms(arms[arm], NUM_STEPS, deadline) for arm in order})
    except NoRoom:
        pass
    gain95 = median_interval([1 - turn["plan"] / turn["step"] for turn in turns])
    plan_ms, step_ms = (median(turn[arm] for turn in turns) if turns else 0.0 for arm in ("plan", "step"))
    return Trial(plan, plan_ms, step_ms, len(turns), gain95)


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of a median by the sign test: two order statistics as far from either end.

    Returns:
        Exact for any distribution. None for fewer than `LEAST_TURNS`: not even their extremes are one.
    """
    ordered = sorted(samples)
    ways = accumulate(comb(len(samples), place) for place in count())  # with at most `place` below
    place = next(place for place, num in enumerate(ways) if num > 0.025 * 2 ** len(samples))
    return (ordered[place - 1], ordered[-place]) if place else None
