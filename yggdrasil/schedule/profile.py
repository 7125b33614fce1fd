"""Measure every stage in real iterations, in every form that a plan can give it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch

from yggdrasil.schedule.workload import NoRoom, Workload
from yggdrasil.step.plan import MAIN, STAGES, Plan
from yggdrasil.trace import Trace

__all__ = [
    "NUM_STEPS",
    "OVERLAPS",
    "PROBES",
    "Clock",
    "Sample",
    "StageProfile",
    "StageTimes",
    "profile_stages",
]

OVERLAPS = {"noise": "verify", "tail": "verify", "next_head": "accept"}
"""For each stage on "side", the stage of the calling thread during which it mostly runs."""

PROBES = (
    Plan.of("sequential", MAIN),
    Plan.of("tail", (*MAIN[:3], "tail", *MAIN[3:])),
    Plan.of("all", (*MAIN[:3], "noise", "tail", "choose", "next_head", *MAIN[4:])),
    Plan.of("noise on side", (*MAIN[:1], ("noise", "side"), *MAIN[1:])),
    Plan.of("tail on side", (*MAIN[:1], ("tail", "side"), *MAIN[1:])),
    Plan.of(
        "all on side",
        (*MAIN[:1], ("noise", "side"), ("tail", "side"), *MAIN[1:4], ("next_head", "side"), *MAIN[4:]),
    ),
)
"""Plans that together run every stage in every form; a form is measured in the first plan that has it."""

NUM_STEPS = 4  # measured iterations of a run; one more runs before them
ROUNDS = 3


@dataclass(frozen=True)
class StageProfile:
    """Milliseconds of every form of every stage, see `Plan.form`.

    Args:
        host_ms: Time on the thread that runs the stage; on CUDA its launches and waits.
        device_ms: Time on the stream, on CUDA; empty on a CPU.
        stretch_ms: Slowdown of the calling thread's stages while a stage runs on "side": the contention.
        overhead_ms: Time of an iteration between its stages.
        handover_ms: Time from handing a stage to "side" until it runs, and from its end until the waiting
            thread continues.
    """

    host_ms: Mapping[str, float]
    device_ms: Mapping[str, float]
    stretch_ms: Mapping[str, float]
    overhead_ms: float
    handover_ms: float


class StageTimes(NamedTuple):
    """Times of one stage on its thread, in milliseconds of one clock.

    On CUDA the thread first waits for the stages before it, between `entered_ms` and `start_ms`.
    """

    entered_ms: float
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Sample:
    """One measured iteration.

    Args:
        ms: Milliseconds of the calling thread.
        device_ms: Milliseconds of every stage on its stream, on CUDA.
    """

    ms: float
    stages: Mapping[str, StageTimes]
    device_ms: Mapping[str, float]

    def host_ms(self, stage: str) -> float:
        """Milliseconds of a stage on its thread, 0 when it did not run."""
        times = self.stages.get(stage)
        return 0.0 if times is None else times.end_ms - times.start_ms

    @property
    def between_ms(self) -> float:
        """Time of the policy and between stages: neither their work nor a wait for it."""
        stages = [times for stage, times in self.stages.items() if stage in STAGES]
        return self.ms - sum(times.end_ms - times.entered_ms for times in stages)


class Clock(Trace):
    """Times every stage of one iteration."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._on_device = device == "cuda"
        self._reset()

    def _reset(self) -> None:
        self._stages: dict[str, StageTimes] = {}
        self._events: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as the run of stage `name`, on the host and on the current stream."""
        entered = time.perf_counter()
        if self._on_device:
            torch.cuda.current_stream().synchronize()  # sync: earlier work is not this stage's time
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
        start = time.perf_counter()
        yield
        self._stages[name] = StageTimes(entered * 1e3, start * 1e3, time.perf_counter() * 1e3)
        if self._on_device:
            end.record()
            self._events[name] = begin, end

    def take(self, ms: float) -> Sample:
        """The sample of the iteration since the last call; all its work must be done."""
        device_ms = {name: begin.elapsed_time(end) for name, (begin, end) in self._events.items()}
        sample = Sample(ms, self._stages, device_ms)
        self._reset()
        return sample


def fastest(runs: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The fastest run of every iteration.

    All runs do the same work; other work of the machine can only add to their time.
    """
    return [min(same, key=lambda sample: sample.ms) for same in zip(*runs, strict=False)]


