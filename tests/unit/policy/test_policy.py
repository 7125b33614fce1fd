"""Latencies, calibrated acceptance, Eq. 3, and the shapes that follow from them, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from yggdrasil.offline.latencies import curve_json
from yggdrasil.policy.acceptance import Acceptance, AcceptanceTable, TreeRecord, fit_acceptance
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.objective import speedup
from yggdrasil.policy.shape import REPEATS, Arms, BestShape, FixedShape, StoppingShape, best_shape, grafted
from yggdrasil.policy.stopping import SmallGain
from yggdrasil.state import PLAIN, DecodeState, Row, Shape
from yggdrasil.step.coupling import FORBIDDEN
from yggdrasil.step.growth import RowDraft
from yggdrasil.step.prune import Pruned, drafted_nodes, prune_rows
from yggdrasil.tree import TokenTree

CURVE = Curve((100, 300), (2, 4, 8), ((10.0, 12.0, 20.0), (14.0, 20.0, 28.0)))
LATENCY = LatencyModel(
    draft=Curve((0,), (2, 4), ((1.0, 2.0),)),
    verify=Curve((0,), (2, 4, 8), ((10.0, 10.0, 12.0),)),
    growth_host_ms=0.5,
    step_host_ms=1.0,
    plain_host_ms=0.5,
)
WIDTHS = (1, 4)
VERIFY_WIDTHS = (4, 8)


def acceptance(chain: list[float], wide: list[float]) -> Acceptance:
    """Equal AAL for every K above one: chain[d] at W = 1 and wide[d] at W = 4, depth d + 1."""
    aal = {
        width: tuple((1.0, *[row] * (width * (depth + 1))) for depth, row in enumerate(rows))
        for width, rows in ((1, chain), (4, wide))
    }
    return Acceptance((-2.0, -1.0, 0.0), (0.1, 0.5, 0.9), aal)


USELESS = acceptance([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])


def test_curve_takes_the_smallest_measured_size_that_holds_the_tokens() -> None:
    assert [CURVE.at(tokens, 100) for tokens in (1, 2, 3, 4, 5, 8)] == [10.0, 10.0, 12.0, 12.0, 20.0, 20.0]


def test_curve_is_linear_between_contexts_and_clamped_outside() -> None:
    assert [CURVE.at(4, context) for context in (0, 100, 150, 200, 300, 9000)] == [
        12.0,
        12.0,
        14.0,
        16.0,
        20.0,
        20.0,
    ]
    assert CURVE.at(64, 100) == 20.0


def test_curve_and_latency_survive_json() -> None:
    payload = json.loads(json.dumps(curve_json(CURVE)))
    assert Curve.from_json(payload) == CURVE
    model = {
        "draft": payload,
        "verify": payload,
        "growth_host_ms": 0.5,
        "step_host_ms": 1.0,
        "plain_host_ms": 0.25,
        "plain_share": 0.75,
        "threads": 2,
    }
    assert LatencyModel.from_json(model) == LatencyModel(CURVE, CURVE, 0.5, 1.0, 0.25, 0.75, 2)


def test_milliseconds_of_a_step_equal_a_sum_by_hand() -> None:
    assert LATENCY.plain_ms(7) == 10.5
    # head draft 1, two growth forwards of 2, three growth steps on the host 1.5, verification of 8 nodes
    # 12, host 1
    assert LATENCY.step_ms(4, 3, 8, 7) == 1.0 + 2 * 2.0 + 3 * 0.5 + 12.0 + 1.0
    assert LATENCY.step_ms(4, 0, 1, 7) == LATENCY.plain_ms(7) == 10.5
    assert LATENCY.step_ms(1, 0, 8, 7) == 12.0 + 0.5  # what repeats, without a draft


def test_only_steps_without_a_draft_find_the_target_in_the_caches() -> None:
    warm = replace(LATENCY, plain_share=0.5)
    assert warm.plain_ms(7) == warm.step_ms(4, 0, 1, 7) == 0.5 * 10.0 + 0.5
    assert warm.step_ms(1, 0, 8, 7) == 0.5 * 12.0 + 0.5
    assert warm.step_ms(4, 3, 8, 7) == LATENCY.step_ms(4, 3, 8, 7)
    drafting, undrafted = (
        FixedShape(shape, USELESS, warm, VERIFY_WIDTHS).choose([row(10)]).menu
        for shape in (Shape(4, 3), REPEATS)
    )
    same = FixedShape(Shape(4, 3), USELESS, LATENCY, VERIFY_WIDTHS).choose([row(10)]).menu
    assert drafting.ms == same.ms
    assert undrafted.ms == tuple(warm.step_ms(1, 0, 1 + nodes, 10) for nodes in undrafted.nodes)


def test_speedup_of_plain_decoding_is_exactly_one() -> None:
    for context_len in (0, 77, 10_000):
        assert speedup(1.0, width=1, depth=0, verify=1, context_len=context_len, latency=LATENCY) == 1.0


def row(num_tokens: int, lag: int = 0) -> Row:
    """A request of this many tokens, of which the target lacks some before the root."""
    return Row(0, DecodeState([1] * num_tokens), target_len=num_tokens - 1 - lag)


def shape_of(policy: FixedShape, num_tokens: int) -> Shape:
    [shape] = policy.choose([row(num_tokens)]).shapes
    return shape


def test_speedup_is_equation_three() -> None:
    assert speedup(3.0, width=4, depth=3, verify=8, context_len=7, latency=LATENCY) == pytest.approx(
        3.0 * 10.5 / 19.5
    )


def choose(calibrated: Acceptance) -> tuple[Shape, float]:
    return best_shape(calibrated, LATENCY, widths=WIDTHS, verify_widths=VERIFY_WIDTHS, context_len=7)


def test_best_shape_is_plain_when_the_draft_is_useless() -> None:
    assert choose(USELESS) == (PLAIN, 1.0)


def test_best_shape_is_a_chain_when_width_does_not_gain() -> None:
    shape, gain = choose(acceptance([1.7, 2.3, 2.8], [1.7, 2.3, 2.8]))
    assert (shape.width, shape.depth) == (1, 3)
    # W = 1, D = 3, K = 4: head 1, two growth forwards of 1 (the two-token graph), host 1.5, verification
    # 10, host 1
    assert gain == pytest.approx(2.8 * 10.5 / 15.5)


def test_best_shape_is_a_tree_when_width_gains() -> None:
    shape, gain = choose(acceptance([1.2, 1.3, 1.3], [1.5, 3.5, 3.6]))
    assert (shape.width, shape.depth, shape.verify) == (4, 2, None)
    assert gain == pytest.approx(3.5 * 10.5 / (1.0 + 2.0 + 1.0 + 10.0 + 1.0))


def test_best_shape_policy_computes_each_context_once() -> None:
    policy = BestShape(
        shape=PLAIN,
        acceptance=acceptance([1.7, 2.3, 2.8], [1.7, 2.3, 2.8]),
        latency=LATENCY,
        verify_widths=VERIFY_WIDTHS,
        widths=WIDTHS,
    )
    assert shape_of(policy, 10) == shape_of(policy, 100) == Shape(1, 3)
    policy.latency = LatencyModel(LATENCY.draft, LATENCY.verify, 1e6, 1e6, 0.5)
    assert shape_of(policy, 10) == Shape(1, 3)  # cached for this range of context lengths
    assert shape_of(policy, 200) == PLAIN


def test_the_pooled_table_equals_one_computed_by_hand() -> None:
    """Four chains of two tokens; by log-probability the first two are accepted and the third is not."""
    chains = [
        TreeRecord(1, (0.0, -0.1, -0.2), (True, True, True)),
        TreeRecord(1, (0.0, -0.3, -0.9), (True, True, False)),
        TreeRecord(1, (0.0, -0.4, -0.8), (True, False, False)),
        TreeRecord(1, (0.0, -1.0, -2.0), (True, True, False)),
    ]
    calibrated = fit_acceptance(chains)
    # by log-probability: yes, yes, no, yes
    assert calibrated.pooled[0] == pytest.approx((0.0, 0.25, 0.5, 0.5, 0.75))
    assert calibrated.pooled[1] == pytest.approx((0.0, 0.25, 0.5, 0.75, 0.75, 0.75, 0.75, 1.0, 1.0))
    assert calibrated.pooled_accepted(2, 0.375) == pytest.approx(0.375)
    assert [calibrated.pooled_accepted(2, drafts) for drafts in (0, 2)] == [0.0, 1.0]
    assert Acceptance.from_json(json.loads(json.dumps(calibrated.to_json()))) == calibrated


def test_chains_of_every_depth_equal_those_computed_one_by_one() -> None:
    rng = np.random.default_rng(4)
    chains = [
        TreeRecord(1, (0.0, *(-rng.exponential(size=5)).cumsum().tolist()), (True, *(rng.random(5) < 0.6)))
        for _ in range(40)
    ]
    calibrated = fit_acceptance(chains)
    drafts = [0.0, 0.1, 0.5, 1.0, 1.3, 2.75, 4.9, 5.0, 7.5]
    pooled_DN, alike_DN = calibrated.chains_accepted(drafts)
    for depth in range(1, 6):
        pooled = [calibrated.pooled_accepted(depth, count) for count in drafts]
        assert pooled_DN[depth - 1] == pytest.approx(pooled)
        emitted = [calibrated.expected_emitted(1, depth, 1 + count) for count in range(10)]
        assert alike_DN[depth - 1] == pytest.approx(np.interp(drafts, range(10), emitted) - 1.0)


def test_the_time_of_graphs_is_the_same_for_one_count_and_for_many() -> None:
    curve = Curve((10, 100), (2, 4, 8), ((1.0, 1.5, 2.5), (2.0, 3.5, 6.5)))
    counts = [1, 2, 3, 4, 7, 8, 9, 12, 16, 17, 80]
    for context_len in (0, 10, 55, 400):
        each_ms = [curve.graphs_ms(count, context_len) for count in counts]
        assert curve.graphs_each_ms(np.array(counts), context_len) == pytest.approx(each_ms)


def test_growth_stops_after_a_step_that_adds_less_than_its_cost() -> None:
    menu = {
        "acceptance": acceptance([1.2, 1.3, 1.3], [1.5, 3.5, 3.6]),
        "latency": LATENCY,
        "verify_widths": VERIFY_WIDTHS,
        "widths": WIDTHS,
    }
    shape = shape_of(StoppingShape(shape=PLAIN, **menu), 10)
    # best is W = 4, D = 2, K = 4: 3.5 tokens in 15 ms; a growth step takes 2 ms in the graph and 0.5 on the
    # host
    assert (shape.width, shape.depth, shape.verify) == (4, 3, None)
    assert isinstance(shape.stop, SmallGain)
    assert (shape.stop.width, shape.stop.min_gain) == (4, pytest.approx(3.5 / 15.0 * 2.5))
    # four nodes are verified in the time of one, the next four take half a millisecond each, more have no
    # graph
    assert shape.stop.costs == pytest.approx((0.0,) * 4 + (3.5 / 15.0 * 0.5,) * 4)


def test_a_policy_grafts_on_trees_and_not_on_plain_steps() -> None:
    menu = {"latency": LATENCY, "verify_widths": VERIFY_WIDTHS, "widths": WIDTHS, "graft": 5}
    useful = acceptance([1.2, 1.3, 1.3], [1.5, 3.5, 3.6])
    grown = BestShape(shape=PLAIN, acceptance=useful, **menu).choose([row(10)])
    assert [(shape.width, shape.depth, shape.graft) for shape in grown.shapes] == [(4, 2, 5)]
    assert BestShape(shape=PLAIN, acceptance=USELESS, **menu).choose([row(10)]).shapes == (PLAIN,)


def test_what_repeats_is_verified_as_far_as_it_gains_without_the_time_of_a_draft() -> None:
    policy = FixedShape(REPEATS, USELESS, LATENCY, VERIFY_WIDTHS)
    choice = policy.choose([row(10)])
    assert choice.shapes == (REPEATS,)
    assert choice.menu.growth_ms == 0.0
    for nodes, ms in zip(choice.menu.nodes, choice.menu.ms, strict=True):
        assert ms == LATENCY.step_ms(1, 0, 1 + nodes, 10)


def test_a_static_tree_gets_no_graft() -> None:
    static = Shape(2, 1, levels=(((0, 0), (0, 1)),))
    assert grafted(static, 5) == static
    assert grafted(Shape(2, 1), 5) == Shape(2, 1, graft=5)


def test_the_marginal_cost_of_a_token_never_falls() -> None:
    """Steps to 4 tokens for 2 ms, 8 for 4 ms and 16 for 5 ms: the convex curve skips the middle ones."""
    steps = Curve((0,), (2, 4, 8, 16, 128), ((10.0, 12.0, 14.0, 15.0, 90.0),))
    assert steps.marginal_ms(8, 0) == pytest.approx([0.0, 0.0, *[4.0 / 6] * 6])
    assert steps.marginal_ms(16, 0) == pytest.approx([0.0, 0.0, *[5.0 / 14] * 14])


def test_no_tree_grows_where_plain_decoding_is_best() -> None:
    policy = StoppingShape(
        shape=PLAIN, acceptance=USELESS, latency=LATENCY, verify_widths=VERIFY_WIDTHS, widths=WIDTHS
    )
    assert shape_of(policy, 10) == PLAIN


def test_the_cost_of_every_arm_is_that_of_its_step() -> None:
    calibrated = acceptance([1.7, 2.3, 2.8], [1.5, 3.5, 3.6])
    arms = Arms.of(calibrated, LATENCY, widths=WIDTHS, verify_widths=VERIFY_WIDTHS, context_len=7)
    longer = LatencyModel(CURVE, CURVE, 0.5, 1.0, 0.5)
    for at_context, latency, context_len in ((arms, LATENCY, 7), (arms.at(longer, 250), longer, 250)):
        rows = zip(
            at_context.shapes,
            at_context.verify_M.tolist(),
            at_context.gain_M.tolist(),
            at_context.cost_M.tolist(),
            strict=True,
        )
        for shape, verify, gain, cost_ms in rows:
            assert cost_ms == pytest.approx(latency.step_ms(shape.width, shape.depth, verify, context_len))
            assert gain == (
                calibrated.expected_emitted(shape.width, shape.depth, verify) - 1.0 if shape.depth else 0.0
            )
    assert len(arms.shapes) == 1 + 2 * 3 * 2


def test_the_verified_width_equals_one_computed_by_hand() -> None:
    policy = FixedShape(PLAIN, USELESS, LATENCY, VERIFY_WIDTHS)
    shape = Shape(4, 2)
    # four nodes are nearly as good as eight, which cost 2 ms more
    flat = [1.0, 1.5, 1.8, 2.0, 2.01, 2.02, 2.03, 2.04, 2.05]
    assert verify_width(policy, flat, shape) == 4
    steep = [1.0, 1.9, 2.6, 3.2, 3.7, 4.1, 4.5, 4.8, 5.0]
    assert verify_width(policy, steep, shape) == 8  # nine nodes fit no graph


def test_a_wider_verification_must_add_tokens_in_proportion_to_its_time() -> None:
    policy = FixedShape(PLAIN, USELESS, LATENCY, VERIFY_WIDTHS)
    shape = Shape(4, 2)
    costs = {width: LATENCY.step_ms(4, 2, width, 7) for width in (4, 8)}
    break_even = 3.0 * (costs[8] / costs[4] - 1.0)
    for extra, chosen in ((0.9 * break_even, 4), (1.1 * break_even, 8)):
        assert (
            verify_width(policy, [1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0 + extra, 3.0 + extra], shape)
            == chosen
        )


def test_verify_width_of_a_small_tree_is_the_whole_tree() -> None:
    policy = FixedShape(PLAIN, USELESS, LATENCY, VERIFY_WIDTHS)
    assert verify_width(policy, [1.0, 1.5, 1.8], Shape(1, 2)) == 3
    assert verify_width(policy, [1.0, 1.9, 2.7, 3.4, 4.0, 4.5], Shape(1, 5)) == 6


def test_verify_width_is_that_of_the_shape_if_set() -> None:
    policy = FixedShape(PLAIN, USELESS, LATENCY, VERIFY_WIDTHS)
    assert verify_width(policy, [1.0, 1.9, 2.7, 3.4], Shape(1, 3, 2)) == 2
    assert verify_width(policy, [1.0, 1.9, 2.7, 3.4], Shape(1, 3, 64)) == 4


def verify_width(policy: FixedShape, expected: list[float], shape: Shape) -> int:
    """K for a tree whose best k nodes emit expected[k - 1] tokens."""
    policy.shape = shape
    menu = policy.choose([row(8)]).menu
    most = len(expected) if shape.verify is None else min(shape.verify, len(expected))
    sums = [emitted - 1 for emitted in expected[:most]]
    return 1 + menu.best(sums, num_rows=1, depth=shape.depth)


def test_a_tree_gets_the_room_of_a_graph_that_lagging_tokens_leave() -> None:
    latency = LatencyModel(
        draft=LATENCY.draft,
        verify=Curve((0,), (2, 4, 8, 32), ((10.0, 10.0, 12.0, 40.0),)),
        growth_host_ms=0.0,
        step_host_ms=0.0,
        plain_host_ms=0.0,
    )
    policy = FixedShape(PLAIN, USELESS, latency, (2, 4, 8))

    def menu(shape: Shape, lag: int) -> list[tuple[int, float]]:
        """The numbers of nodes, and the step's milliseconds with each."""
        policy.shape = shape
        found = policy.choose([row(30, lag)]).menu
        step_ms = [ms + shape.depth * found.growth_ms for ms in found.ms]
        return list(zip(found.nodes, step_ms, strict=True))

    before_ms = latency.before_verify_ms(1, 4, 7)
    assert menu(Shape(1, 4), 3) == [(0, before_ms + 10.0), (4, before_ms + 12.0), (7, before_ms + 40.0)]
    assert menu(Shape(1, 4), 6) == [(1, before_ms + 12.0), (7, before_ms + 40.0)]
    # the prompt's graph, but no more nodes than are ever verified
    before_ms = latency.before_verify_ms(4, 4, 7)
    assert menu(Shape(4, 4), 20) == [(7, before_ms + 40.0)]


