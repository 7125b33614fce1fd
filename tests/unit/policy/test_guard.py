"""The guard against losing to plain decoding, on scripted clocks."""

from __future__ import annotations

from dataclasses import replace

import torch

from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.guard import CHECK_INTERVAL, CHECK_STEPS, REFILL_SHARE, START_LOSSES, Guard
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import REPEATS, FixedShape
from yggdrasil.state import PLAIN, DecodeState, Row, Shape, StepResult
from yggdrasil.tree import TokenTree

PLAIN_MS = 10.0
STEP_MS = 15.0
FLAT = Curve((0,), (2, 8), ((1.0, 1.0),))
LATENCY = LatencyModel(
    draft=FLAT,
    verify=Curve((0,), (2, 8), ((PLAIN_MS, 11.0),)),
    growth_host_ms=0.0,
    step_host_ms=0.0,
    plain_host_ms=0.0,
)
SPECULATIVE = Shape(1, 4, 5)  # 1 head draft, 3 growth forwards, 11 of verification: 15 ms


def guard() -> Guard:
    assert LATENCY.step_ms(1, 4, 5, 0) == STEP_MS
    return Guard(FixedShape(SPECULATIVE, Acceptance((-1.0, 0.0), (0.0, 1.0), {}), LATENCY, (2, 8)), LATENCY)


def result(shape: Shape, num_tokens: int, ms: float) -> StepResult:
    tree = TokenTree.root(1, 1)
    return StepResult(
        [1] * num_tokens, shape, shape.num_nodes, 5 if shape.depth else 1, 0, 1.0, lambda: tree, [0], ms
    )


def run(
    policy: Guard, num_steps: int, *, emitted: int, plain_ms: float = PLAIN_MS, step_ms: float = STEP_MS
) -> tuple[float, int, list[bool]]:
    """Milliseconds, tokens and which steps speculated."""
    spent = 0.0
    tokens = 0
    speculated = []
    row = Row(0, DecodeState([1], hidden_of=torch.zeros(1).detach))
    for _ in range(num_steps):
        [shape] = policy.choose([row]).shapes
        one = result(shape, emitted, step_ms) if shape.depth else result(PLAIN, 1, plain_ms)
        policy.observe(one)
        spent += one.ms
        tokens += len(one.tokens)
        speculated.append(shape.depth > 0)
    return spent, tokens, speculated


def test_a_winning_session_never_stops_speculating() -> None:
    _, _, speculated = run(guard(), 200, emitted=3)
    assert all(speculated)


def test_a_losing_session_stays_within_three_percent_of_plain_decoding() -> None:
    spent, tokens, speculated = run(guard(), 128, emitted=1)
    assert spent <= 1.03 * tokens * PLAIN_MS
    assert spent <= tokens * PLAIN_MS + START_LOSSES * (STEP_MS - PLAIN_MS) + REFILL_SHARE * spent + STEP_MS
    assert 0 < sum(speculated) < 10


def test_a_few_unlucky_steps_at_the_start_do_not_stop_speculation_whatever_a_step_costs() -> None:
    expensive = Shape(1, 12, 5)  # 11 growth forwards of 1 ms, 1 of the head and 11 of verification: 23 ms
    policy = guard()
    for _ in range(4):
        policy.observe(result(expensive, 1, LATENCY.step_ms(1, 12, 5, 0)))
        assert policy.speculating
    policy.observe(result(expensive, 1, LATENCY.step_ms(1, 12, 5, 0)))
    assert not policy.speculating


def test_a_losing_session_tries_again_later() -> None:
    _, _, speculated = run(guard(), 600, emitted=1)
    first_stop = speculated.index(False)
    assert any(speculated[first_stop:])


def test_a_session_that_starts_to_win_comes_back_for_good() -> None:
    policy = guard()
    run(policy, 50, emitted=1)
    assert not policy.speculating
    _, _, speculated = run(policy, 400, emitted=4)
    assert all(speculated[-100:])


def test_one_slow_step_of_the_machine_does_not_stop_a_winning_session() -> None:
    policy = guard()
    run(policy, 20, emitted=3)
    policy.observe(result(SPECULATIVE, 3, 5000.0))
    assert policy.speculating


def test_a_profile_slower_than_the_machine_does_not_hide_a_loss() -> None:
    """The profile has 10 and 15 ms; the machine takes 5 and 7.5, so 1 token per step still loses."""
    spent, tokens, speculated = run(guard(), 200, emitted=1, plain_ms=5.0, step_ms=7.5)
    assert sum(speculated) < 30
    # lost before the loss was measured
    assert spent <= 1.03 * tokens * 5.0 + START_LOSSES * (STEP_MS - PLAIN_MS) + STEP_MS


def test_catching_up_before_a_probe_is_counted_and_not_interrupted() -> None:
    policy = guard()
    run(policy, 50, emitted=1)
    while not policy.speculating:
        policy.observe(result(PLAIN, 1, PLAIN_MS))
    for _ in range(4):
        policy.observe(replace(result(PLAIN, 1, 3 * PLAIN_MS), caught_up=True))
        assert policy.speculating
    policy.observe(result(SPECULATIVE, 1, STEP_MS))
    assert not policy.speculating
    _, _, speculated = run(policy, 400, emitted=1)
    assert not any(speculated)  # 80 ms lost at 0.0075 of the time take a thousand steps


def test_verifying_what_repeats_costs_allowance_and_a_bare_root_does_not() -> None:
    policy = Guard(FixedShape(REPEATS, guard().inner.acceptance, LATENCY, (2, 8)), LATENCY)
    bare = replace(result(PLAIN, 1, PLAIN_MS), shape=REPEATS)
    for _ in range(10):
        policy.observe(bare)
        assert policy.speculating
    wrong = replace(bare, verified=8, ms=3 * PLAIN_MS)
    for _ in range(4):
        policy.observe(wrong)
    assert not policy.speculating


def test_a_choice_is_that_of_the_inner_policy() -> None:
    policy = guard()
    choice = policy.choose([Row(0, DecodeState([1]))])
    assert choice.shapes == (SPECULATIVE,)
    assert choice.calibrations[0] is policy.inner.acceptance.calibration


def test_on_a_busy_machine_where_every_step_is_slow_speculation_goes_on() -> None:
    policy = guard()
    _, _, speculated = run(policy, 300, emitted=3, plain_ms=4 * PLAIN_MS, step_ms=4 * STEP_MS)
    assert speculated[:30].count(False) <= CHECK_STEPS
    assert speculated.count(False) <= CHECK_STEPS * (1 + 300 // CHECK_INTERVAL)


def test_a_machine_that_becomes_busy_does_not_stop_a_winning_session() -> None:
    policy = guard()
    run(policy, 100, emitted=3)
    _, _, speculated = run(policy, 200, emitted=3, plain_ms=5 * PLAIN_MS, step_ms=5 * STEP_MS)
    assert speculated.count(False) <= CHECK_STEPS * (1 + 200 // CHECK_INTERVAL)


def test_a_profile_that_is_wrong_about_speculative_steps_alone_hides_no_loss() -> None:
    """Speculative steps take four times their predicted time, plain ones do not: 20 ms a token, not 10."""
    spent, tokens, speculated = run(guard(), 400, emitted=3, step_ms=4 * STEP_MS)
    assert sum(speculated) < 20
    surplus = 2 * 4 * STEP_MS  # of the two steps before plain steps were measured
    assert spent <= 1.03 * tokens * PLAIN_MS + START_LOSSES * (STEP_MS - PLAIN_MS) + surplus