def profile_stages(work: Workload, deadline: float) -> StageProfile:
    """Run the probe plans in turns and measure every stage.

    Args:
        deadline: Value of `time.perf_counter`; rounds after the first run only while time is left.

    Raises:
        NoRoom: not every probe could run once.

    Cost: at most `ROUNDS * len(PROBES) * (NUM_STEPS + 1)` iterations.
    Source: Yggdrasil section 5.2, "profiling results of each stage"; both forms of a stage are kept.
    """
    runs: dict[str, list[list[Sample]]] = {}
    try:
        for _ in range(ROUNDS):
            for plan in PROBES:
                runs.setdefault(plan.name, []).append(_run(work, plan, deadline))
    except NoRoom:
        if not all(runs.get(plan.name) for plan in PROBES):
            raise
    return profile_of(runs)


def _run(work: Workload, plan: Plan, deadline: float) -> list[Sample]:
    clock = Clock(work.draft.device)
    step = work.step_by(plan, clock)
    samples = []
    for ms in work.iterations(step, NUM_STEPS, deadline):
        work.wait()
        samples.append(clock.take(ms))
    return samples[1:]


def profile_of(runs: Mapping[str, Sequence[Sequence[Sample]]]) -> StageProfile:
    """The profile from measured runs of every probe, by its name."""
    samples = {name: fastest(each) for name, each in runs.items()}
    host_ms: dict[str, float] = {}
    device_ms: dict[str, float] = {}
    for plan in PROBES:
        for stage in plan.order:
            form = plan.form(stage)
            host_ms.setdefault(form, fmean(sample.host_ms(stage) for sample in samples[plan.name]))
            on_device = [sample.device_ms.get(stage, 0.0) for sample in samples[plan.name]]
            device_ms.setdefault(form, fmean(on_device))
    for form in [form for form in host_ms if " after " in form]:
        stage, earlier = form.split(" after ")
        if host_ms[f"{earlier} on main"] == 0:  # it had no work, so it reduced none
            host_ms[form] = host_ms[stage]
            device_ms[form] = device_ms[stage]
    with_tail = [sample.stages for sample in samples["tail on side"] if "tail" in sample.stages]
    delays_ms = [stages["tail"].start_ms - stages["draft"].end_ms for stages in with_tail]
    return StageProfile(
        host_ms=host_ms,
        device_ms=device_ms if any(device_ms.values()) else {},
        stretch_ms=_stretch_ms(samples, host_ms),
        overhead_ms=max(0.0, fmean(sample.between_ms for sample in samples["sequential"])),
        handover_ms=max(0.0, fmean(delays_ms)) if delays_ms else 0.0,
    )


def _stretch_ms(samples: Mapping[str, Sequence[Sample]], host_ms: Mapping[str, float]) -> dict[str, float]:
    """How much longer the calling thread's stages take while another stage runs on "side"."""
    lost = {
        plan.name: sum(
            fmean(sample.host_ms(stage) for sample in samples[plan.name]) - host_ms[plan.form(stage)]
            for stage in MAIN
        )
        for plan in PROBES
        if plan.on_side
    }
    stretch_ms = {
        "noise": lost["noise on side"],
        "tail": lost["tail on side"],
        "next_head": lost["all on side"] - lost["noise on side"] - lost["tail on side"],
    }
    return {stage: max(0.0, ms) if host_ms[f"{stage} on side"] else 0.0 for stage, ms in stretch_ms.items()}
