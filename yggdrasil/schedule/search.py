"""Every plan worth trying, how long each would take by the measured stages, and the best of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from yggdrasil.schedule.plan import SEQUENTIAL, Plan
from yggdrasil.schedule.profile import BESIDE, StageProfile
from yggdrasil.schedule.stages import SYNCS, needs

__all__ = ["LEAST_GAIN", "Span", "Timeline", "best_plan", "plans", "simulate"]

LEAST_GAIN = 0.01  # of an iteration: a smaller prediction does not justify work ahead of time

_TAILS = ("", "early", "late", "side")
_NEXT_HEADS = ("", "main", "side")
_NOISES = ("", "late", "side")


@dataclass(frozen=True)
class Span:
    """A stage in a timeline.

    Args:
        stage: Its name.
        lane: "main" or "side"; on CUDA "host" for the calling thread, and "main" or "side" for a stream.
        start_ms: From the start of the iteration.
        end_ms: Of the same clock.
    """

    stage: str
    lane: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A simulated iteration.

    Args:
        plan: Whose.
        spans: In the plan's order.
        makespan_ms: Of the iteration, with what it costs between stages.
    """

    plan: Plan
    spans: tuple[Span, ...]
    makespan_ms: float


@cache
def plans(*, has_streams: bool = True) -> tuple[Plan, ...]:
    """Every plan that can differ in time, the sequential one first, those with less ahead of time before
    those with more.

    Args:
        has_streams: Whether the device runs beside the host. Where it does not, a stage of the host gains
            nothing by standing elsewhere on the same thread.

    The main stages depend on one another in a chain up to `walk`, so orders differ only in where the stages
    ahead of time stand. On "main": the tail draft before pruning, or behind verification, where a device
    has it queued while the host waits; noise behind verification, where the host draws it while a device
    verifies. On "side": as soon as their data is there, noise before the tail draft, for `say` waits for
    noise and only the commit waits for the draft."""
    options = [
        (tail, head, noise)
        for tail, head, noise in product(_TAILS, _NEXT_HEADS, _NOISES)
        if tail or not head
    ]
    made = [_plan(*option) for option in options if has_streams or option[2] != "late"]
    return tuple(sorted(made, key=lambda plan: (len(plan.ahead), len(plan.beside))))


def _plan(tail: str, next_head: str, noise: str) -> Plan:
    order: list[str | tuple[str, str]] = []
    for stage in SEQUENTIAL.order:
        order.append(stage)
        if stage == "grow":
            order += (
                [("noise", "side")] * (noise == "side")
                + [("tail", "side")] * (tail == "side")
                + ["tail"] * (tail == "early")
            )
        elif stage == "verify":
            order += ["noise"] * (noise == "late") + ["tail"] * (tail == "late")
        elif stage == "say" and next_head:
            order.append(("next_head", next_head))
    parts = [
        f"{stage} {place}"
        for stage, place in (("tail", tail), ("next_head", next_head), ("noise", noise))
        if place
    ]
    return Plan.of(", ".join(parts) or SEQUENTIAL.name, order)


def simulate(plan: Plan, profile: StageProfile) -> Timeline:
    """The iteration as the profile says it would run.

    The calling thread takes its stages in the plan's order and waits where data of "side" is missing; a
    stage on "side" starts when it was handed over and those before it have ended. A stage beside others
    takes its time as measured there, and stretches the stage it stands beside. On CUDA a stage keeps the
    host for its launches, then its stream for the device's time; only `SYNCS` keep the host until the
    device is done.

    Source: Yggdrasil section 5.2.
    """
    return _simulate_streams(plan, profile) if profile.device_ms else _simulate_threads(plan, profile)


def _simulate_threads(plan: Plan, profile: StageProfile) -> Timeline:
    free = {"main": 0.0, "side": 0.0}
    end = dict[str, float]()
    spans = []
    stretch: Mapping[str, float] = _stretch(plan, profile)
    for place in plan.placements:
        stage = place.stage
        if place.resource == "side":
            start = max(free["main"] + profile.handover_ms, free["side"])
        else:
            awaited = [
                end[need] + profile.handover_ms
                for need in needs(stage, plan.ahead)
                if need in plan.beside and end[need] > free["main"]
            ]
            start = max([free["main"], *awaited])
        end[stage] = free[place.resource] = start + profile.host_ms[plan.form(stage)] + stretch[stage]
        spans.append(Span(stage, place.resource, start, end[stage]))
    return Timeline(plan, tuple(spans), free["main"] + profile.overhead_ms)


def _stretch(plan: Plan, profile: StageProfile) -> Mapping[str, float]:
    added: dict[str, float] = defaultdict(float)
    for stage in plan.beside:
        added[BESIDE[stage]] += profile.stretch_ms.get(stage, 0.0)
    return added


def _simulate_streams(plan: Plan, profile: StageProfile) -> Timeline:
    free = {"host": 0.0, "main": 0.0, "side": 0.0}
    end = dict[str, float]()
    spans = []
    for place in plan.placements:
        form = plan.form(place.stage)
        launch = free["host"]
        free["host"] = launch + profile.host_ms[form]
        spans.append(Span(place.stage, "host", launch, free["host"]))
        ready = max((end[need] for need in needs(place.stage, plan.ahead)), default=0.0)
        start = max(launch, ready, free[place.resource])
        end[place.stage] = start + profile.device_ms[form]
        if profile.device_ms[form] > 0:
            free[place.resource] = end[place.stage]
            spans.append(Span(place.stage, place.resource, start, end[place.stage]))
        if place.stage in SYNCS:
            free["host"] = max(free["host"], end[place.stage])
    return Timeline(plan, tuple(spans), max(free.values()) + profile.overhead_ms)


def best_plan(profile: StageProfile) -> Plan:
    """The plan of least makespan; among those within `LEAST_GAIN` of it, the one with least ahead of time,
    then least on "side".

    Source: Yggdrasil section 5.2, "a simple grid search".
    """
    timelines = [simulate(plan, profile) for plan in plans(has_streams=bool(profile.device_ms))]
    least = min(timeline.makespan_ms for timeline in timelines)
    near = [timeline for timeline in timelines if timeline.makespan_ms * (1 - LEAST_GAIN) <= least]
    return min(
        near,
        key=lambda timeline: (len(timeline.plan.ahead), len(timeline.plan.beside), timeline.makespan_ms),
    ).plan
