"""Choose a pair's plan on this machine: measure the stages, search, and run what the search found against what it promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from yggdrasil.schedule.plan import SEQUENTIAL, Plan
from yggdrasil.schedule.profile import NUM_STEPS, PROBES, ROUNDS, Runs, Sample, StageProfile, Workload, fastest, profile_of
from yggdrasil.schedule.search import LEAST_GAIN, Timeline, best_plan, plans, simulate

__all__ = ["ATTEMPTS", "MAX_ERROR", "NUM_TICKS", "Measured", "PlanChoice", "choose_plan"]

MAX_ERROR = 0.15
"""Of a predicted iteration; a profile that is further off, as on a machine that does other things meanwhile, changes no plan."""

ATTEMPTS = 2
"""Where a prediction fails, everything is measured once more, and of both times the faster counts."""

NUM_TICKS = ATTEMPTS * ROUNDS * (len(PROBES) + 4)
"""How often `choose_plan` ticks, at most."""


@dataclass(frozen=True)
class Measured:
    """A plan that was simulated and then run.

    Args:
        plan: Which.
        predicted_ms: Of an iteration, by the simulation.
        iteration_ms: Measured.
        ms_per_token: Measured, over the same text for every plan.
    """

    plan: Plan
    predicted_ms: float
    iteration_ms: float
    ms_per_token: float

    @property
    def error(self) -> float:
        """Relative distance of predicted from measured."""
        return abs(self.predicted_ms / self.iteration_ms - 1)


@dataclass(frozen=True)
class PlanChoice:
    """A pair's plan on a machine, and why.

    Args:
        plan: The one to run.
        profile: Of every stage.
        predicted_ms: Milliseconds of an iteration for every plan of the search, by name.
        measured: The representative plans: sequential, the best with only the tail ahead, the best with tail and next head
            ahead, and the best by prediction.
    """

    plan: Plan
    profile: StageProfile
    predicted_ms: Mapping[str, float]
    measured: tuple[Measured, ...]

    def of(self, name: str) -> Measured:
        """What was measured of a representative plan."""
        return next(measured for measured in self.measured if measured.plan.name == name)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The simulated iterations of the representative plans."""
        return tuple(simulate(measured.plan, self.profile) for measured in self.measured)

    @property
    def error(self) -> float:
        """The greatest relative distance of predicted from measured iteration time, over the representative plans; above `MAX_ERROR` the profile is wrong."""
        return max(measured.error for measured in self.measured)

    def why(self) -> str:
        """The winner and the reason, in numbers."""
        sequential = self.of(SEQUENTIAL.name)
        line = f"{self.plan.name}: {self.of(self.plan.name).iteration_ms:.2f} ms an iteration"
        if self.plan != SEQUENTIAL:
            return f"{line}, sequential {sequential.iteration_ms:.2f}; {self._ahead_costs(self.plan)}"
        nearest = min((measured for measured in self.measured if measured.plan != SEQUENTIAL), key=lambda measured: measured.iteration_ms)
        line += f"; the nearest, {nearest.plan.name}, took {nearest.iteration_ms:.2f}: {self._ahead_costs(nearest.plan)}"
        if nearest.iteration_ms < sequential.iteration_ms:
            line += f"; {self._why_not(sequential, nearest)}"
        return line

    def _why_not(self, sequential: Measured, faster: Measured) -> str:
        """Why a plan that was measured to be faster than the sequential one is not the winner."""
        if max(sequential.error, faster.error) > MAX_ERROR:
            return f"not taken, as predictions were up to {self.error:.0%} off"
        if faster.predicted_ms > sequential.predicted_ms * (1 - LEAST_GAIN):
            return "not taken, as its stages promise no gain"
        return f"a gain below {LEAST_GAIN:.0%} is not taken"

    def _ahead_costs(self, plan: Plan) -> str:
        """What the stages ahead of time cost, and what they save of the stages they ease."""
        cost_ms = self.profile.host_ms if not self.profile.device_ms else self.profile.device_ms
        spent = ", ".join(f"{plan.form(stage)} takes {cost_ms[plan.form(stage)]:.2f} ms" for stage in plan.ahead)
        saved = sum(cost_ms[stage] - cost_ms[plan.form(stage)] for stage in SEQUENTIAL.order)
        stretch = sum(self.profile.stretch_ms[stage] for stage in plan.beside)
        slower = f", stretches the stages beside it by {stretch:.2f}" if plan.beside else ""
        return f"{spent}{slower}, saves {f'{saved:.2f}' if saved > 0 else 'nothing'} elsewhere"

    def to_json(self) -> dict[str, Any]:
        """The form that `from_json` reads."""
        return {
            "plan": self.plan.to_json(),
            "profile": self.profile.to_json(),
            "predicted_ms": dict(self.predicted_ms),
            "measured": [{**asdict(measured), "plan": measured.plan.to_json()} for measured in self.measured],
        }

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> PlanChoice:
        """Raises ConfigError, KeyError or TypeError on anything else."""
        return cls(
            plan=Plan.from_json(payload["plan"]),
            profile=StageProfile.from_json(payload["profile"]),
            predicted_ms=dict(payload["predicted_ms"]),
            measured=tuple(Measured(**{**measured, "plan": Plan.from_json(measured["plan"])}) for measured in payload["measured"]),
        )


