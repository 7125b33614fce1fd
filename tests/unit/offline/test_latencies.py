"""Latencies on a busy machine, measured with a simulated clock."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from yggdrasil.models.packing import empty_meta
from yggdrasil.offline import latencies
from yggdrasil.offline.latencies import (
    CURVE_SECONDS,
    IN_STEP_MS,
    IN_STEP_STEPS,
    IN_STEP_TURNS,
    MIN_FACTOR,
    MIN_ROUNDS,
    ROUNDS,
    decision_milliseconds,
    host_milliseconds,
    in_step_curves,
    latency_curve,
)
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import FixedShape
from yggdrasil.state import DecodeState, Shape

pytestmark = pytest.mark.usefixtures("kernels")

FLAT = Curve((0,), (2, 8), ((3.0, 4.0),))
LATENCY = LatencyModel(FLAT, FLAT, growth_host_ms=0.0, step_host_ms=0.0, plain_host_ms=0.0)
USELESS = Acceptance((-1.0, 0.0), (0.0, 1.0), {})
CLOCK = SimpleNamespace(now=0.0)


class Clocked:
    """A model whose forwards take given times, by size and round; the time stands still
    otherwise.
    """

    device = "cpu"
    cache = SimpleNamespace(shape=SimpleNamespace(capacity=64))

    def __init__(self, seconds: dict[int, list[float]]) -> None:
        self.menu = SimpleNamespace(sizes=tuple(seconds))
        self._seconds = {size: itertools.cycle(values) for size, values in seconds.items()}
        self.now = 0.0
        self.num_forwards = 0

    def meta(self, num_tokens: int) -> Tensor:
        return empty_meta(num_tokens, 3)

    def forward(self, meta_NM: Tensor) -> None:
        self.num_forwards += 1
        self.now += next(self._seconds[len(meta_NM)])


def curve(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, list[float]]) -> Any:
    return timed(monkeypatch, Clocked(seconds))


def timed(monkeypatch: pytest.MonkeyPatch, model: Any, **options: Any) -> Any:
    monkeypatch.setattr(latencies.time, "perf_counter", lambda: model.now)
    return latency_curve(model, (0, 32), **options)


def test_programs_that_slow_half_of_the_rounds_do_not_change_the_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet = [0.010] * (ROUNDS // 2)
    noisy = [0.035] * (ROUNDS - ROUNDS // 2)
    found = curve(monkeypatch, {2: [0.010] * ROUNDS, 4: [*quiet, *noisy], 8: [0.012] * ROUNDS})
    assert found.sizes == (2, 4, 8)
    for row in found.ms:
        assert row == pytest.approx((10.0, 10.0, 12.0))


def test_a_graph_that_ran_just_before_is_timed_with_its_weights_in_the_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cold_then_warm = {2: [0.020, 0.010], 4: [0.040, 0.030]}
    cold = curve(monkeypatch, {size: seconds[:1] for size, seconds in cold_then_warm.items()})
    warm = timed(monkeypatch, Clocked(cold_then_warm), num_before=1)
    assert [row == pytest.approx((20.0, 40.0)) for row in cold.ms] == [True, True]
    assert [row == pytest.approx((10.0, 30.0)) for row in warm.ms] == [True, True]


def test_a_wider_graph_is_never_called_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    found = curve(monkeypatch, {2: [0.010], 4: [0.030], 8: [0.020], 16: [0.040]})
    for row in found.ms:
        assert row == pytest.approx((10.0, 25.0, 25.0, 40.0))


def test_the_cost_of_a_decision_is_only_that_of_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(latencies.time, "perf_counter", lambda: clock.now)
    seconds = itertools.cycle([0.002, 0.002, 0.900])  # others on the machine

    class Choosing:
        def shape_of(self, rows: Any) -> Any:
            clock.now += next(seconds)

        def choose(self, rows: Any) -> Any:
            clock.now += 0.003  # the menu of graphs, which every policy needs
            return self.shape_of(rows)

    def generate(prompt: list[int], policy: Any, config: Any) -> Any:
        for _ in range(config.max_new_tokens):
            clock.now += 0.005
            yield policy.choose([])

    engine: Any = SimpleNamespace(generate=generate)
    policy: Any = Choosing()
    assert decision_milliseconds(engine, [5], policy, num_tokens=9) == pytest.approx(2.0)


def test_a_slow_model_gets_fewer_rounds_and_still_a_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Clocked({2: [0.1 * CURVE_SECONDS, 0.12 * CURVE_SECONDS], 4: [0.2 * CURVE_SECONDS]})
    found = timed(monkeypatch, model)
    assert model.num_forwards == MIN_ROUNDS * 2 * 2
    for row in found.ms:
        assert row == pytest.approx((100 * CURVE_SECONDS, 200 * CURVE_SECONDS), rel=0.2)


def test_rounds_left_out_count_as_soon_as_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[int] = []
    timed(monkeypatch, Clocked({2: [0.5 * CURVE_SECONDS], 4: [CURVE_SECONDS]}), tick=progress.append)
    assert MIN_ROUNDS == 2
    assert progress[:5] == [1, 1, 1, 1, (ROUNDS - MIN_ROUNDS) * 2 * 2]
    assert sum(progress) == ROUNDS * 2 * 2


def test_a_first_forward_that_reads_weights_from_disk_costs_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Clocked({2: [0.9 * CURVE_SECONDS, *[0.001] * 100], 4: [0.002]})
    timed(monkeypatch, model)
    assert model.num_forwards == ROUNDS * 2 * 2


def test_a_quick_model_gets_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Clocked({2: [0.001], 4: [0.002]})
    timed(monkeypatch, model)
    assert model.num_forwards == ROUNDS * 2 * 2


def test_catching_up_over_many_full_graphs_takes_time_in_proportion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        latencies,
        "_catch_up_ms",
        lambda draft, target, lag, batch_size: seen.append((lag, batch_size)) or 1e3 * lag * batch_size,
    )
    ticks: list[None] = []
    draft: Any = SimpleNamespace(prefill_chunk=16)
    table = latencies.switching_costs(
        draft, draft, max_lag=200, num_rows=8, tick=lambda: ticks.append(None)
    )
    assert (table.lags, table.batch_sizes) == ((2, 16, 64, 200), (1, 2, 4, 8))
    assert table.seconds == tuple(
        tuple(float(lag * batch_size) for batch_size in table.batch_sizes) for lag in table.lags
    )
    assert {pair for pair in seen if pair[0] >= 64} == {(64, 1), (200, 1)}, (
        "four graphs of 16 tokens, but one batch size of every lag"
    )
    assert len(ticks) == 16


class Stepping:
    """An engine in a busy hour: the target takes twice the profile's time, and half of that in steps
    without a draft. The draft's first forward in a step takes 5 ms longer than expected, the host 1 ms.
    """

    max_context = 64

    def __init__(self, *models: Any, max_context: int) -> None:
        self.target, self.draft = models
        self.trace = SimpleNamespace(total_ms={"draft": 0.0})

    def step(self, state: DecodeState, policy: FixedShape) -> Any:
        state.tokens.append(1)
        depth = policy.shape.depth
        in_target = 2.0 * LATENCY.verify.at(2, 0) * (1.0 if depth else 0.5)
        in_draft = 5.0 + depth * LATENCY.draft.at(policy.shape.width, 0) if depth else 0.0
        self.target.graph_ms += in_target
        self.draft.graph_ms += in_draft
        self.trace.total_ms["draft"] += in_draft + 0.25 * depth
        CLOCK.now += (in_target + in_draft + 0.25 * depth + 1.0) / 1e3
        return SimpleNamespace(shape=policy.shape, verified=2, context_len=0)


class Quicker(Stepping):
    """An engine whose forwards take less in steps than the curves expect: the draft's a half, after 7 ms
    of the first one; the target's of 2 tokens a third, of 8 tokens three quarters. It slows down from one
    step to the next.
    """

    def __init__(self, *models: Any, max_context: int) -> None:
        super().__init__(*models, max_context=max_context)
        self.slowness = 1.0

    def step(self, state: DecodeState, policy: FixedShape) -> Any:
        shape = policy.shape
        state.tokens += [1] * 5
        assert shape.verify is not None
        self.slowness *= 1.001
        expected_ms = shape.depth * policy.latency.draft.at(4, 0)
        self.draft.graph_ms += 7.0 + expected_ms / 2
        self.target.graph_ms += self.slowness * (
            policy.latency.verify.at(shape.verify, 0) * (1 / 3 if shape.verify < 8 else 3 / 4)
        )
        return SimpleNamespace(shape=shape, verified=shape.verify, context_len=0)


@pytest.mark.parametrize("plain_ms", (3.0, 1.1 * IN_STEP_MS))
def test_curves_are_those_of_forwards_within_steps_unless_the_target_is_slow(
    monkeypatch: pytest.MonkeyPatch, plain_ms: float
) -> None:
    monkeypatch.setattr(latencies, "Engine", Quicker)
    monkeypatch.setattr(latencies, "RecordedModel", lambda model, *_: model)
    monkeypatch.setattr(latencies, "prefill", lambda *_: None)
    cache = SimpleNamespace(rollback_=lambda _: None)
    models = [SimpleNamespace(cache=cache, graph_ms=0.0, num_candidates=8) for _ in range(2)]
    verify = Curve((0, 32), (2, 8, 64), ((plain_ms, 2 * plain_ms, 8 * plain_ms),) * 2)
    latency = LatencyModel(FLAT, verify, 0.0, 0.0, 0.0)
    policy = FixedShape(Shape(1, 2), USELESS, latency, (2, 8))
    engine: Any = Quicker(*models, max_context=64)
    draft, target = in_step_curves(engine, [5], policy, max_depth=4)
    if plain_ms > IN_STEP_MS:
        assert (draft, target) == (FLAT, verify)
        return
    assert draft.ms == (pytest.approx((1.5, 2.0)),), "without what only the first forward takes longer"
    plain = target.ms[0][0]
    assert 1.0 < plain < 1.001 ** (2 * IN_STEP_TURNS * IN_STEP_STEPS)
    assert target.ms == (pytest.approx((plain, 4.5 * plain, 18.0 * plain), rel=0.003),) * 2, (
        "sizes take turns, so a machine that slows down changes no ratio"
    )


@pytest.mark.parametrize(
    ("drafting", "factor"),
    (
        ({1: [7.0, 9.0, 8.0], 5: [10.0, 90.0, 9.0]}, 0.5),  # (10 - 8) ms of 4 growth steps of 1 ms
        ({1: [9.0], 5: [3.0]}, MIN_FACTOR),  # another program slowed down the small trees
        ({2: [5.0]}, 1.0),
    ),
)
def test_a_growth_step_takes_what_deeper_trees_take_longer(
    drafting: dict[int, list[float]], factor: float
) -> None:
    assert latencies._growth_factor(drafting, 1.0) == pytest.approx(factor)


def test_times_outside_graphs_and_the_share_of_plain_decoding_do_not_depend_on_a_busy_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latencies, "Engine", Stepping)
    monkeypatch.setattr(latencies, "RecordedModel", lambda model, *_: model)
    monkeypatch.setattr(latencies, "prefill", lambda *_: None)
    models = [
        SimpleNamespace(cache=SimpleNamespace(rollback_=lambda _: None), graph_ms=0.0) for _ in range(2)
    ]
    engine: Any = Stepping(*models, max_context=64)
    monkeypatch.setattr(latencies.time, "perf_counter", lambda: CLOCK.now)
    found = host_milliseconds(engine, [5], FixedShape(Shape(1, 2), USELESS, LATENCY, (2, 8)))
    assert found == pytest.approx(
        {"growth_host_ms": 0.25, "step_host_ms": 5.0 + 1.0, "plain_host_ms": 1.0, "plain_share": 0.5}
    )
