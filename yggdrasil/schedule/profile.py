"""Measure every stage in its place: in real iterations, in every form that a plan can give it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import ConfigError
from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.schedule.executor import Executor
from yggdrasil.schedule.plan import Plan
from yggdrasil.schedule.stages import MAIN
from yggdrasil.state import DecodeState
from yggdrasil.step.draft import prefill
from yggdrasil.step.sampling import gumbel_noise

__all__ = ["BESIDE", "NUM_STEPS", "PROBES", "ROUNDS", "Clock", "Runs", "Sample", "StageProfile", "Workload", "fastest", "profile_of", "profile_stages"]

BESIDE = {"noise": "verify", "tail": "verify", "next_head": "walk"}
"""The stage of the calling thread that one on "side" mostly runs beside."""

PROBES = (
    Plan.of("sequential", MAIN),
    Plan.of("tail", (*MAIN[:5], "tail", *MAIN[5:])),
    Plan.of("all", (*MAIN[:5], "noise", "tail", "say", "next_head", *MAIN[6:])),
    Plan.of("noise beside", (*MAIN[:3], ("noise", "side"), *MAIN[3:])),
    Plan.of("tail beside", (*MAIN[:3], ("tail", "side"), *MAIN[3:])),
    Plan.of("all beside", (*MAIN[:3], ("noise", "side"), ("tail", "side"), *MAIN[3:6], ("next_head", "side"), *MAIN[6:])),
)
"""Plans that between them run every stage in every form; a form is measured in the first that has it."""

Runs = dict[str, list[list["Sample"]]]
"""Measured runs of plans, by their names."""

NUM_STEPS = 8
ROUNDS = 3


@dataclass(frozen=True)
class StageProfile:
    """Milliseconds of every form of every stage, see `Plan.form`.

    Args:
        host_ms: Of the thread that runs the stage; on CUDA of its launches and waits.
        device_ms: Of the stream, on CUDA; empty on a CPU.
        stretch_ms: What the calling thread's stages lose while a stage runs on "side": the contention.
        overhead_ms: What an iteration takes between its stages.
        handover_ms: From handing a stage to "side" until it runs, and from its end until who waits for it goes on.
    """

    host_ms: Mapping[str, float]
    device_ms: Mapping[str, float]
    stretch_ms: Mapping[str, float]
    overhead_ms: float
    handover_ms: float

    def to_json(self) -> dict[str, Any]:
        """The form that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> StageProfile:
        return cls(
            host_ms=dict(payload["host_ms"]),
            device_ms=dict(payload["device_ms"]),
            stretch_ms=dict(payload["stretch_ms"]),
            overhead_ms=payload["overhead_ms"],
            handover_ms=payload["handover_ms"],
        )


@dataclass(frozen=True)
class Sample:
    """One measured iteration.

    Args:
        ms: Of all of it.
        num_tokens: What it emitted.
        spans: Start and end of every stage on its thread, milliseconds of one clock.
        device_ms: Of every stage on its stream, on CUDA.
        clock_ms: What reading the clocks took.
    """

    ms: float
    num_tokens: int
    spans: Mapping[str, tuple[float, float]]
    device_ms: Mapping[str, float]
    clock_ms: float

    def host_ms(self, stage: str) -> float:
        """Of a stage on its thread, 0 when it did not run."""
        start, end = self.spans.get(stage, (0.0, 0.0))
        return end - start