def prune(policy: FixedShape, tree: TokenTree, shape: Shape) -> Pruned:
    """What a step of this policy verifies of the only row's tree."""
    policy.shape = shape
    choice = policy.choose([row(8)])
    drafts = [RowDraft(tree, 0, shape)]
    [pruned] = prune_rows(drafts, drafted_nodes(drafts, choice), choice.menu)
    return pruned


def tree_for_pruning() -> TokenTree:
    import torch

    tree = TokenTree.root(0, 9)
    tree.grow(torch.tensor([0, 0, 0, 0]), torch.arange(1, 5), torch.tensor([-0.0, -1.0, -2.0, -9.0]))
    tree.grow(torch.tensor([1, 1, 2, 3]), torch.arange(5, 9), torch.tensor([-0.5, -2.0, -2.0, -2.5]))
    return tree


@pytest.mark.usefixtures("kernels")
def test_prune_keeps_the_best_nodes_and_returns_their_expected_tokens() -> None:
    policy = FixedShape(PLAIN, USELESS, LATENCY, VERIFY_WIDTHS)
    pruned = prune(policy, tree_for_pruning(), Shape(4, 2, 4))
    assert pruned.drafted_node == [0, 1, 2, 5]  # values 1, 0.9, 0.5 and 0.7
    assert pruned.tree.token_N.tolist() == [0, 1, 2, 5]
    assert pruned.tree.parent_N.tolist() == [-1, 0, 0, 1]
    assert pruned.depths == [0, 1, 1, 2]
    assert pruned.expected_emitted == pytest.approx(1 + 0.9 + 0.7 + 0.5)
    pruned.tree.check()


