"""All plans that can differ in time, a simulation of each from measured stages, and the best plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from yggdrasil.schedule.profile import OVERLAPS, StageProfile
from yggdrasil.step.plan import SEQUENTIAL, SYNCS, Plan, needs

__all__ = ["MIN_GAIN", "Span", "Timeline", "best_plan", "plans", "simulate"]

MIN_GAIN = 0.01  # share of an iteration; a smaller predicted gain does not justify work ahead of time

_TAILS = ("", "early", "late", "side")
_NEXT_HEADS = ("", "main", "side")
_NOISES = ("", "late", "side")


@dataclass(frozen=True)
class Span:
    """A stage in a timeline.

    Args:
        lane: "main" or "side"; on CUDA "host" for the calling thread, and "main" or "side" for a stream.
        start_ms: Start, from the start of the iteration.
        end_ms: End, on the same clock.
    """

    stage: str
    lane: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A simulated iteration.

    Args:
        spans: Its stages, in the plan's order.
        makespan_ms: Duration of the iteration, with the overhead between stages.
    """

    plan: Plan
    spans: tuple[Span, ...]
    makespan_ms: float


@cache
def plans(*, has_streams: bool = True) -> tuple[Plan, ...]:
    """All plans that can differ in time, ordered by the number of stages ahead of time; sequential first.

    Args:
        has_streams: Whether the device runs in parallel with the host. If not, moving a host stage to
            another place on the same thread gains nothing.

    The main stages form a chain of dependencies up to `accept`. So orders differ only in the places of the
    stages ahead of time. On "main", the tail draft runs before pruning, or after verification, where a
    device has it queued while the host waits; noise runs after verification, where the host draws it while
    a device verifies. On "side", stages start as soon as their data is ready. Noise comes before the tail
    draft, because `choose` waits for noise while only the commit waits for the draft.
    """
    options = [
        (tail, head, noise)
        for tail, head, noise in product(_TAILS, _NEXT_HEADS, _NOISES)
        if tail or not head
    ]
    made = [_plan(*option) for option in options if has_streams or option[2] != "late"]
    return tuple(sorted(made, key=lambda plan: (len(plan.ahead), len(plan.on_side))))


def _plan(tail: str, next_head: str, noise: str) -> Plan:
    order: list[str | tuple[str, str]] = []
    for stage in SEQUENTIAL.order:
        order.append(stage)
        if stage == "draft":
            if noise == "side":
                order.append(("noise", "side"))
            if tail == "side":
                order.append(("tail", "side"))
            if tail == "early":
                order.append("tail")
        elif stage == "verify":
            if noise == "late":
                order.append("noise")
            if tail == "late":
                order.append("tail")
        elif stage == "choose" and next_head:
            order.append(("next_head", next_head))
    places = {"tail": tail, "next_head": next_head, "noise": noise}
    name = ", ".join(f"{stage} {place}" for stage, place in places.items() if place)
    return Plan.of(name or SEQUENTIAL.name, order)


def simulate(plan: Plan, profile: StageProfile) -> Timeline:
    """The timeline of an iteration by this plan, computed from the profile.

    The calling thread runs its stages in the plan's order and waits for missing data of "side". A stage on
    "side" starts when it has been handed over and the stages before it on "side" have ended. It takes the
    time measured there, and slows down the stage that runs at the same time. On CUDA a stage occupies the
    host during its launches, then its stream during the device's time; only `SYNCS` occupy the host until
    the device is done.

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
                if need in plan.on_side and end[need] > free["main"]
            ]
            start = max([free["main"], *awaited])
        end[stage] = free[place.resource] = start + profile.host_ms[plan.form(stage)] + stretch[stage]
        spans.append(Span(stage, place.resource, start, end[stage]))
    return Timeline(plan, tuple(spans), free["main"] + profile.overhead_ms)


def _stretch(plan: Plan, profile: StageProfile) -> Mapping[str, float]:
    added: dict[str, float] = defaultdict(float)
    for stage in plan.on_side:
        added[OVERLAPS[stage]] += profile.stretch_ms.get(stage, 0.0)
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
    """The plan with the shortest makespan, or a simpler one within `MIN_GAIN` of it.

    The simplest plan has the fewest stages ahead of time, then the fewest on "side".

    Source: Yggdrasil section 5.2, "a simple grid search".
    """
    timelines = [simulate(plan, profile) for plan in plans(has_streams=bool(profile.device_ms))]
    shortest = min(timeline.makespan_ms for timeline in timelines)
    near = [timeline for timeline in timelines if timeline.makespan_ms * (1 - MIN_GAIN) <= shortest]
    return min(
        near,
        key=lambda timeline: (len(timeline.plan.ahead), len(timeline.plan.on_side), timeline.makespan_ms),
    ).plan
