"""Open-loop load on batchers in this process: arrivals do not wait for answers; several batchers take
turns, step by step, each on a clock of its own.

HTTP is left out: what is compared is how a batch decodes.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from bench.lib.harness import TextMismatchError
from bench.make_trace import TraceRequest
from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.layout import INDEX, POSITION
from yggdrasil.policy.gamma.protocol import BatchPolicy
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.request import Event, Observer, Request, RequestReport, StepReport
from yggdrasil.step.rows import StepOverRows

__all__ = [
    "Arrival",
    "Clock",
    "OwnClock",
    "Player",
    "ProfileClock",
    "Replay",
    "in_turns",
    "poisson",
    "replay",
    "same_texts",
    "traced",
]

OUTPUT_TOKENS = (16, 96)
LONGEST_PROMPT = 96
# nobody wakes early: less than that could be lost in rounding, and a sleeper would never wake
LATE_S = 1e-6
GREEDY = SamplingConfig()


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes.

    Args:
        at_s: Seconds after the start.
        num_tokens: Most tokens to emit.
    """

    at_s: float
    prompt: Sequence[int]
    num_tokens: int


def poisson(
    texts: Sequence[Sequence[int]],
    *,
    rate: float,
    seconds: float,
    seed: int,
    output_tokens: tuple[int, int] = OUTPUT_TOKENS,
) -> list[Arrival]:
    """Arrivals of a Poisson process.

    Args:
        texts: Tokens whose beginnings are prompts, taken in turn.
        rate: Requests a second.
        seconds: How long they come.
        seed: The same one gives the same arrivals and lengths.
        output_tokens: Minimum and maximum of a request.
    """
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / rate, size=int(2 * rate * seconds) + 20))
    lengths = random.integers(*output_tokens, size=len(times), endpoint=True)
    prompts = random.integers(8, LONGEST_PROMPT, size=len(times), endpoint=True)
    return [
        Arrival(float(at_s), texts[place % len(texts)][: prompts[place]], int(lengths[place]))
        for place, at_s in enumerate(times)
        if at_s < seconds
    ]


