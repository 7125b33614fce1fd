"""Metrics of steps and requests that are made by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from yggdrasil.serve.metrics import Metrics
from yggdrasil.serve.request import CohortName, CohortStep, RequestReport, ShadowReport, StepReport

STEP = StepReport(
    gamma=3,
    prompt_tokens=0,
    drafted=(3, 3),
    emitted=(4, 2),
    returned_tokens=5,
    max_lag=0,
    catch_up_ms=0.0,
    draft_ms=2.0,
    verify_ms=5.0,
    total_ms=10.0,
    running=2,
    waiting=1,
    free_pages=30,
    num_pages=40,
)
REQUEST = RequestReport(
    finish="stop",
    prompt_tokens=7,
    emitted_tokens=11,
    shared_tokens=4,
    target_passes=4,
    preemptions=1,
    queue_ms=20.0,
    ttft_ms=100.0,
    total_ms=600.0,
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(token_bytes=1000, gamma_max=7)


def value(metrics: Metrics, name: str, **labels: object) -> float | None:
    return metrics.registry.get_sample_value(name, {key: str(label) for key, label in labels.items()})


def mean(metrics: Metrics, name: str, **labels: object) -> float:
    total = value(metrics, f"{name}_sum", **labels)
    count = value(metrics, f"{name}_count", **labels)
    assert total is not None
    assert count
    return total / count


def values(metrics: Metrics, name: str, **labels: tuple[object, ...]) -> list[float | None]:
    """The values of a metric for several values of one label."""
    [(label, names)] = labels.items()
    return [value(metrics, name, **{label: each}) for each in names]


def test_a_step_counts_emitted_and_rejected_tokens_and_passes(metrics: Metrics) -> None:
    metrics.on_step(STEP)  # 3 of 3 and 1 of 3 accepted
    assert value(metrics, "ygg_emitted_tokens_total") == 5  # one is after the end of its text
    assert value(metrics, "ygg_target_passes_total") == 1
    assert mean(metrics, "ygg_emitted_per_pass") == 3  # AAL
    assert mean(metrics, "ygg_accepted_tokens", batch_size=2) == 2
    assert value(metrics, "ygg_rollback_tokens_total") == 2
    assert value(metrics, "ygg_rejected_kv_bytes_total") == 2000


def test_vllm_s_counters_count_rows_that_drafted_and_their_tokens(metrics: Metrics) -> None:
    metrics.on_step(STEP)
    metrics.on_step(replace(STEP, drafted=(3, 0), emitted=(1, 1)))
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [value(metrics, f"vllm:spec_decode_{name}_total") for name in names] == [3, 9, 4]


def test_drafts_and_gains_are_counted_by_cohort(metrics: Metrics) -> None:
    name = CohortName("agents", "greedy", "no")
    metrics.on_step(replace(STEP, cohorts=[CohortStep(name, 4, 3, 1500.0, True)]))
    metrics.on_step(replace(STEP, cohorts=[CohortStep(name, 4, 0, -500.0, False)]))
    names = ("draft_tokens_total", "accepted_tokens_total", "gained_seconds", "speculates")
    found = [value(metrics, f"ygg_cohort_{each}", **name._asdict()) for each in names]
    assert found == [8, 3, 1.0, 0]


def test_shadows_count_their_differences_and_times_and_are_no_requests(metrics: Metrics) -> None:
    assert value(metrics, "ygg_shadow_differences_total") == 0
    metrics.on_shadow(ShadowReport(False, 200.0, 100.0))
    metrics.on_shadow(ShadowReport(True, 300.0, 100.0))
    assert value(metrics, "ygg_shadow_requests_total") == 2
    assert value(metrics, "ygg_shadow_differences_total") == 1
    seconds = values(metrics, "ygg_shadow_seconds_total", decoding=("plain", "speculative"))
    assert seconds == [0.5, 0.2]
    metrics.on_finish(replace(REQUEST, is_shadow=True))
    assert value(metrics, "ygg_requests_total", finish="stop") is None


def test_acceptance_and_rejection_are_counted_by_depth(metrics: Metrics) -> None:
    metrics.on_step(STEP)
    metrics.on_step(replace(STEP, drafted=(1, 0), emitted=(1, 1)))
    assert values(metrics, "ygg_drafted_at_depth_total", depth=(1, 2, 3, 4)) == [3, 2, 2, None]
    assert values(metrics, "ygg_accepted_at_depth_total", depth=(1, 2, 3)) == [2, 1, 1]
    assert values(metrics, "ygg_rejected_at_depth_total", depth=(1, 2, 3)) == [1, 1, None]


def test_nodes_of_trees_are_counted_by_their_depth(metrics: Metrics) -> None:
    """A tree with two nodes of depth 1 and two of depth 2 accepts one; a chain of two accepts both."""
    metrics.on_step(replace(STEP, drafted=(4, 2), emitted=(2, 3), depths=((1, 1, 2, 2), (1, 2))))
    assert values(metrics, "ygg_drafted_at_depth_total", depth=(1, 2, 3)) == [3, 3, None]
    assert values(metrics, "ygg_accepted_at_depth_total", depth=(1, 2)) == [2, 1]
    assert values(metrics, "ygg_rejected_at_depth_total", depth=(1, 2, 3)) == [None, 1, None]


def test_a_row_that_failed_emits_nothing_and_makes_no_count_negative(metrics: Metrics) -> None:
    metrics.on_step(replace(STEP, drafted=(2,), emitted=(0,)))
    assert value(metrics, "ygg_emitted_per_pass_count") == 0
    assert value(metrics, "ygg_rollback_tokens_total") == 2
    assert value(metrics, "ygg_rejected_at_depth_total", depth=1) == 1


def test_the_seconds_of_a_step_are_split_into_stages(metrics: Metrics) -> None:
    metrics.on_step(STEP)
    seconds = values(metrics, "ygg_stage_seconds_total", stage=("draft", "verify", "host"))
    assert seconds == pytest.approx([0.002, 0.005, 0.003])
    assert mean(metrics, "ygg_step_seconds", batch_size=2) == pytest.approx(0.01)


def test_steps_are_counted_by_gamma_and_switches_by_direction(metrics: Metrics) -> None:
    plain = replace(STEP, gamma=0, drafted=(0, 0), emitted=(1, 1))
    for step in (STEP, plain, plain, STEP, replace(STEP, drafted=(), emitted=(), prompt_tokens=9)):
        metrics.on_step(step)
    assert values(metrics, "ygg_steps_total", gamma=(0, 3)) == [2, 2]
    assert value(metrics, "ygg_steps_without_speculation_total") == 2
    assert values(metrics, "ygg_speculation_switches_total", to=("on", "off")) == [1, 1]
    assert value(metrics, "ygg_gamma") == 3
    assert value(metrics, "ygg_prefilled_tokens_total") == 9
    assert value(metrics, "ygg_target_passes_total") == 5


def test_goodput_is_a_mean_over_time_without_steps_with_prompts(metrics: Metrics) -> None:
    metrics.on_step(STEP)
    metrics.on_step(replace(STEP, total_ms=20.0))
    metrics.on_step(replace(STEP, total_ms=500.0, prompt_tokens=32))
    goodput = value(metrics, "ygg_goodput_tokens_per_second", batch_size=2, gamma=3)
    assert goodput == pytest.approx(12 / 0.03)


def test_gauges_show_the_last_step(metrics: Metrics) -> None:
    metrics.on_step(STEP)
    metrics.on_step(replace(STEP, running=5, waiting=0, free_pages=10, max_lag=6))
    names = ("running_requests", "waiting_requests", "draft_lag_tokens")
    assert [value(metrics, f"ygg_{name}") for name in names] == [5, 0, 6]
    assert values(metrics, "ygg_kv_pages", state=("free", "used")) == [10, 30]


def test_a_request_counts_its_tokens_and_times(metrics: Metrics) -> None:
    metrics.on_finish(REQUEST)
    assert value(metrics, "ygg_requests_total", finish="stop") == 1
    totals = ("prompt_tokens", "shared_prompt_tokens", "preemptions")
    assert [value(metrics, f"ygg_{name}_total") for name in totals] == [7, 4, 1]
    means = {"queue_seconds": 0.02, "ttft_seconds": 0.1, "tpot_seconds": 0.05, "request_seconds": 0.6}
    for name, seconds in means.items():
        assert mean(metrics, f"ygg_{name}") == pytest.approx(seconds)
    assert mean(metrics, "ygg_request_tokens_per_second") == pytest.approx(20)
    assert mean(metrics, "ygg_request_emitted_per_pass") == pytest.approx(11 / 4)


def test_a_request_cancelled_before_its_first_token_has_no_token_times(metrics: Metrics) -> None:
    metrics.on_finish(replace(REQUEST, finish="cancelled", emitted_tokens=0, target_passes=0, ttft_ms=0.0))
    assert value(metrics, "ygg_requests_total", finish="cancelled") == 1
    names = ("ttft_seconds", "tpot_seconds", "request_seconds")
    assert [value(metrics, f"ygg_{name}_count") for name in names] == [0, 0, 1]


def test_every_metric_has_a_prefix_a_help_text_and_base_units(metrics: Metrics) -> None:
    for family in metrics.registry.collect():
        assert family.name.startswith(("ygg_", "vllm:spec_decode_num_"))
        assert family.documentation
        assert not re.search("_(ms|milliseconds|mib|kb)$", family.name)


def test_all_batch_sizes_and_gammas_give_fewer_than_1200_lines(metrics: Metrics) -> None:
    for batch_size in range(1, 17):
        for gamma in range(8):
            drafted = (gamma,) * batch_size
            metrics.on_step(replace(STEP, gamma=gamma, drafted=drafted, emitted=(1,) * batch_size))
    metrics.on_finish(REQUEST)
    assert len(metrics.render().splitlines()) < 1200


def test_two_servers_do_not_share_their_metrics(metrics: Metrics) -> None:
    metrics.on_step(STEP)
    assert value(Metrics(token_bytes=1, gamma_max=1), "ygg_emitted_tokens_total") == 0