@pytest.mark.usefixtures("kernels")
def test_prune_agrees_with_the_reference_for_every_k() -> None:
    import torch

    policy = FixedShape(PLAIN, USELESS, LATENCY, VERIFY_WIDTHS)
    tree = tree_for_pruning()
    values = torch.tensor([1.0, *policy.acceptance.values(tree.log_prob_N.tolist())[1:]])
    for k in range(1, 10):
        pruned = prune(policy, tree, Shape(4, 2, k))
        assert pruned.drafted_node == tree.prune(k, values=values)[1].tolist()
        assert pruned.depths == pruned.tree.depth_N.tolist()
        pruned.tree.check()


@pytest.mark.usefixtures("kernels")
def test_prune_leaves_out_nodes_with_a_forbidden_token_on_their_path() -> None:
    import torch

    tree = TokenTree.root(0, 9)
    tree.grow(
        torch.tensor([0, 0, 0, 0]), torch.arange(1, 5), torch.tensor([-0.0, -1.0, FORBIDDEN, FORBIDDEN])
    )
    tree.grow(
        torch.tensor([1, 3, 1, 2]),
        torch.arange(5, 9),
        torch.tensor([-0.5, 2 * FORBIDDEN, -2.0, -torch.inf]),
    )
    policy = FixedShape(PLAIN, USELESS, LATENCY, VERIFY_WIDTHS)
    for verify, expected in ((9, [0, 1, 2, 5, 7]), (3, [0, 1, 5])):
        pruned = prune(policy, tree, Shape(4, 2, verify))
        assert pruned.drafted_node == expected
        assert pruned.depths == pruned.tree.depth_N.tolist()


