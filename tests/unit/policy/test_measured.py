"""Corrections of a profile by steps, with machines made by hand."""

from __future__ import annotations

import random

import pytest

from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.measured import FORGOTTEN, GraphFactors, MeasuredLatency
from yggdrasil.state import PLAIN, Shape, StepMs

SIZES = (2, 8, 32)
PROFILE = LatencyModel(
    draft=Curve((0, 512), SIZES, ((1.0, 1.5, 4.0), (1.2, 1.8, 5.0))),
    verify=Curve((0, 512), SIZES, ((10.0, 11.0, 30.0), (11.0, 12.0, 40.0))),
    growth_host_ms=0.0,
    step_host_ms=0.4,
    plain_host_ms=0.2,
    plain_share=0.9,
)


def observed(factors: GraphFactors, size: int, ratio: float, times: int = 1) -> None:
    for _ in range(times):
        factors.observe_(size, ratio)


def test_an_untried_graph_takes_the_difference_of_the_profile_more_than_the_next_smaller_one() -> None:
    slow = GraphFactors(PROFILE.verify)  # 10, 11 and 30 ms
    assert slow.at_each() == dict.fromkeys(SIZES, 1.0)
    observed(slow, 8, 2.0)
    assert slow.at_each() == pytest.approx({2: 1.0, 8: 2.0, 32: (22 + 19) / 30})
    observed(slow, 2, 1.5)
    assert slow.at_each() == pytest.approx({2: 1.5, 8: 2.0, 32: (22 + 19) / 30}, rel=0.02)
    quick = GraphFactors(PROFILE.verify)
    observed(quick, 8, 0.5)
    assert quick.at_each() == dict.fromkeys(SIZES, 0.5)


def test_a_larger_graph_is_never_expected_to_be_quicker_than_one_that_ran() -> None:
    sizes = (2, 8, 32)
    factors = GraphFactors(Curve((0,), sizes, ((1.0, 4.0, 3.0),)))
    observed(factors, 8, 2.0)
    assert factors.at_each()[32] == pytest.approx(8 / 3)


def test_an_untried_graph_between_two_that_ran_takes_at_most_its_share_of_their_difference() -> None:
    for profile, expected in (((10.0, 25.0, 12.0), 10.5), ((10.0, 10.2, 12.0), 10.2)):
        factors = GraphFactors(Curve((0,), SIZES, (profile,)))
        observed(factors, 2, 1.0)
        assert factors.at_each()[8] == pytest.approx(1.0)
        observed(factors, 32, 1.0)
        assert factors.at_each()[8] * profile[1] == pytest.approx(expected, abs=0.1)
    falling = GraphFactors(Curve((0,), SIZES, ((10.0, 25.0, 12.0),)))
    observed(falling, 2, 1.0)
    observed(falling, 32, 0.5)
    assert falling.at_each()[8] * 25.0 == pytest.approx(10.0)
    alone = GraphFactors(Curve((0,), SIZES, ((10.0, 25.0, 12.0),)))
    observed(alone, 32, 1.0)
    assert alone.at_each()[8] * 25.0 == pytest.approx(12.0)


def test_the_first_forward_of_a_graph_shows_its_factor() -> None:
    factors = GraphFactors(PROFILE.verify)
    observed(factors, 8, 1.0, 50)
    observed(factors, 2, 0.4)
    assert factors.at_each() == pytest.approx({2: 0.4, 8: 1.0, 32: (11 + 0.4 * 19) / 30})


def test_a_slow_minute_is_not_the_graph_s() -> None:
    factors = GraphFactors(PROFILE.verify)
    for _ in range(50):
        observed(factors, 2, 1.0)
        observed(factors, 8, 1.0)
    observed(factors, 8, 3.0, 40)
    found = factors.at_each()
    assert found[8] == pytest.approx(3.0, rel=0.05)
    assert found[2] == pytest.approx(found[8], rel=0.35)


def test_an_interrupted_forward_counts_for_little() -> None:
    factors = GraphFactors(PROFILE.verify)
    observed(factors, 8, 1.0, 100)
    observed(factors, 8, 50.0)
    assert factors.at_each()[8] < 1.2


def test_a_graph_that_did_not_run_for_long_is_tried_again_the_later_the_slower_it_was() -> None:
    factors = GraphFactors(PROFILE.verify)
    observed(factors, 2, 2.0)
    observed(factors, 8, 1.0, FORGOTTEN - 1)
    assert factors.at_each()[2] == pytest.approx(2.0)
    observed(factors, 8, 1.0)
    assert 1.0 < factors.at_each()[2] < 2.0
    observed(factors, 8, 1.0, FORGOTTEN)
    assert factors.at_each()[2] == pytest.approx(1.0)


