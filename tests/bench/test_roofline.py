"""The roofline claim's arithmetic by hand, and what its goals are made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from bench import claim_roofline
from bench.claim_roofline import (
    Machine,
    Pass,
    Work,
    contexts_of,
    draw,
    host_json,
    in_turns,
    kv_bytes,
    matrix_sampler,
    prefill_json,
    step_goals,
    table,
    verify_goals,
    weight_bytes,
)
from bench.lib.harness import SETTLE_SECONDS
from yggdrasil.kv import KVShape
from yggdrasil.report.timeline import Interval, StepRecord, Timeline

MACHINE = Machine(gb_per_s=10.0, tflop_per_s=2.0)
KV = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, capacity=1200)


def measured(size: int, ms: float, context: int = 512) -> Pass:
    """A pass that reads 100 MB, of a model of 50 M weights in two bytes each."""
    return MACHINE.pass_of(
        Work(size=size, num_weights=45_000_000, weight_bytes=90_000_000, kv_bytes=10_000_000),
        context,
        [ms, ms, ms],
    )


def pair(max_context: int, capacity: int = 1200) -> Any:
    kv = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, capacity=capacity)
    return SimpleNamespace(
        bundle=SimpleNamespace(
            kv_target=kv, kv_draft=kv, max_context=max_context, config=SimpleNamespace(prefill_chunk=128)
        )
    )


def test_a_context_is_keys_and_values_of_every_layer_and_head() -> None:
    assert kv_bytes(KV, 512, 2) == 512 * 3 * 2 * 2 * 8 * 2


def test_weights_are_as_many_bytes_as_they_take_in_memory_each_once_and_without_the_embeddings() -> None:
    packed = torch.zeros(10, dtype=torch.uint8)
    weights = {
        "model.lm_head.packed": packed,
        "model.head.packed": packed,
        "model.norm.weight": torch.zeros(4),
        "model.embed_tokens.weight": torch.zeros(99),
    }
    assert weight_bytes(SimpleNamespace(weights=weights)) == 26  # type: ignore[arg-type]


def test_ceilings_are_bytes_over_the_rate_and_two_operations_a_weight_and_token() -> None:
    found = measured(32, 20.0)
    assert (found.read_bytes, found.memory_ms) == (100_000_000, 10.0)
    assert found.compute_ms == pytest.approx(2 * 45_000_000 * 32 / 2e12 * 1e3)
    assert found.memory_share == 0.5
    assert found.compute_share == pytest.approx(0.072)
    assert found.to_json()["memory_share"] == 0.5


def test_prefill_is_the_chunk_as_a_rate() -> None:
    found = prefill_json(measured(128, 8.0), MACHINE.tflop_per_s)
    assert (found["tok_per_s"], found["tflop_per_s"], found["share"]) == (16000.0, 1.44, 0.72)


def test_contexts_end_where_the_widest_graph_still_has_room() -> None:
    assert contexts_of(pair(992), quick=False) == [64, 512, 992]
    assert contexts_of(pair(992, capacity=1040), quick=False) == [64, 512, 912]
    assert contexts_of(pair(256), quick=False) == [64, 256]
    assert contexts_of(pair(512), quick=False) == [64, 512]
    assert contexts_of(pair(992), quick=True) == [64]


def by_goal(goals: list[dict[str, Any]]) -> dict[str, bool]:
    return {goal["goal"]: goal["reached"] for goal in goals}


def test_verification_is_compared_with_the_narrowest_graph_at_the_same_context() -> None:
    passes = [
        measured(2, 11.0),
        measured(8, 12.0),
        measured(16, 15.0),
        measured(32, 22.0),
        measured(2, 20.0, 992),
    ]
    passes += [measured(size, 30.0, 992) for size in (8, 16, 32)]
    reached = by_goal(verify_goals(passes, [512, 992]))
    assert [reached[f"T({size})/T(2) at context 512"] for size in (8, 16, 32)] == [True, False, True]
    assert [reached[f"T({size})/T(2) at context 992"] for size in (8, 16, 32)] == [False, False, True]
    assert reached["T(1) over bytes / rate at context 512"]
    assert not reached["T(1) over bytes / rate at context 992"]


def test_weights_of_8_bits_may_grow_more_and_those_of_4_have_no_limit() -> None:
    passes = [measured(2, 10.0), measured(8, 12.9), measured(16, 18.1)]
    reached = by_goal(verify_goals(passes, [512], "int8"))
    assert [reached[f"T({size})/T(2) at context 512"] for size in (8, 16)] == [True, False]
    assert list(by_goal(verify_goals(passes, [512], "int4"))) == ["T(1) over bytes / rate at context 512"]


def test_a_graph_of_one_row_is_the_narrowest_where_there_is_one() -> None:
    passes = [measured(1, 11.0), measured(2, 20.0), measured(8, 12.0), measured(16, 40.0)]
    reached = by_goal(verify_goals(passes, [512], "int8"))
    assert reached["T(8)/T(1) at context 512"]
    assert not reached["T(16)/T(1) at context 512"]
    assert reached["T(1) over bytes / rate at context 512"]


def test_goals_of_the_step_are_left_out_where_nothing_was_drafted() -> None:
    good = {"growth_step_ms": 0.2, "host_ms": 0.4}
    bad = {"growth_step_ms": 0.21, "host_ms": 0.41}
    assert list(by_goal(step_goals({"share": 0.6}, good)).values()) == [True, True, True]
    assert list(by_goal(step_goals({"share": 0.59}, bad)).values()) == [False, False, False]
    assert list(by_goal(step_goals({"share": 0.6}, {**good, "growth_step_ms": None}))) == [
        "prefill over torch.mm",
        "ms of the host per step",
    ]


def test_samplers_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def sampler(name: str) -> Any:
        return lambda: order.append(name) or float(len(order))

    assert in_turns({"a": sampler("a"), "b": sampler("b")}, 2, lambda _: None) == {
        "a": [3.0, 5.0],
        "b": [4.0, 6.0],
    }
    assert "".join(order) == "ababab"


def test_the_throughput_of_a_product_leaves_out_the_wait_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    slept: list[float] = []

    def perf_counter() -> float:
        now[0] += 0.5
        return now[0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=perf_counter, sleep=sleep)
    monkeypatch.setattr(claim_roofline, "time", clock)
    assert matrix_sampler(64, 32, 16, torch.bfloat16)() == pytest.approx(2 * 64 * 32 * 16 / 0.5 / 1e12)
    assert slept == [SETTLE_SECONDS]


def test_the_table_and_the_figure_show_every_pass_and_goal() -> None:
    stages = (Interval("verify", 0, 4), Interval("accept", 4, 5))
    graphs = (Interval("verify 2", 1, 3, True),)
    passes = [measured(2, 11.0), measured(8, 12.0), measured(16, 15.0), measured(32, 22.0)]
    host = host_json(Timeline((StepRecord("plain", 0, 6, stages, graphs),)))
    prefill = prefill_json(measured(128, 8.0), 2.0)
    result = {
        "contexts": [512],
        "memory_gb_per_s": {"median": 10.0},
        "mm_tflop_per_s": {"2048x2048x2048": {}},
        "tflop_per_s": 2.0,
        **{kind: [each.to_json() for each in passes] for kind in ("verify", "draft")},
        "prefill": prefill,
        "host": host,
        "goals": [*verify_goals(passes, [512]), *step_goals(prefill, host)],
    }
    text = table(result)
    assert "MISSED  T(16)/T(2) at context 512: 1.364, wanted <= 1.3" in text
    assert "reached prefill over torch.mm: 0.720, wanted >= 0.6" in text
    assert "[verify 2]" in text
    assert "host 4.000 ms" in text
    figure = Figure()
    draw(figure, result)
    assert [len(axes.get_lines()) > 3 for axes in figure.axes] == [True, True]