def test_prune_does_not_change_a_root_without_children() -> None:
    policy = FixedShape(PLAIN, USELESS, LATENCY, VERIFY_WIDTHS)
    pruned = prune(policy, TokenTree.root(0, 1), PLAIN)
    assert (pruned.drafted_node, pruned.depths) == ([0], [0])
    assert (pruned.expected_emitted, len(pruned.tree)) == (1.0, 1)


RECORDS = [  # W = 2, D = 2: node 3 hangs under 1
    TreeRecord(2, (0.0, -1.0, -2.0, -1.5, -3.0), (True, True, False, True, False)),
    TreeRecord(2, (0.0, -1.0, -2.0, -1.5, -3.0), (True, False, False, False, False)),
]


def test_the_fitted_aal_table_equals_one_computed_by_hand() -> None:
    fitted = fit_acceptance(RECORDS)
    assert fitted.aal == {2: ((1.0, 1.5, 1.5), (1.0, 1.5, 2.0, 2.0, 2.0))}
    assert fitted.max_depth == 2
    assert [fitted.expected_emitted(2, 2, verify) for verify in (1, 2, 3, 64)] == [1.0, 1.5, 2.0, 2.0]


def test_fitted_values_equal_measured_shares_computed_by_hand() -> None:
    values = fit_acceptance(RECORDS).values([-9.0, -3.0, -2.0, -1.75, -1.5, -1.0, 0.0])
    assert values == pytest.approx([0.0, 0.0, 0.0, 0.25, 0.5, 0.5, 0.5])