def test_steps_correct_every_part_of_the_profile() -> None:
    truth = LatencyModel(
        draft=PROFILE.draft.slower({2: 0.5, 8: 1.6, 32: 1.0}),
        verify=PROFILE.verify.slower({2: 0.6, 8: 2.0, 32: 0.7}),
        growth_host_ms=0.0,
        step_host_ms=0.9,
        plain_host_ms=0.5,
        plain_share=0.9,
    )
    measured = MeasuredLatency(PROFILE)
    dice = random.Random(0)
    for step in range(400):
        # one graph of the draft in a step: its head has the size of its growth
        shape, num_tokens = dice.choice([(PLAIN, 1), (Shape(2, 3), 8), (Shape(2, 4), 32)])
        context_len = dice.choice([0, 128, 512])
        noise = dice.uniform(0.97, 1.03)
        draft_ms = truth.draft.at(2, context_len) * shape.depth
        share = 1.0 if shape.depth else truth.plain_share
        verify_ms = share * truth.verify.at(num_tokens, context_len)
        host_ms = truth.step_host_ms if shape.depth else truth.plain_host_ms
        parts = StepMs(0.0, noise * draft_ms, noise * verify_ms, host_ms)
        if step % 2 and shape.depth:
            # 0.3 ms of the host's time are in the first forward, which finds cold caches
            head_ms = noise * draft_ms / shape.depth
            growth_ms = noise * draft_ms - head_ms
            parts = StepMs(head_ms + 0.3, growth_ms, noise * verify_ms, host_ms - 0.3)
        measured.observe_([shape], num_tokens, context_len, parts)
    in_use = measured.use_()
    assert in_use.draft.at(2, 0) == pytest.approx(truth.draft.at(2, 0), rel=0.05)
    assert in_use.verify.ms[0] == pytest.approx(truth.verify.ms[0], rel=0.05)
    assert in_use.plain_ms(512) == pytest.approx(truth.plain_ms(512), rel=0.05)
    assert in_use.step_host_ms == pytest.approx(truth.step_host_ms, rel=0.1)


def test_corrections_that_hardly_change_leave_the_profile_in_use() -> None:
    measured = MeasuredLatency(PROFILE)
    for _ in range(50):
        measured.observe_([PLAIN], 1, 0, StepMs(0.0, 0.0, 0.9 * 10.1, 0.2))
    assert measured.use_() is PROFILE


def test_a_part_whose_time_is_not_known_yet_teaches_nothing() -> None:
    measured = MeasuredLatency(PROFILE)
    for _ in range(5):
        measured.observe_([Shape(2, 3)], 8, 0, StepMs(0.0, 0.0, 0.0, 0.4))
    assert measured.use_().verify == PROFILE.verify
    assert measured.use_().draft == PROFILE.draft


def test_a_step_returns_how_much_slower_it_is_than_the_times_in_use() -> None:
    measured = MeasuredLatency(PROFILE)
    slow = StepMs(0.0, 2 * 3 * 1.0, 2 * 11.0, 0.4)
    measured.observe_([Shape(2, 3)], 8, 0, slow)  # the first forwards teach nothing
    assert measured.observe_([Shape(2, 3)], 8, 0, slow) == pytest.approx(28.4 / 14.4)
    measured.use_()
    assert measured.observe_([Shape(2, 3)], 8, 0, slow) == pytest.approx(1.0)


def test_the_cold_first_forward_of_the_draft_is_the_step_s_not_the_graph_s() -> None:
    for depth, growth_ms in ((1, 0.01), (3, 2.0)):
        measured = MeasuredLatency(PROFILE)
        for _ in range(50):
            measured.observe_([Shape(2, depth)], 2, 0, StepMs(2.7, growth_ms, 10.0, 0.1))
        in_use = measured.use_()
        assert in_use.draft == PROFILE.draft
        assert in_use.step_host_ms == pytest.approx(0.1 + 1.7, rel=0.05)


def test_a_step_in_which_a_graph_runs_for_the_first_time_teaches_nothing() -> None:
    measured = MeasuredLatency(PROFILE)
    before = measured.state
    cold = StepMs(0.0, 90.0, 900.0, 180.0)
    assert measured.observe_([PLAIN], 1, 0, cold) is None
    assert measured.observe_([Shape(2, 3)], 1, 0, cold) is None  # the draft's graph is new
    assert measured.observe_([Shape(2, 3)], 64, 0, cold) is None  # the target's larger graph is new
    assert measured.state == before
    assert measured.observe_([Shape(2, 3)], 64, 0, cold) is not None
    assert measured.state != before
