"""TokenTree: hand-computed cases, and properties that hold for every way of growing."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from yggdrasil.errors import ConfigError
from yggdrasil.tree import TokenTree, best_subtree, best_subtree_reference

QUICK = settings(max_examples=60, deadline=None)


def hand_tree() -> TokenTree:
    """0 -> 1 -> 3 -> 5, 0 -> 2, 1 -> 4."""
    tree = TokenTree.root(token=9, capacity=8)
    tree.grow(torch.tensor([0, 0]), torch.tensor([11, 12]), torch.tensor([-0.25, -1.5]))
    tree.grow(torch.tensor([1, 1]), torch.tensor([21, 22]), torch.tensor([-0.5, -2.0]))
    tree.grow(torch.tensor([3]), torch.tensor([31]), torch.tensor([-0.75]))
    return tree


@st.composite
def grown_trees(draw: st.DrawFn, max_nodes: int = 14) -> TokenTree:
    """Any tree that growth can make: steps of any width, any parents, distinct siblings, falling values."""
    capacity = draw(st.integers(1, max_nodes))
    tree = TokenTree.root(draw(st.integers(0, 50)), capacity)
    parents = [-1]
    log_probs = [0.0]
    children = {0: 0}
    while len(parents) < capacity and draw(st.booleans()):
        width = draw(st.integers(1, capacity - len(parents)))
        chosen = [draw(st.integers(0, len(parents) - 1)) for _ in range(width)]
        falls = [draw(st.floats(0, 5, width=32)) for _ in range(width)]
        tokens = []
        for parent in chosen:
            tokens.append(100 * parent + children[parent])
            children[parent] += 1
        values = [log_probs[parent] - fall for parent, fall in zip(chosen, falls, strict=True)]
        tree.grow(torch.tensor(chosen), torch.tensor(tokens), torch.tensor(values))
        for parent, value in zip(chosen, values, strict=True):
            children[len(parents)] = 0
            parents.append(parent)
            log_probs.append(value)
    return tree


def closure(parents: list[int], node: int) -> set[int]:
    """The node and its ancestors, from the parents alone."""
    seen = set()
    while node >= 0:
        seen.add(node)
        node = parents[node]
    return seen


def test_growth_sets_parents_depths_positions_leaves_and_paths() -> None:
    tree = hand_tree()
    assert len(tree) == 6
    assert tree.token_N.tolist() == [9, 11, 12, 21, 22, 31]
    assert tree.parent_N.tolist() == [-1, 0, 0, 1, 1, 3]
    assert tree.depth_N.tolist() == [0, 1, 1, 2, 2, 3]
    assert tree.log_prob_N.tolist() == [0.0, -0.25, -1.5, -0.5, -2.0, -0.75]
    assert tree.positions(40).tolist() == [40, 41, 41, 42, 42, 43]
    assert tree.leaves.tolist() == [2, 4, 5]
    assert tree.paths() == [[0, 2], [0, 1, 4], [0, 1, 3, 5]]
    assert tree.path_NA[5].tolist() == [0, 1, 3, 5, -1, -1, -1, -1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=6))
def test_a_chain_attached_at_once_equals_one_grown_node_by_node(nodes: list[tuple[int, int]]) -> None:
    tokens = [token for token, _ in nodes]
    log_probs = [-eighths / 8 for _, eighths in nodes]
    at_once = TokenTree.root(7, 7, max_depth=6)
    at_once.grow_chain(tokens, log_probs)
    grown = TokenTree.root(7, 7, max_depth=6)
    for node, token in enumerate(tokens):
        path = torch.tensor([sum(log_probs[: node + 1])])
        grown.grow(torch.tensor([node]), torch.tensor([token]), path)
    at_once.check()
    for name in ("token_N", "parent_N", "depth_N", "log_prob_N", "path_NA"):
        assert torch.equal(getattr(at_once, name), getattr(grown, name)), name


def test_the_ancestor_mask_equals_one_written_by_hand() -> None:
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]
    assert hand_tree().ancestor_mask().int().tolist() == expected


def test_a_root_alone_is_a_leaf_with_a_path_of_itself() -> None:
    tree = TokenTree.root(token=3, capacity=1)
    tree.check()
    assert (tree.leaves.tolist(), tree.paths(), tree.ancestor_mask().tolist()) == ([0], [[0]], [[True]])
    assert tree.walk(torch.tensor([7])) == [0]
    assert tree.render() == "3"


@QUICK
@given(grown_trees())
def test_every_grown_tree_passes_check(tree: TokenTree) -> None:
    tree.check()


@QUICK
@given(grown_trees())
def test_ancestor_mask_is_the_transitive_closure_of_parents(tree: TokenTree) -> None:
    parents = tree.parent_N.tolist()
    mask_NN = tree.ancestor_mask()
    assert mask_NN.shape == (len(tree), len(tree))
    for node in range(len(tree)):
        assert set(torch.nonzero(mask_NN[node])[:, 0].tolist()) == closure(parents, node)


@QUICK
@given(grown_trees())
def test_ancestors_are_closed_and_as_many_as_the_depth(tree: TokenTree) -> None:
    mask_NN = tree.ancestor_mask()
    # an ancestor's ancestor is an ancestor
    assert torch.equal((mask_NN.float() @ mask_NN.float()) > 0, mask_NN)
    assert torch.equal(mask_NN.sum(dim=1).int() - 1, tree.depth_N)


@QUICK
@given(grown_trees(), st.integers(0, 10_000))
def test_positions_are_depths_after_the_root(tree: TokenTree, offset: int) -> None:
    parents = tree.parent_N.tolist()
    assert tree.positions(offset).tolist() == [
        offset + len(closure(parents, node)) - 1 for node in range(len(tree))
    ]


@QUICK
@given(grown_trees())
def test_paths_lead_from_the_root_to_every_leaf(tree: TokenTree) -> None:
    parents = tree.parent_N.tolist()
    assert tree.leaves.tolist() == [node for node in range(len(tree)) if node not in parents]
    assert tree.paths() == [sorted(closure(parents, leaf)) for leaf in tree.leaves.tolist()]


def test_prune_keeps_the_most_likely_connected_nodes() -> None:
    tree, kept = hand_tree().prune(4)
    tree.check()
    assert kept.tolist() == [0, 1, 3, 5]
    assert tree.token_N.tolist() == [9, 11, 21, 31]
    assert tree.parent_N.tolist() == [-1, 0, 1, 2]
    assert tree.path_NA[3, :5].tolist() == [0, 1, 2, 3, -1]


def test_prune_with_rising_values_keeps_a_poor_parent_for_its_child() -> None:
    values = torch.tensor([1.0, 0.1, 0.4, 0.0, 0.9, 0.0])  # node 4 is a child of the poor node 1
    _, kept = hand_tree().prune(3, values=values)
    assert kept.tolist() == [0, 1, 4]


@QUICK
@given(grown_trees(), st.integers(1, 16))
def test_prune_keeps_a_connected_subtree_with_the_root(tree: TokenTree, k: int) -> None:
    pruned, kept = tree.prune(k)
    pruned.check()
    ids = kept.tolist()
    assert ids[0] == 0
    assert ids == sorted(set(ids))
    assert len(pruned) == len(ids) == min(k, len(tree))
    assert all(tree.parent_N[node] in kept for node in ids[1:])
    assert torch.equal(pruned.token_N, tree.token_N[kept])
    assert torch.equal(pruned.log_prob_N, tree.log_prob_N[kept])
    assert torch.equal(pruned.ancestor_mask(), tree.ancestor_mask()[kept][:, kept])


@st.composite
def valued_parents(draw: st.DrawFn) -> tuple[list[int], list[float], int]:
    """Parents of up to 10 nodes, values in quarters (sums are exact, ties are common), and k."""
    count = draw(st.integers(1, 10))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, count))]
    return parents, [draw(st.integers(0, 8)) / 4 for _ in range(count)], draw(st.integers(1, count + 1))


def brute_force(parents: list[int], values: list[float], k: int) -> float:
    """The largest sum over all connected sets of at most k nodes that contain the root."""
    rest = range(1, len(parents))
    sets = ({0, *chosen} for size in range(min(k, len(parents))) for chosen in combinations(rest, size))
    return max(
        sum(values[node] for node in nodes)
        for nodes in sets
        if all(parents[node] in nodes for node in nodes if node)
    )


@QUICK
@given(valued_parents())
def test_the_reference_equals_brute_force_for_any_values(case: tuple[list[int], list[float], int]) -> None:
    parents, values, k = case
    keep = best_subtree_reference(parents, values, k)
    assert keep[0] == 0
    assert len(keep) <= k
    assert all(parents[node] in keep for node in keep[1:])
    assert sum(values[node] for node in keep) == brute_force(parents, values, k)


@QUICK
@given(valued_parents())
def test_best_subtree_is_optimal_for_rising_and_falling_values(
    case: tuple[list[int], list[float], int],
) -> None:
    parents, values, k = case
    assert sum(values[node] for node in best_subtree(parents, values, k)) == brute_force(parents, values, k)


@QUICK
@given(valued_parents())
def test_the_reference_takes_the_k_largest_where_values_never_rise(
    case: tuple[list[int], list[float], int],
) -> None:
    parents, falls, k = case
    values = [64.0]
    for node in range(1, len(parents)):
        values.append(values[parents[node]] * (1 - falls[node] / 4) * (1 - node / 4096))
    assume(len(set(values)) == len(values))  # equal values leave more than one answer
    best = sorted(sorted(range(len(values)), key=lambda node: -values[node])[:k])
    assert best_subtree_reference(parents, values, k) == best
    assert best_subtree(parents, values, k) == best


def test_walk_descends_while_the_target_agrees() -> None:
    #                     after node: 0   1   2   3   4   5
    assert hand_tree().walk(torch.tensor([11, 21, 0, 31, 0, 77])) == [0, 1, 3, 5]


def test_walk_stops_at_the_first_rejected_node() -> None:
    # node 3 would be accepted by its own entry, but the target's token at its parent is 99
    assert hand_tree().walk(torch.tensor([11, 99, 0, 31, 0, 77])) == [0, 1]
    assert hand_tree().walk(torch.tensor([99, 21, 0, 31, 0, 77])) == [0]


def test_walk_takes_the_second_child_if_it_has_the_target_s_token() -> None:
    assert hand_tree().walk(torch.tensor([12, 21, 0, 31, 0, 77])) == [0, 2]
    # token 21 is a child of 1, not of 4
    assert hand_tree().walk(torch.tensor([11, 22, 0, 31, 21, 77])) == [0, 1, 4]


def test_networkx_export_has_edges_to_children_and_the_nodes_attributes() -> None:
    graph = hand_tree().to_networkx()
    assert sorted(graph.edges) == [(0, 1), (0, 2), (1, 3), (1, 4), (3, 5)]
    assert graph.nodes[4] == {"token": 22, "depth": 2, "log_prob": -2.0}


def test_render_puts_the_more_likely_child_first_and_marks_nodes_with_stars() -> None:
    tree = TokenTree.root(token=0, capacity=4)
    tree.grow(torch.tensor([0, 0]), torch.tensor([7, 8]), torch.tensor([-3.0, -0.5]))
    tree.grow(torch.tensor([2]), torch.tensor([9]), torch.tensor([-1.0]))
    golden = "0\n├── 8  -0.50\n│   └── 9  -1.00\n└── 7  -3.00"
    assert tree.render() == golden
    labelled = "a *\n├── c  -0.50 *\n│   └── d  -1.00\n└── b  -3.00"
    assert tree.render(label=["a", "b", "c", "d"], marked=[0, 2]) == labelled


def test_errors_name_the_field_and_the_value() -> None:
    tree = hand_tree()
    three = torch.tensor([0, 0, 0])
    with pytest.raises(ConfigError, match=r"nodes: 9 .* capacity of 8"):
        tree.grow(three, three, three.float())
    with pytest.raises(ConfigError, match=r"lengths of parents, tokens and log_probs: \(2, 1, 2\)"):
        tree.grow(three[:2], three[:1], three[:2].float())
    with pytest.raises(ConfigError, match="k: 0 "):
        tree.prune(0)
    with pytest.raises(ConfigError, match="length of values: 5 .* 6"):
        tree.prune(3, values=torch.ones(5))
    with pytest.raises(ConfigError, match="capacity: 0 "):
        TokenTree.root(token=1, capacity=0)
    with pytest.raises(ConfigError, match="token: -1 "):
        TokenTree.root(token=-1, capacity=1)
    tree.check()
    assert len(tree) == 6  # a refused call changes nothing


@pytest.mark.parametrize(
    ("array", "node", "value", "complaint"),
    [
        ("parent_N", 3, 4, "parent of node 3: 4"),  # a later node
        ("parent_N", 0, 2, "parent of node 0: 2"),  # the root has none
        ("parent_N", 4, 2, "path of node 4"),  # another parent than in the path
        ("depth_N", 5, 2, "path of node 5"),
        ("token_N", 4, 21, "siblings: .*distinct tokens"),
        ("log_prob_N", 3, -0.1, "log-probability of node 3: -0.1.* at most its parent's, -0.25"),
        ("log_prob_N", 3, float("nan"), "log-probability of node 3: nan"),
    ],
)
def test_check_finds_every_planted_error(array: str, node: int, value: float, complaint: str) -> None:
    tree = hand_tree()
    getattr(tree, array)[node] = value
    with pytest.raises(ConfigError, match=complaint):
        tree.check()


def test_a_path_longer_than_max_depth_is_refused() -> None:
    tree = TokenTree.root(token=0, capacity=4, max_depth=1)
    tree.grow(torch.tensor([0]), torch.tensor([1]), torch.tensor([-1.0]))
    with pytest.raises(ConfigError, match="depth: 2 is not allowed; it must be at most 1"):
        tree.grow(torch.tensor([1]), torch.tensor([2]), torch.tensor([-2.0]))
    assert len(tree) == 2


def test_lists_grow_prune_and_walk_the_same_tree_as_tensors() -> None:
    tree = TokenTree.root(token=9, capacity=8)
    tree.grow([0, 0], [11, 12], [-0.25, -1.5])
    tree.grow([1, 1], [21, 22], [-0.5, -2.0])
    tree.grow([3], [31], [-0.75])
    expected = hand_tree()
    for ours, theirs in zip(tree.arrays, expected.arrays, strict=True):
        assert torch.equal(ours, theirs)
    assert tree.walk([11, 21, 0, 99, 0, 0]) == expected.walk(torch.tensor([11, 21, 0, 99, 0, 0]))
    values = [1.0, 0.5, 0.9, 0.4, 0.1, 0.3]
    assert torch.equal(tree.prune(3, values=values)[1], expected.prune(3, values=torch.tensor(values))[1])


@pytest.mark.parametrize("parents", ([6], [-1], [0.5], [True]))
def test_a_list_with_a_bad_parent_is_refused_and_changes_nothing(parents: list[int]) -> None:
    tree = hand_tree()
    with pytest.raises(ConfigError, match="parents"):
        tree.grow(parents, [41], [-3.0])
    assert len(tree) == 6


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (([0], ["a"], [-0.1]), "tokens: "),
        (([0], [4.7], [-0.1]), "tokens: .* integers"),
        (([0], [True], [-0.1]), "tokens: .* integers"),
        (([0], [2**40], [-0.1]), "tokens: "),
        (([0], [None], [-0.1]), "tokens: "),
        (([0], 4, [-0.1]), "tokens: 4 .* one number for each node"),
        (([0], [[4]], [-0.1]), "tokens: .* one number for each node"),
        (([0], torch.tensor([4.7]), [-0.1]), "tokens: .* integers"),
        ((["0"], [4], [-0.1]), "parents: "),
        (([0.5], [4], [-0.1]), "parents: .* integers"),
        ((0, [4], [-0.1]), "parents: 0 .* one number for each node"),
        ((torch.tensor([0.0]), [4], [-0.1]), "parents: .* integers"),
        (([0], [4], ["a"]), "log_probs: "),
        (([0], [4], -0.1), "log_probs: -0.1 .* one number for each node"),
    ],
    ids=str,
)
def test_nodes_of_other_types_are_refused_by_name_and_change_nothing(
    arguments: tuple[Any, Any, Any], complaint: str
) -> None:
    tree = hand_tree()
    with pytest.raises(ConfigError, match=f"^{complaint}"):
        tree.grow(*arguments)
    assert len(tree) == 6
    tree.grow([], [], [])
    assert len(tree) == 6


def test_a_walk_and_values_need_one_number_for_every_node() -> None:
    for tokens in ([], [11], [11] * 7, torch.tensor([11])):
        with pytest.raises(ConfigError, match=r"length of next_tokens: \d .* nodes, 6"):
            hand_tree().walk(tokens)
    with pytest.raises(ConfigError, match="values: "):
        hand_tree().prune(2, values=["a"] * 6)  # type: ignore[list-item]