class Clock:
    """Times every stage of one iteration: a `StageClock`."""

    def __init__(self, device: str) -> None:
        self._on_device = device == "cuda"
        self._reset()

    def _reset(self) -> None:
        self._spans: dict[str, tuple[float, float]] = {}
        self._events: dict[str, tuple[Any, Any]] = {}
        self._clock_ms = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as the run of stage `name`, its work on the current stream too."""
        entered = time.perf_counter()
        if self._on_device:
            # sync: else a stage that waits for its own result would be charged for what was queued before it
            torch.cuda.current_stream().synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
        start = time.perf_counter()
        self._clock_ms += (start - entered) * 1e3
        yield
        self._spans[name] = start * 1e3, time.perf_counter() * 1e3
        if self._on_device:
            end.record()
            self._events[name] = begin, end

    def take(self, ms: float, num_tokens: int) -> Sample:
        """The iteration since the last call, all of whose work is done."""
        device_ms = {name: begin.elapsed_time(end) for name, (begin, end) in self._events.items()}
        sample = Sample(ms, num_tokens, self._spans, device_ms, self._clock_ms)
        self._reset()
        return sample


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is decoded while a plan is measured.

    Args:
        target: Its cache is used up.
        draft: Its cache is used up.
        prompt: At least one token.
        policy: Best a fixed shape, so that every run does the same work.
        max_context: Most tokens of prompt and output together.
        sampling: Above temperature 0, else noise costs nothing anywhere and no plan will draw it ahead of time.
    """

    target: TokenModel
    draft: TokenModel
    prompt: Sequence[int]
    policy: ShapePolicy
    max_context: int
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=1.0))

    def run(self, plan: Plan, num_steps: int) -> list[Sample]:
        """Decode the prompt from its start by a plan; the text, and so the work of the i-th iteration, is the same every time.

        Ends early at the end of the context. The first iteration is not counted: it has no head ahead of time.

        Raises:
            ConfigError: the context has no room for two iterations after the prompt.
        """
        self._check_room()
        state, clock = self._start(), Clock(self.draft.device)
        runner, samples = Executor(plan, self.target, self.draft, clock), []
        for _ in range(num_steps + 1):
            if len(state.tokens) > self._last_root:
                break
            start = time.perf_counter()
            result = runner.step(state, self.policy)
            if self.draft.device == "cuda":
                torch.cuda.synchronize()  # sync: an iteration has a duration when all of it is done
            samples.append(clock.take((time.perf_counter() - start) * 1e3, len(result.tokens)))
        return samples[1:]

    def run_in_turns(self, plans: Sequence[Plan], runs: Runs, *, num_steps: int, tick: Callable[[], None]) -> None:
        """Run every plan `ROUNDS` times, one after another so that drift hits all alike; adds to `runs`, ticks after each."""
        for _ in range(ROUNDS):
            for plan in plans:
                runs.setdefault(plan.name, []).append(self.run(plan, num_steps))
                tick()

    @property
    def _last_root(self) -> int:
        return self.max_context - self.draft.max_depth - 1

    def _check_room(self) -> None:
        allowed = self._last_root - self.draft.max_depth - 1
        if not 1 <= len(self.prompt) <= allowed:
            raise ConfigError("prompt", f"{len(self.prompt)} tokens", f"1 to {allowed} for a context of {self.max_context}")

    def _start(self) -> DecodeState:
        state = DecodeState(list(self.prompt), self.sampling)
        for model in (self.target, self.draft):
            model.cache.rollback_(0)
            prefill(model, state.tokens[:-1])
        gumbel_noise.cache_clear()  # the last run drew the noise of these very positions
        return state


def fastest(runs: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Of every iteration the fastest run: they do the same work, and whatever else the machine does can only add to it."""
    return [min(same, key=lambda sample: sample.ms) for same in zip(*runs, strict=False)]


def profile_stages(work: Workload, *, num_steps: int = NUM_STEPS, tick: Callable[[], None] = lambda: None) -> StageProfile:
    """Run the probe plans and read every stage's clock.

    Args:
        work: What is decoded.
        num_steps: Iterations of each run.
        tick: Called after every run, `ROUNDS * len(PROBES)` times.

    Cost: `ROUNDS * len(PROBES) * (num_steps + 1)` iterations.
    Source: Yggdrasil section 5.2, "profiling results of each stage"; both forms of a stage are kept.
    """
    runs: Runs = {}
    work.run_in_turns(PROBES, runs, num_steps=num_steps, tick=tick)
    return profile_of(runs)


def profile_of(runs: Mapping[str, Sequence[Sequence[Sample]]]) -> StageProfile:
    """The profile from measured runs of every probe, by its name."""
    samples = {name: fastest(each) for name, each in runs.items()}
    host_ms: dict[str, float] = {}
    device_ms: dict[str, float] = {}
    for plan in PROBES:
        for stage in plan.order:
            host_ms.setdefault(plan.form(stage), fmean(sample.host_ms(stage) for sample in samples[plan.name]))
            device_ms.setdefault(plan.form(stage), fmean(sample.device_ms.get(stage, 0.0) for sample in samples[plan.name]))

    for form in [form for form in host_ms if " after " in form]:
        stage, earlier = form.split(" after ")
        if host_ms[f"{earlier} on main"] == 0:  # it had nothing to do, so it eased nothing
            host_ms[form], device_ms[form] = host_ms[stage], device_ms[stage]
    delays_ms = [sample.spans["tail"][0] - sample.spans["grow"][1] for sample in samples["tail beside"] if "tail" in sample.spans]
    between_ms = fmean(sample.ms - sample.clock_ms for sample in samples["sequential"]) - sum(host_ms[stage] for stage in MAIN)
    return StageProfile(
        host_ms=host_ms,
        device_ms=device_ms if any(device_ms.values()) else {},
        stretch_ms=_stretch_ms(samples, host_ms),
        overhead_ms=max(0.0, between_ms),
        handover_ms=max(0.0, fmean(delays_ms)) if delays_ms else 0.0,
    )


def _stretch_ms(samples: Mapping[str, Sequence[Sample]], host_ms: Mapping[str, float]) -> dict[str, float]:
    """What the calling thread's stages take longer than alone while one runs beside them."""
    lost = {
        plan.name: sum(fmean(sample.host_ms(stage) for sample in samples[plan.name]) - host_ms[plan.form(stage)] for stage in MAIN)
        for plan in PROBES
        if plan.beside
    }
    stretch_ms = {"noise": lost["noise beside"], "tail": lost["tail beside"], "next_head": lost["all beside"] - lost["noise beside"] - lost["tail beside"]}
    return {stage: max(0.0, ms) if host_ms[f"{stage} on side"] else 0.0 for stage, ms in stretch_ms.items()}
