"""A policy of shapes on machines that are not as their profile, with results made by hand."""

from __future__ import annotations

import pytest

from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.learning import OBSERVING_INTERVAL_MS, LearningShape
from yggdrasil.policy.measured import MeasuredLatency
from yggdrasil.policy.shape import BestShape
from yggdrasil.state import PLAIN, DecodeState, Row, Shape, StepMs, StepResult
from yggdrasil.tree import TokenTree

SIZES = (2, 8)
LATENCY = LatencyModel(
    draft=Curve((0,), SIZES, ((1.0, 1.0),)),
    verify=Curve((0,), SIZES, ((10.0, 10.0),)),
    growth_host_ms=0.0,
    step_host_ms=0.1,
    plain_host_ms=0.1,
)
# chains whose tokens are accepted with 0.8
AAL = tuple(
    tuple(sum(0.8**level for level in range(min(k, depth) + 1)) for k in range(depth + 1))
    for depth in range(1, 7)
)
BEST = BestShape(
    shape=PLAIN,
    acceptance=Acceptance((-1.0, 0.0), (0.0, 1.0), {1: AAL}),
    latency=LATENCY,
    verify_widths=(2, 8),
    widths=(1,),
)


def row(num_tokens: int = 20, lag: int = 0) -> Row:
    state = DecodeState([1] * num_tokens)
    return Row(0, state, target_len=state.root_pos - lag, draft_len=state.root_pos)


def result(shape: Shape, verified: int, parts: StepMs | None, **more: object) -> StepResult:
    tree = TokenTree.root(1, 1)
    ms = 100.0 if parts is None else sum(parts)
    fields = {"ms": ms, "parts": parts, **more}
    first = [1], shape, verified, verified, 19, 1.0, lambda: tree, [0]
    return StepResult(*first, **fields)  # type: ignore[arg-type]


def step(policy: LearningShape, *, draft: float, verify: float, caught_up: bool = False) -> Shape:
    """A step whose models take these multiples of the profile."""
    [shape] = policy.choose([row()]).shapes
    parts = StepMs(draft * (shape.depth > 0), draft * max(0, shape.depth - 1), verify * 10.0, 0.1)
    policy.observe(result(shape, shape.depth + 1, parts, caught_up=caught_up))
    return shape


def test_shapes_follow_the_machine() -> None:
    policy = LearningShape(BEST, MeasuredLatency(LATENCY))
    expected = BEST.choose([row()]).shapes[0].depth
    depths = [step(policy, draft=6.0, verify=1.0).depth for _ in range(100)]
    assert depths[0] == expected
    assert depths[-1] < expected


def test_a_machine_like_its_profile_changes_nothing() -> None:
    measured = MeasuredLatency(LATENCY)
    policy = LearningShape(BEST, measured)
    shapes = [step(policy, draft=1.0, verify=1.0) for _ in range(100)]
    assert shapes == list(BEST.choose([row()]).shapes * 100)
    assert measured.in_use is LATENCY


def test_all_requests_have_what_one_of_them_learnt() -> None:
    measured = MeasuredLatency(LATENCY)
    first = LearningShape(BEST, measured)
    for _ in range(100):
        step(first, draft=6.0, verify=1.0)
    assert LearningShape(BEST, measured).choose([row()]).shapes == first.choose([row()]).shapes


def test_quick_steps_are_observed_now_and_then() -> None:
    measured = MeasuredLatency(LATENCY)
    policy = LearningShape(BEST, measured)
    observed = 0
    spent = 0.0
    before = measured.state
    for _ in range(400):
        shape = step(policy, draft=0.02, verify=0.02)
        spent += 0.02 * (shape.depth + 10.0) + 0.1
        observed += measured.state != before
        before = measured.state
    assert 1 < observed <= spent / OBSERVING_INTERVAL_MS + 1


def test_steps_that_caught_up_or_do_not_know_their_parts_teach_nothing() -> None:
    measured = MeasuredLatency(LATENCY)
    policy = LearningShape(BEST, measured)
    before = measured.state
    for _ in range(20):
        step(policy, draft=6.0, verify=6.0, caught_up=True)
    [shape] = policy.choose([row()]).shapes
    policy.observe(result(shape, 2, None))
    assert measured.state == before


@pytest.mark.parametrize("lag", (0, 4))
def test_the_end_of_a_prompt_counts_as_tokens_of_the_target(lag: int) -> None:
    measured = MeasuredLatency(LATENCY)
    policy = LearningShape(BEST, measured)
    for _ in range(200):
        [shape] = policy.choose([row(lag=lag)]).shapes
        policy.observe(result(shape, 2, StepMs(1.0, max(0, shape.depth - 1), 30.0, 0.1)))
    slow, quick = (8, 2) if lag else (2, 8)
    slowness = measured.state["slowness"]["target"]
    assert slowness[str(slow)] > 2
    assert slowness[str(slow)] >= slowness[str(quick)]