def choose_plan(work: Workload, *, num_steps: int = NUM_STEPS, tick: Callable[[], None] = lambda: None) -> PlanChoice:
    """Profile, search, and run the representative plans in turns.

    The best plan by prediction is taken if it is also measured to gain `LEAST_GAIN` over the sequential one, and both
    predictions were right within `MAX_ERROR`.

    Args:
        work: What is decoded meanwhile.
        num_steps: Iterations of each run.
        tick: Called after every run, at most `NUM_TICKS` times.

    Cost: some 270 iterations; twice as many where the first predictions fail.
    Source: Yggdrasil section 5.2.
    """
    probes: Runs = {}
    arms: Runs = {}
    for _ in range(ATTEMPTS):
        work.run_in_turns(PROBES, probes, num_steps=num_steps, tick=tick)
        profile = profile_of(probes)
        predicted_ms = {plan.name: simulate(plan, profile).makespan_ms for plan in plans(has_streams=bool(profile.device_ms))}
        best = best_plan(profile)
        representatives = _representatives(profile, best)
        work.run_in_turns(representatives, arms, num_steps=num_steps, tick=tick)
        measured = tuple(_measured(plan, predicted_ms[plan.name], fastest(arms[plan.name])) for plan in representatives)
        choice = PlanChoice(SEQUENTIAL, profile, predicted_ms, measured)
        if max(choice.of(SEQUENTIAL.name).error, choice.of(best.name).error) <= MAX_ERROR:
            break
    return replace(choice, plan=_winner(choice.of(SEQUENTIAL.name), choice.of(best.name)))


def _winner(sequential: Measured, best: Measured) -> Plan:
    """The best by prediction, if it was measured to be and the prediction of both was right; else the sequential plan."""
    trusted = max(sequential.error, best.error) <= MAX_ERROR
    return best.plan if trusted and best.iteration_ms <= sequential.iteration_ms * (1 - LEAST_GAIN) else SEQUENTIAL


def _representatives(profile: StageProfile, best: Plan) -> tuple[Plan, ...]:
    """The plans to run, none twice."""
    by_ahead = [[plan for plan in plans(has_streams=bool(profile.device_ms)) if plan.ahead == ahead] for ahead in (("tail",), ("tail", "next_head"))]
    arms = [SEQUENTIAL, *(best_plan(profile, candidates) for candidates in by_ahead), best]
    return tuple(plan for index, plan in enumerate(arms) if plan not in arms[:index])


def _measured(plan: Plan, predicted_ms: float, samples: Sequence[Sample]) -> Measured:
    spent_ms = sum(sample.ms - sample.clock_ms for sample in samples)
    return Measured(plan, predicted_ms, spent_ms / len(samples), spent_ms / sum(sample.num_tokens for sample in samples))
