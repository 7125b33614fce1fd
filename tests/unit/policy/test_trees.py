"""The policy of trees over rows, on a profile and a calibration made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.competing import best_chains
from yggdrasil.policy.gamma.protocol import Load, Outcome
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import StoppingShape
from yggdrasil.policy.stopping import SmallGain
from yggdrasil.policy.trees import TreeParts, Trees
from yggdrasil.state import PLAIN, DecodeState, Row, Shape, StepMs, StepResult
from yggdrasil.step.choice import Choice
from yggdrasil.tree import TokenTree

# the draft costs a tenth of the target, which runs 16 tokens in the time of one, 64 in four times that
LATENCY = LatencyModel(
    draft=Curve((0,), (2, 8, 32, 128), ((1.0, 1.0, 1.5, 4.0),)),
    verify=Curve((0,), (2, 16, 64, 128), ((10.0, 10.0, 40.0, 80.0),)),
    growth_host_ms=0.1,
    step_host_ms=0.2,
    plain_host_ms=0.1,
)
DEPTH = 4
CHAIN = tuple(tuple(1.0 + 0.7 * min(k, depth) for k in range(depth + 1)) for depth in range(1, DEPTH + 1))
TREE = tuple(
    tuple(1.0 + 0.9 * min(k, depth) for k in range(4 * depth + 1)) for depth in range(1, DEPTH + 1)
)
GOOD = Acceptance((-4.0, 0.0), (0.0, 0.9), {1: CHAIN, 4: TREE})
USELESS = Acceptance(
    (-1.0, 0.0),
    (0.0, 0.01),
    {width: tuple((1.0,) * (1 + width * depth) for depth in range(1, DEPTH + 1)) for width in (1, 4)},
)


def policy_of(acceptance: Acceptance = GOOD, latency: LatencyModel = LATENCY) -> Trees:
    parts = TreeParts(lambda temperature: acceptance, latency, (1, 4), (4, 8, 16), stops=True)
    return Trees(parts, lambda lag, batch_size: 0.001 * lag)


def load_of(
    num_rows: int, *, nodes_max: int = 64, limits: tuple[int, ...] = (), acceptance: Acceptance = GOOD
) -> Load:
    rows = [Row(place, DecodeState([1] * 20), target_len=19, draft_len=19) for place in range(num_rows)]
    return Load(
        num_rows,
        deepest=7,
        previous_gamma=1,
        drafts_max=128 - num_rows,
        calibrations=(acceptance.calibration,) * num_rows,
        depth_limits=limits or (99,) * num_rows,
        rows=rows,
        nodes_max=nodes_max,
    )


def observed(
    policy: Trees, load: Load, choice: Choice, ms: float, tokens: int, parts: StepMs | None = None
) -> None:
    """A step of this choice in which every row emits the same number of tokens."""
    tree = TokenTree.root(1, 1)
    results = [
        StepResult(
            [1] * tokens,
            shape,
            shape.num_nodes,
            4 if shape.depth else 1,
            19,
            3.0,
            lambda: tree,
            [0],
            parts=parts,
        )
        for shape in choice.shapes
    ]
    drafted = [result.verified - 1 for result in results]
    emitted = [tokens] * len(results)
    host_ms = LATENCY.step_host_ms if choice.gamma else LATENCY.plain_host_ms
    draft_ms = 0.3 * (ms - host_ms) if choice.gamma else 0.0
    if parts is not None:
        draft_ms = parts.head + parts.growth
    policy.observe(
        Outcome(
            load,
            choice.gamma,
            drafted,
            emitted,
            seconds=ms / 1e3,
            draft_seconds=draft_ms / 1e3,
            verify_seconds=(ms - host_ms - draft_ms) / 1e3,
            results=results,
        )
    )


def test_rows_graft_as_far_as_pages_and_requests_allow() -> None:
    def grafts(load: Load) -> list[tuple[int, int]]:
        parts = TreeParts(lambda temperature: GOOD, LATENCY, (1, 4), (4, 8, 16), stops=True, graft=5)
        choice = Trees(parts, lambda lag, batch_size: 0.001 * lag).choose(load)
        return [(shape.depth, shape.graft) for shape in choice.shapes]

    assert grafts(load_of(2)) == [(DEPTH, 5)] * 2
    assert grafts(load_of(2, limits=(99, 3))) == [(DEPTH, 5), (3, 3)]
    # all of a path that ends at DEPTH: the graft takes the place of growth steps
    assert grafts(load_of(1, nodes_max=4 * DEPTH)) == [(DEPTH, 5)]
    assert grafts(load_of(1, nodes_max=4 * DEPTH - 2)) == [(DEPTH - 1, 2)]


def test_rows_that_compete_are_expected_to_gain_more_than_rows_that_share_alike() -> None:
    """Half of the chains are accepted for certain: 8 rows fill the graph of 16 tokens with those alone."""
    depths = range(1, DEPTH + 1)
    flat = tuple(tuple(1.0 + 0.3 * min(k, depth) for k in range(depth + 1)) for depth in depths)
    alike = Acceptance((-4.0, 0.0), (0.0, 0.9), {1: flat})
    pooled = tuple(tuple(0.25 * min(j, 2 * depth) for j in range(4 * depth + 1)) for depth in depths)
    steep = replace(LATENCY, verify=Curve((0,), (2, 8, 16, 64), ((10.0, 10.0, 16.0, 80.0),)))
    competing = replace(alike, pooled=pooled)
    load = load_of(8)
    parts = TreeParts(lambda temperature: alike, steep, (1,), (4, 8, 16), stops=True)
    assert Trees(parts, lambda lag, batch_size: 0.0).choose(load).gamma == 0
    parts = replace(parts, acceptance=lambda temperature: competing)
    assert Trees(parts, lambda lag, batch_size: 0.0).choose(load).gamma > 0
    step = best_chains(competing, steep, num_rows=8, context_len=0)
    assert step is not None
    # two drafts deep, one a row on average; of a large batch, each of them is accepted
    draft_ms = LATENCY.draft.at(16, 0) + LATENCY.draft.at(8, 0) + 2 * LATENCY.growth_host_ms
    accepted = 8 * 0.3 + 7 * (1.0 - 0.3)
    assert step.expected == pytest.approx((accepted, draft_ms + LATENCY.step_host_ms + 16.0, 0))
    # the drafts that are not verified are those of the other half
    assert (step.shape.width, step.shape.depth, step.shape.stop.costs) == (1, 2, (1.0, 1.0))
    assert Trees(parts, lambda lag, batch_size: 0.0).choose(load).shapes == (step.shape,) * 8
    assert best_chains(alike, steep, num_rows=8, context_len=0) is None


def test_rows_grow_trees_where_a_tree_is_the_best_arm_also_if_chains_compete() -> None:
    pooled = tuple(tuple(0.25 * min(j, 4 * depth) for j in range(4 * depth + 1)) for depth in range(1, 5))
    acceptance = replace(GOOD, pooled=pooled)
    load = load_of(2, acceptance=acceptance)
    assert {shape.width for shape in policy_of(acceptance).choose(load).shapes} == {4}


def test_prompts_that_wait_run_in_the_place_of_drafts_that_are_accepted_less_often() -> None:
    flat = tuple(tuple(1.0 + 0.3 * min(k, depth) for k in range(depth + 1)) for depth in range(1, 5))
    parts = TreeParts(lambda temperature: Acceptance((0.0,), (0.3,), {1: flat}), LATENCY, (1,), (2,), True)
    policy = Trees(parts, lambda lag, batch_size: 0.0)
    load = load_of(8)
    assert policy.choose(load).gamma > 0  # 16 tokens take the time of one
    assert policy.choose(replace(load, waiting_tokens=60)).gamma == 0  # 8 drafts or 8 prompt tokens


def test_a_choice_reads_the_context_of_the_rows_equally_often_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(rows: Sequence[Row]) -> int:
        calls.append(len(rows))
        return 0

    monkeypatch.setattr("yggdrasil.policy.trees.context_key", counted)
    for num_rows in (2, 32):
        policy_of().choose(load_of(num_rows))
    assert calls.count(32) == calls.count(2)


def test_a_single_row_gets_the_shape_of_the_policy_of_one_request() -> None:
    load = load_of(1)
    menu = {"latency": LATENCY, "verify_widths": (4, 8, 16), "widths": (1, 4)}
    alone = StoppingShape(shape=PLAIN, acceptance=GOOD, **menu).choose(load.rows)
    choice = policy_of().choose(load)
    assert choice.shapes == alone.shapes
    assert choice.gamma == choice.shapes[0].depth == DEPTH
    assert choice.menu.nodes[-1] == 15  # the widest verified tree


def test_the_draft_s_cold_first_forward_does_not_make_its_graphs_look_slow() -> None:
    load = load_of(1)
    slowness = {}
    for cold_ms in (0.0, 1.0):
        policy = policy_of()
        choice = policy.choose(load)
        [shape] = choice.shapes
        head_ms = LATENCY.draft.at(2, 0)
        growth_ms = (shape.depth - 1) * LATENCY.draft.at(shape.width, 0)
        growth_ms += shape.depth * LATENCY.growth_host_ms
        parts = StepMs(head_ms + cold_ms, growth_ms, 10.0, LATENCY.step_host_ms)
        for _ in range(200):
            observed(policy, load, choice, sum(parts), 3, parts)
        slowness[cold_ms] = policy.measured.state["slowness"]["draft"]
    assert slowness[0.0] == slowness[1.0] == pytest.approx(dict.fromkeys(slowness[0.0], 1.0))
    assert policy.measured.state["host_ms"]["trees"] == pytest.approx(LATENCY.step_host_ms + 1.0, rel=0.1)


def test_rows_share_the_nodes_of_a_graph() -> None:
    """8 rows: the graph of 16 tokens holds the roots and 8 nodes; that of 64 costs four times that."""
    choice = policy_of().choose(load_of(8))
    assert len(set(map(id, choice.shapes))) == 1
    assert choice.menu.nodes == (8, 56, 120)
    flat = [0.8 * node for node in range(61)]
    falling = [0.8 * min(node, 12) for node in range(61)]
    assert choice.menu.best(flat, num_rows=8, depth=choice.gamma) == 56
    assert choice.menu.best(falling, num_rows=8, depth=choice.gamma) == 8


def test_a_useless_draft_does_not_run() -> None:
    load = load_of(4, acceptance=USELESS)
    choice = policy_of(USELESS).choose(load)
    assert choice.shapes == (PLAIN,) * 4
    assert choice.gamma == 0


def test_a_batch_whose_nodes_cost_more_than_they_emit_decodes_plainly() -> None:
    steep = LatencyModel(
        draft=LATENCY.draft,
        verify=Curve((0,), (2, 16, 64, 128), ((10.0, 10.0, 80.0, 300.0),)),
        growth_host_ms=0.1,
        step_host_ms=0.2,
        plain_host_ms=0.1,
    )
    assert policy_of(latency=steep).choose(load_of(16)).shapes == (PLAIN,) * 16
    assert policy_of(latency=steep).choose(load_of(2)).shapes[0].depth > 0


def test_trees_are_no_deeper_than_the_request_and_the_pages_allow() -> None:
    shapes = policy_of().choose(load_of(3, limits=(99, 2, 0))).shapes
    assert [shape.depth for shape in shapes] == [DEPTH, 2, 0]
    [shape] = policy_of().choose(load_of(1, nodes_max=6)).shapes
    assert shape.num_nodes <= 7
    assert policy_of().choose(load_of(1, nodes_max=0)).shapes == (PLAIN,)


def test_steps_that_take_longer_than_predicted_end_speculation_and_better_ones_start_it() -> None:
    """The profile is wrong: steps with trees take four times as long, plain ones as long as predicted."""
    policy = policy_of()
    load = load_of(1)
    speculated = []
    for _ in range(3000):
        choice = policy.choose(load)
        is_tree = choice.gamma > 0
        observed(policy, load, choice, 60.0 if is_tree else 10.1, 3 if is_tree else 1)
        speculated.append(is_tree)
    assert speculated[0]
    assert sum(speculated[:100]) < 20
    assert 1 <= sum(speculated[100:]) < 20  # the exploration budget tries again
    for _ in range(3000):
        choice = policy.choose(load)
        is_tree = choice.gamma > 0
        observed(policy, load, choice, 14.0 if is_tree else 10.1, 3 if is_tree else 1)
        speculated.append(is_tree)
    assert sum(speculated[-20:]) >= 19  # one may be an exploring step


def test_plain_decoding_is_tried_where_speculation_is_better() -> None:
    policy = policy_of()
    load = load_of(1)
    plain = 0
    for _ in range(400):
        choice = policy.choose(load)
        observed(policy, load, choice, 14.0 if choice.gamma else 10.1, 3 if choice.gamma else 1)
        plain += not choice.gamma
    assert 1 <= plain <= 8
    assert policy.state["plain_steps"] == plain


@pytest.mark.parametrize("slow_step", [0, 1])  # 0 loads the graphs, 1 was interrupted
def test_a_slow_step_at_the_start_does_not_end_speculation(slow_step: int) -> None:
    policy = policy_of()
    load = load_of(1)
    speculated = []
    for step in range(12):
        choice = policy.choose(load)
        speculated.append(choice.gamma > 0)
        observed(policy, load, choice, 150.0 if step == slow_step else 14.0, tokens=3)
    assert sum(speculated) >= 11


@pytest.mark.parametrize("tree_ms", [5.0, 60.0])  # trees are the better arm, and the worse one
def test_no_arm_is_tried_next_to_a_prompt(tree_ms: float) -> None:
    """Such a step corrects no goodput, so the time that it loses would be spent for nothing."""
    load = load_of(1)
    policy = policy_of()
    drafted: dict[int, set[bool]] = {0: set(), 1: set()}
    for step in range(600):
        waiting = step % 2
        choice = policy.choose(replace(load, waiting_tokens=waiting))
        if step > 100:
            drafted[waiting].add(choice.gamma > 0)
        ms, tokens = (tree_ms, 5) if choice.gamma else (10.2, 1)
        observed(policy, load, choice, ms=ms, tokens=tokens)
    assert drafted[0] == {False, True}
    assert len(drafted[1]) == 1


def test_accepted_tokens_correct_the_calibration() -> None:
    policy = policy_of()
    load = load_of(1)
    for _ in range(200):
        choice = policy.choose(load)
        observed(policy, load, choice, 14.0 if choice.gamma else 10.1, 2 if choice.gamma else 1)
    assert policy.state["accepted_per_expected_token"] == pytest.approx(0.5, abs=0.05)
    assert torch.isfinite(torch.tensor(policy.choose(load).menu.ms)).all()


def test_shapes_of_a_batch_follow_each_row_s_temperature() -> None:
    by_temperature = {0.0: GOOD, 1.0: USELESS}
    parts = TreeParts(by_temperature.__getitem__, LATENCY, (1, 4), (4, 8, 16), stops=False)
    load = load_of(2)
    object.__setattr__(load.rows[1].state, "sampling", type(load.rows[1].state.sampling)(temperature=1.0))
    first, second = Trees(parts, lambda lag, batch_size: 0.0).choose(load).shapes
    assert (first.depth > 0, second) == (True, PLAIN)
    assert isinstance(first, Shape)


def test_trees_that_the_profile_makes_too_slow_are_tried_and_used() -> None:
    """Plain decoding is the best arm of a profile whose draft is twenty times too slow."""
    slow = replace(LATENCY, draft=LATENCY.draft.slower(dict.fromkeys(LATENCY.draft.sizes, 20.0)))
    policy = policy_of(latency=slow)
    load = load_of(1)
    speculated = []
    for _ in range(1500):
        choice = policy.choose(load)
        observed(policy, load, choice, 14.0 if choice.gamma else 10.1, 3 if choice.gamma else 1)
        speculated.append(choice.gamma > 0)
    assert not any(speculated[:5])
    assert sum(speculated[-100:]) >= 95


def test_what_slow_graphs_explain_does_not_lower_the_goodput() -> None:
    def goodput_after(ms: float) -> float:
        policy = policy_of()
        load = load_of(4)
        observed(policy, load, policy.choose(load), ms, tokens=3)
        return policy.goodput[4].estimate

    assert goodput_after(24.0) == pytest.approx(goodput_after(14.0), rel=0.05)


def test_the_goodput_of_few_rows_is_not_that_of_many() -> None:
    policy = policy_of()
    for _ in range(20):
        for num_rows, ms in ((1, 14.0), (8, 40.0)):
            load = load_of(num_rows)
            observed(policy, load, policy.choose(load), ms, tokens=3)
    few = policy.goodput[1].estimate
    many = policy.goodput[8].estimate
    assert many < 0.9 * few
    # a number of rows that did not run yet is expected to be like the next smaller one that did
    for num_rows in (2, 7, 16):
        policy.choose(load_of(num_rows))
    expected = {"1": few, "2": few, "8": many, "16": many}
    assert policy.state["realised_over_predicted_goodput"] == pytest.approx(expected, abs=1e-3)


def test_stop_rules_follow_corrected_times_and_acceptance() -> None:
    menu = {"latency": LATENCY, "verify_widths": (4, 8, 16), "widths": (1, 4)}
    policy = StoppingShape(shape=PLAIN, acceptance=GOOD, **menu)
    rows = load_of(1).rows

    def min_gain(latency: LatencyModel, scale: float) -> float:
        stop = policy.corrected(latency, scale).shape_of(rows).stop
        assert isinstance(stop, SmallGain)
        return stop.min_gain

    slow_draft = replace(LATENCY, draft=LATENCY.draft.slower(dict.fromkeys(LATENCY.draft.sizes, 2.0)))
    assert min_gain(slow_draft, 1.0) > min_gain(LATENCY, 1.0)
    assert min_gain(LATENCY, 0.7) > min_gain(LATENCY, 1.0)


def test_a_wider_graph_that_was_measured_as_quicker_gives_nodes_no_negative_cost() -> None:
    quick = LATENCY.verify.slower({2: 2.0})
    assert min(quick.marginal_ms(16, 0)) == 0.0
    assert quick.marginal_ms(64, 0)[-1] > 0.0
