"""Measure every stage in its place: in real iterations, in every form that a plan can give it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch

from yggdrasil.schedule.executor import Executor
from yggdrasil.schedule.plan import Plan
from yggdrasil.schedule.stages import MAIN
from yggdrasil.schedule.workload import NoRoom, Workload

__all__ = ["BESIDE", "NUM_STEPS", "PROBES", "Clock", "Sample", "StageProfile", "Stay", "profile_stages"]

BESIDE = {"noise": "verify", "tail": "verify", "next_head": "walk"}
"""The stage of the calling thread that one on "side" mostly runs beside."""

PROBES = (
    Plan.of("sequential", MAIN),
    Plan.of("tail", (*MAIN[:5], "tail", *MAIN[5:])),
    Plan.of("all", (*MAIN[:5], "noise", "tail", "say", "next_head", *MAIN[6:])),
    Plan.of("noise beside", (*MAIN[:3], ("noise", "side"), *MAIN[3:])),
    Plan.of("tail beside", (*MAIN[:3], ("tail", "side"), *MAIN[3:])),
    Plan.of(
        "all beside",
        (*MAIN[:3], ("noise", "side"), ("tail", "side"), *MAIN[3:6], ("next_head", "side"), *MAIN[6:]),
    ),
)
"""Plans that between them run every stage in every form; a form is measured in the first that has it."""

NUM_STEPS = 4  # that count, of a run
ROUNDS = 3


@dataclass(frozen=True)
class StageProfile:
    """Milliseconds of every form of every stage, see `Plan.form`.

    Args:
        host_ms: Of the thread that runs the stage; on CUDA of its launches and waits.
        device_ms: Of the stream, on CUDA; empty on a CPU.
        stretch_ms: What the calling thread's stages lose while a stage runs on "side": the contention.
        overhead_ms: What an iteration takes between its stages.
        handover_ms: From handing a stage to "side" until it runs, and from its end until who waits for it
            goes on.
    """

    host_ms: Mapping[str, float]
    device_ms: Mapping[str, float]
    stretch_ms: Mapping[str, float]
    overhead_ms: float
    handover_ms: float


class Stay(NamedTuple):
    """A stage on its thread, milliseconds of one clock.

    On CUDA the thread waits for the stages before between entering it and starting its work.
    """

    entered_ms: float
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Sample:
    """One measured iteration.

    Args:
        ms: Of the calling thread.
        stays: Of every stage.
        device_ms: Of every stage on its stream, on CUDA.
    """

    ms: float
    stays: Mapping[str, Stay]
    device_ms: Mapping[str, float]

    def host_ms(self, stage: str) -> float:
        """Of a stage on its thread, 0 when it did not run."""
        stay = self.stays.get(stage)
        return 0.0 if stay is None else stay.end_ms - stay.start_ms

    @property
    def between_ms(self) -> float:
        """What lies between stages that run one after another: neither their work nor a wait for it."""
        return self.ms - sum(stay.end_ms - stay.entered_ms for stay in self.stays.values())


class Clock:
    """Times every stage of one iteration: a `StageClock`."""

    def __init__(self, device: str) -> None:
        self._on_device = device == "cuda"
        self._reset()

    def _reset(self) -> None:
        self._stays: dict[str, Stay] = {}
        self._events: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as the run of stage `name`, its work on the current stream too."""
        entered = time.perf_counter()
        if self._on_device:
            # sync: else a stage that waits for its own result would be charged for what was queued before
            # it
            torch.cuda.current_stream().synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
        start = time.perf_counter()
        yield
        self._stays[name] = Stay(entered * 1e3, start * 1e3, time.perf_counter() * 1e3)
        if self._on_device:
            end.record()
            self._events[name] = begin, end

    def take(self, ms: float) -> Sample:
        """The iteration since the last call, all of whose work is done."""
        device_ms = {name: begin.elapsed_time(end) for name, (begin, end) in self._events.items()}
        sample = Sample(ms, self._stays, device_ms)
        self._reset()
        return sample


def fastest(runs: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Of every iteration the fastest run: they do the same work, and whatever else the machine does can
    only add to it.
    """
    return [min(same, key=lambda sample: sample.ms) for same in zip(*runs, strict=False)]


def profile_stages(work: Workload, deadline: float) -> StageProfile:
    """Run the probe plans in turns and read every stage's clock.

    Args:
        work: What is decoded.
        deadline: Of `time.perf_counter`; rounds after the first are run as far as time allows.

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
    step = Executor(plan, work.target, work.draft, clock).step
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
            host_ms.setdefault(
                plan.form(stage), fmean(sample.host_ms(stage) for sample in samples[plan.name])
            )
            device_ms.setdefault(
                plan.form(stage), fmean(sample.device_ms.get(stage, 0.0) for sample in samples[plan.name])
            )

    for form in [form for form in host_ms if " after " in form]:
        stage, earlier = form.split(" after ")
        if host_ms[f"{earlier} on main"] == 0:  # it had nothing to do, so it eased nothing
            host_ms[form] = host_ms[stage]
            device_ms[form] = device_ms[stage]
    beside = [sample.stays for sample in samples["tail beside"] if "tail" in sample.stays]
    delays_ms = [stays["tail"].start_ms - stays["grow"].end_ms for stays in beside]
    return StageProfile(
        host_ms=host_ms,
        device_ms=device_ms if any(device_ms.values()) else {},
        stretch_ms=_stretch_ms(samples, host_ms),
        overhead_ms=max(0.0, fmean(sample.between_ms for sample in samples["sequential"])),
        handover_ms=max(0.0, fmean(delays_ms)) if delays_ms else 0.0,
    )


def _stretch_ms(samples: Mapping[str, Sequence[Sample]], host_ms: Mapping[str, float]) -> dict[str, float]:
    """What the calling thread's stages take longer than alone while one runs beside them."""
    lost = {
        plan.name: sum(
            fmean(sample.host_ms(stage) for sample in samples[plan.name]) - host_ms[plan.form(stage)]
            for stage in MAIN
        )
        for plan in PROBES
        if plan.beside
    }
    stretch_ms = {
        "noise": lost["noise beside"],
        "tail": lost["tail beside"],
        "next_head": lost["all beside"] - lost["noise beside"] - lost["tail beside"],
    }
    return {stage: max(0.0, ms) if host_ms[f"{stage} on side"] else 0.0 for stage, ms in stretch_ms.items()}