def test_fitted_values_never_fall_as_the_draft_probability_rises() -> None:
    unruly = [
        TreeRecord(1, (0.0, -0.1 * i, -0.1 * i - 1), (True, i % 3 == 0, i % 6 == 0)) for i in range(1, 40)
    ]
    values = fit_acceptance(unruly).values([-6 + 0.05 * i for i in range(121)])
    assert values.tolist() == sorted(values)
    assert 0.0 <= values[0] <= values[-1] <= 1.0


def test_acceptance_survives_json_and_the_nearest_temperature_is_taken() -> None:
    fitted = fit_acceptance(RECORDS)
    payload = json.loads(
        json.dumps({"by_temperature": {"0.0": fitted.to_json(), "1.0": USELESS.to_json()}})
    )
    table = AcceptanceTable.from_json(payload)
    assert table.by_temperature == {0.0: fitted, 1.0: USELESS}
    assert table.nearest(0.3) == fitted
    assert table.nearest(7.0) == USELESS


def test_a_shape_has_a_readable_text() -> None:
    assert [str(shape) for shape in (PLAIN, Shape(4, 3), Shape(1, 5, 6))] == [
        "plain",
        "W=4 D=3 K=auto",
        "W=1 D=5 K=6",
    ]
    assert [shape.num_nodes for shape in (PLAIN, Shape(4, 3), Shape(1, 5, 6))] == [1, 13, 6]