def traced(
    texts: Sequence[Sequence[int]], trace: Sequence[TraceRequest], *, rate: float, seconds: float
) -> list[Arrival]:
    """A trace compressed to `seconds` and thinned to `rate` requests a second on average; lengths are
    scaled, their ranks kept.

    A prompt of the trace's median length becomes a third of LONGEST_PROMPT, an output of the median length
    40 tokens."""
    wanted = min(len(trace), round(rate * seconds))
    kept = [trace[place * len(trace) // wanted] for place in range(wanted)]
    span = trace[-1][0]
    prompt_scale = LONGEST_PROMPT / 3 / float(np.median([context for _, context, _ in kept]))
    output_scale = 40 / float(np.median([generated for _, _, generated in kept]))
    return [
        Arrival(
            at_s / span * seconds,
            texts[place % len(texts)][: min(LONGEST_PROMPT, max(4, round(context * prompt_scale)))],
            min(OUTPUT_TOKENS[1], max(4, round(generated * output_scale))),
        )
        for place, (at_s, context, generated) in enumerate(kept)
    ]


class Clock(ABC):
    """The time of one batcher: who sleeps on it does not wait, for the rest of the world may go on
    meanwhile.
    """

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds; never 0, which stands for "not yet"."""

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """Let so much time pass."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which everybody in this process reads this clock."""
        with mock.patch.multiple(
            time, perf_counter=lambda: self.now, sleep=lambda seconds: self.advance(seconds + LATE_S)
        ):
            yield


class OwnClock(Clock):
    """The time that passed while this clock ran: of batchers that take turns, each has a machine to itself,
    at the same pace as the others'.

    Args:
        wall: Seconds of the world.
    """

    def __init__(self, wall: Callable[[], float] = time.perf_counter) -> None:
        self._wall = wall
        self._stopped_at = 1.0
        self._started: float | None = None

    @property
    def now(self) -> float:
        return (
            self._stopped_at if self._started is None else self._stopped_at + self._wall() - self._started
        )

    def advance(self, seconds: float) -> None:
        self._stopped_at += seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        with super().running():
            self._started = self._wall()
            try:
                yield
            finally:
                self._stopped_at = self.now
                self._started = None


class ProfileClock(Clock):
    """A clock that only forwards move, by the profile's time of their graph at the context of their
    tokens: a machine without neighbours.

    Args:
        batcher: Its models get times from the profile; they compute what they always do.
    """

    def __init__(self, batcher: Batcher, latency: LatencyModel) -> None:
        self._now = 1.0
        self.last_model: Any = None
        timed: tuple[Any, Any] = (
            _Timed(batcher.target, latency.verify, latency.plain_host_ms, self, latency.plain_share),
            _Timed(batcher.draft, latency.draft, latency.growth_host_ms, self),
        )
        batcher.target, batcher.draft = timed
        batcher.stepper = StepOverRows(*timed, batcher.trace)

    @property
    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class _Timed:
    """A model whose forwards take the profile's time, or this share of it after one of its own."""

    def __init__(
        self, model: Any, curve: Curve, host_ms: float, clock: ProfileClock, own_share: float = 1.0
    ) -> None:
        self._model = model
        self._curve = curve
        self._host_ms = host_ms
        self._clock = clock
        self._own_share = own_share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def graph_object(self, meta_NM: Tensor) -> None:
        """None: the C++ step would run the forwards without this clock."""

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        positions = meta_NM[meta_NM[:, INDEX] >= 0, POSITION].float()
        outputs: tuple[Tensor, Tensor] = self._model.forward(meta_NM)
        share = self._own_share if self._clock.last_model is self else 1.0
        self._clock.last_model = self
        forward_ms = share * self._curve.at(len(meta_NM), round(float(positions.mean())))
        self._clock.advance((forward_ms + self._host_ms) / 1e3)
        return outputs


@dataclass
class Replay(Observer):
    """What a batcher did with a list of arrivals.

    Attributes:
        texts: Emitted tokens of every arrival, in their order.
        requests: A report of each that ended.
        steps: A report of every step, and when it ended in seconds after the start.
        seconds: From the first arrival to the last token.
    """

    texts: list[list[int]]
    requests: list[RequestReport] = field(default_factory=list)
    steps: list[tuple[float, StepReport]] = field(default_factory=list)
    seconds: float = 0.0
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = time.perf_counter()  # of whatever clock runs by then

    def on_step(self, report: StepReport) -> None:
        self.steps.append((time.perf_counter() - self.start, report))

    def on_finish(self, report: RequestReport) -> None:
        self.requests.append(report)

    @property
    def throughput(self) -> float:
        """Emitted tokens a second."""
        return sum(map(len, self.texts)) / self.seconds

    @property
    def sustained(self) -> float:
        """Requests a second of a batch that was full: of a burst, until three quarters of its tokens were
        written.
        """
        left = 0.75 * sum(map(len, self.texts))
        for at_s, report in self.steps:
            left -= sum(report.emitted)
            if left <= 0:
                return 0.75 * len(self.texts) / at_s
        raise AssertionError("a burst writes all of its tokens")

    def to_json(self) -> dict[str, Any]:
        """The figures of a table's row; milliseconds."""
        totals = [report.total_ms for report in self.requests]
        firsts = [report.ttft_ms for report in self.requests]
        decoding = [
            report
            for _, report in self.steps
            if report.prompt_tokens == 0 and report.batch_size == report.running
        ]
        return {
            "tok_per_s": round(self.throughput, 2),
            "seconds": round(self.seconds, 2),
            "requests": len(self.requests),
            "latency_ms": _percentiles(totals),
            "ttft_ms": _percentiles(firsts),
            "tpot_ms": _percentiles(
                [report.tpot_ms for report in self.requests if report.emitted_tokens > 1]
            ),
            "mean_batch": round(mean(report.batch_size for _, report in self.steps), 2),
            "mean_gamma": round(mean(report.gamma for _, report in self.steps), 2),
            "emitted_per_pass": round(
                sum(map(len, self.texts)) / sum(report.batch_size for _, report in self.steps), 3
            ),
            "host_share": round(
                1
                - sum(r.draft_ms + r.verify_ms for r in decoding)
                / max(1e-9, sum(r.total_ms for r in decoding)),
                4,
            ),
            "preemptions": sum(report.preemptions for report in self.requests),
        }

    def timeline(self, bin_s: float) -> dict[str, list[float]]:
        """Tokens a second, mean gamma and running rows in bins of `bin_s` seconds."""
        num_bins = int(self.seconds / bin_s) + 1
        tokens = np.zeros(num_bins)
        gammas = [[] for _ in range(num_bins)]
        running = [[] for _ in range(num_bins)]
        for at_s, report in self.steps:
            place = min(num_bins - 1, int(at_s / bin_s))
            tokens[place] += sum(report.emitted)
            gammas[place].append(report.gamma)
            running[place].append(report.running)
        return {
            "tok_per_s": [round(float(count) / bin_s, 1) for count in tokens],
            "gamma": [round(mean(values), 2) if values else 0.0 for values in gammas],
            "running": [round(mean(values), 1) if values else 0.0 for values in running],
        }


class Player:
    """Serves arrivals as they come, a step a turn, each sampled with a seed of its own, from an idle
    batcher that knows no text.

    Args:
        batcher: Idle.
        arrivals: At least one, in the order of their times.
        sampling: Greedy or not; seeds are the places of the arrivals.

    Attributes:
        outcome: What has been done so far.
    """

    def __init__(
        self,
        batcher: Batcher,
        policy: BatchPolicy,
        arrivals: Sequence[Arrival],
        sampling: SamplingConfig = GREEDY,
    ) -> None:
        assert batcher.num_running == batcher.num_waiting == 0
        batcher.policy = policy
        batcher.gamma = 0
        batcher.pool.flush_()
        self.outcome = Replay([[] for _ in arrivals])
        batcher.observer = self.outcome
        self._batcher = batcher
        self._sampling = sampling
        self._first_at_s = arrivals[0].at_s
        self._pending = list(reversed(list(enumerate(arrivals))))

    def turn(self) -> bool:
        """Let those in who have come, then one step, or a sleep until the next one comes; False when
        nothing is left.
        """
        while self._pending and self._pending[-1][1].at_s <= self._now:
            self._submit(*self._pending.pop())
        if self._batcher.step() is None:
            time.sleep(max(0.0, self._pending[-1][1].at_s - self._now))
        self.outcome.seconds = self._now - self._first_at_s
        return bool(self._pending or self._batcher.num_running or self._batcher.num_waiting)

    @property
    def _now(self) -> float:
        return time.perf_counter() - self.outcome.start

    def _submit(self, place: int, arrival: Arrival) -> None:
        config = GenerateConfig(
            max_new_tokens=arrival.num_tokens,
            ignore_eos=True,
            sampling=dataclasses.replace(self._sampling, seed=place),
        )
        ticket = self._batcher.ticket(_request(arrival, self.outcome.texts[place], config))
        ticket.arrived = self.outcome.start + arrival.at_s  # it waited for the step that ran
        self._batcher.submit(ticket)


def replay(
    batcher: Batcher, policy: BatchPolicy, arrivals: Sequence[Arrival], *, sampling: SamplingConfig = GREEDY
) -> Replay:
    """Serve all arrivals, on whatever clock runs."""
    player = Player(batcher, policy, arrivals, sampling)
    while player.turn():
        pass
    return player.outcome


def in_turns(
    arms: Mapping[str, tuple[Batcher, Clock]],
    policies: Mapping[str, BatchPolicy],
    arrivals: Sequence[Arrival],
) -> dict[str, Replay]:
    """Serve the same arrivals with every arm: the one with the earliest clock takes the next step, so a
    slow second of the machine is everybody's."""
    players: dict[str, Player] = {}
    for name, (batcher, clock) in arms.items():
        with clock.running():
            players[name] = Player(batcher, policies[name], arrivals)
    live = dict(players)
    while live:
        name = min(live, key=lambda name: arms[name][1].now - players[name].outcome.start)
        with arms[name][1].running():
            if not live[name].turn():
                del live[name]
    return {name: player.outcome for name, player in players.items()}


def same_texts(runs: Mapping[str, Replay]) -> None:
    """Raises TextMismatchError unless all arms wrote the same."""
    (reference, first), *others = runs.items()
    for name, run in others:
        if run.texts != first.texts:
            raise TextMismatchError(f"{name} wrote other texts than {reference}: no speed is reported")


def _request(arrival: Arrival, text: list[int], config: GenerateConfig) -> Request:
    def on_event(event: Event) -> None:
        text.extend(event.tokens)

    return Request(prompt=arrival.prompt, config=config, on_event=on_event)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    mean_ms = float(np.mean(values)) if values else 0.0
    low, middle, high = np.percentile(values, (50, 95, 99)) if values else (0.0, 0.0, 0.0)
    return {
        "mean": round(mean_ms, 1),
        "p50": round(float(low), 1),
        "p95": round(float(middle), 1),
        "p99": round(float(high), 1),
    }
