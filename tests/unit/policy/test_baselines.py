"""Structures of other systems: shapes by hand, and Sequoia's programme against all possible trees."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.errors import ConfigError
from yggdrasil.policy import baselines
from yggdrasil.policy.baselines import (
    dynamic_sequence,
    equal_growth,
    k_ary,
    opt_tree,
    sequence,
    sequoia,
    sequoia_latency,
    static_accepted,
    structure_ms,
)
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.state import Shape

FLAT = Curve((0,), (2, 4, 8, 16, 32, 64), ((10.0,) * 6,))
STEEP = Curve((0,), (2, 4, 8, 16, 32, 64), ((10.0, 20.0, 40.0, 80.0, 160.0, 320.0),))
FREE_DRAFT = Curve((0,), (2, 8, 128), ((1e-6, 1e-6, 1e-6),))
COSTLY_DRAFT = Curve((0,), (2, 8, 128), ((50.0, 50.0, 50.0),))


def latency(draft: Curve, verify: Curve) -> LatencyModel:
    return LatencyModel(draft, verify, growth_host_ms=0.0, step_host_ms=0.0, plain_host_ms=0.0)


def test_sequences_and_equal_growth_have_no_levels_and_no_stop_rule() -> None:
    assert sequence(5) == Shape(1, 5, 6)
    assert equal_growth(4, 3) == Shape(4, 3)
    assert equal_growth(4, 3, 8) == Shape(4, 3, 8)


def test_a_shape_shows_its_stop_rule() -> None:
    assert str(dynamic_sequence(8, 0.35)) == "W=1 D=8 K=9 until P<0.35"
    assert str(opt_tree(32, 8, 10, 0.1)) == "W=8 D=10 K=32 until gain<0.1"


def test_a_k_ary_tree_equals_one_drawn_by_hand() -> None:
    shape = k_ary(2, 2)
    assert shape.levels == (((0, 0), (0, 1)), ((1, 0), (1, 1), (2, 0), (2, 1)))
    assert (shape.width, shape.depth, shape.verify, shape.num_nodes) == (4, 2, 7, 7)


@pytest.mark.parametrize(
    ("num_nodes", "sizes"), ((8, [3, 4]), (4, [3]), (3, [2]), (13, [3, 9]), (14, [3, 9, 1]))
)
def test_k_ary_is_cut_in_its_last_level(num_nodes: int, sizes: list[int]) -> None:
    shape = k_ary(3, 6, num_nodes=num_nodes)
    assert shape.levels is not None
    assert [len(level) for level in shape.levels] == sizes
    assert shape.num_nodes == shape.verify == num_nodes


def test_a_sequoia_tree_equals_one_computed_by_hand() -> None:
    # after the root's two best children, 0.6 and 0.3, the best child of the best, 0.36, comes first
    assert sequoia((0.6, 0.3), 2, 4).levels == (((0, 0),),)
    assert sequoia((0.6, 0.3), 3, 4).levels == (((0, 0),), ((1, 0),))
    assert sequoia((0.6, 0.3), 4, 4).levels == (((0, 0), (0, 1)), ((1, 0),))
    assert sequoia((0.6, 0.3), 3, 1).levels == (((0, 0), (0, 1)),)
    assert static_accepted(sequoia((0.6, 0.3), 4, 4), (0.6, 0.3)) == pytest.approx(0.6 + 0.3 + 0.36)


def test_sequoia_takes_the_best_ranks_even_out_of_order() -> None:
    assert sequoia((0.1, 0.5), 2, 3).levels == (((0, 1),),)


def test_sequoia_refuses_a_tree_that_is_too_large() -> None:
    assert sequoia((0.5, 0.4), 7, 2).num_nodes == 7
    with pytest.raises(ConfigError, match="num_nodes: 8"):
        sequoia((0.5, 0.4), 8, 2)


def best_value(by_rank: tuple[float, ...], num_nodes: int, max_depth: int) -> float:
    """Largest expected length over all trees, by recursion over the definition."""

    @cache
    def forest(nodes: int, depth: int, rank: int) -> float:
        if nodes == 0:
            return 0.0
        if rank == len(by_rank) or depth == 0:
            return float("-inf")
        options = [forest(nodes, depth, rank + 1)]
        options += [
            by_rank[rank] * (1 + forest(size - 1, depth - 1, 0)) + forest(nodes - size, depth, rank + 1)
            for size in range(1, nodes + 1)
        ]
        return max(options)

    return forest(num_nodes - 1, max_depth, 0)


def all_trees(num_ranks: int, num_nodes: int, max_depth: int) -> set[tuple[tuple[int, ...], ...]]:
    """All trees, each as the set of its rank paths, made by attaching one node at a time."""
    trees = {((),)}
    for _ in range(num_nodes - 1):
        grown = set()
        for tree in trees:
            places = ((*path, rank) for path in tree if len(path) < max_depth for rank in range(num_ranks))
            grown |= {tuple(sorted((*tree, place))) for place in places if place not in tree}
        trees = grown
    return trees


@pytest.mark.parametrize("by_rank", ((0.5, 0.3), (0.45, 0.25, 0.2), (0.2, 0.4, 0.0)))
@pytest.mark.parametrize(("num_nodes", "max_depth"), ((2, 1), (4, 3), (5, 2), (6, 3)))
def test_sequoia_equals_brute_force_over_every_tree(
    by_rank: tuple[float, ...], num_nodes: int, max_depth: int
) -> None:
    def value(tree: tuple[tuple[int, ...], ...]) -> float:
        return sum(math.prod(by_rank[rank] for rank in path) for path in tree) - 1

    best = max(map(value, all_trees(len(by_rank), num_nodes, max_depth)))
    assert static_accepted(sequoia(by_rank, num_nodes, max_depth), by_rank) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(
    by_rank=st.lists(st.floats(0, 0.4), min_size=1, max_size=4),
    num_nodes=st.integers(2, 14),
    max_depth=st.integers(1, 6),
)
def test_sequoia_is_the_best_tree_and_a_tree(by_rank: list[float], num_nodes: int, max_depth: int) -> None:
    best = best_value(tuple(by_rank), num_nodes, max_depth)
    if best == float("-inf"):
        with pytest.raises(ConfigError):
            sequoia(by_rank, num_nodes, max_depth)
        return
    shape = sequoia(by_rank, num_nodes, max_depth)
    assert static_accepted(shape, by_rank) == pytest.approx(best)
    assert shape.num_nodes == shape.verify == num_nodes
    assert shape.levels is not None
    assert 1 <= len(shape.levels) <= max_depth
    first = 0
    size = 1
    places = set()
    for level in shape.levels:
        assert all(first <= parent < first + size and 0 <= rank < len(by_rank) for parent, rank in level)
        first += size
        size = len(level)
        places |= set(level)
    assert len(places) == num_nodes - 1


def test_sequoia_solves_every_level_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    forest = baselines._Programme._forest
    monkeypatch.setattr(
        baselines._Programme,
        "_forest",
        lambda self, *args: (solved.append(args[1:]), forest(self, *args))[1],
    )
    shape = sequoia((0.6, 0.15, 0.07, 0.04, 0.03, 0.02, 0.01, 0.01), 64, 16)
    assert shape.num_nodes == 64
    assert solved == [(depth, 64) for depth in range(16)]


BY_RANK = (0.6, 0.2, 0.1)


def test_sequoia_latency_prefers_large_trees_only_where_verification_is_flat() -> None:
    flat = sequoia_latency(BY_RANK, 8, latency(FREE_DRAFT, FLAT), (4, 8, 16, 32, 64), 0)
    steep = sequoia_latency(BY_RANK, 8, latency(FREE_DRAFT, STEEP), (4, 8, 16, 32, 64), 0)
    assert (flat.num_nodes, steep.num_nodes) == (64, 4)


def test_sequoia_latency_prefers_shallow_trees_where_drafting_is_expensive() -> None:
    free = sequoia_latency(BY_RANK, 8, latency(FREE_DRAFT, FLAT), (4,), 0)
    costly = sequoia_latency(BY_RANK, 8, latency(COSTLY_DRAFT, FLAT), (4,), 0)
    # 0.6 + 0.36 + 0.216 in three levels, 0.6 + 0.2 + 0.1 in one
    assert (free.depth, costly.depth) == (3, 1)


def test_sequoia_latency_skips_sizes_that_no_depth_fills() -> None:
    assert sequoia_latency((0.5,), 3, latency(FREE_DRAFT, FLAT), (4, 64), 0).num_nodes == 4
    with pytest.raises(ConfigError, match="verify_widths"):
        sequoia_latency((0.5,), 2, latency(FREE_DRAFT, FLAT), (64,), 0)


def test_milliseconds_of_a_structure_equal_a_sum_by_hand() -> None:
    profile = LatencyModel(
        Curve((0,), (2, 4, 128), ((1.0, 2.0, 99.0),)), Curve((0,), (2, 8), ((10.0, 12.0),)), 0.5, 1.0, 0.5
    )
    # head draft 1; a level of six runs as four and two, the last level not at all; two growth steps 1; host
    # 1; verification 12
    wide = Shape(6, 2, 8, levels=(tuple((0, rank) for rank in range(6)), ((1, 0),)))
    assert structure_ms(wide, profile, verified=8, context_len=0) == pytest.approx(
        1.0 + (2.0 + 1.0) + 2 * 0.5 + 1.0 + 12.0
    )
    grown = opt_tree(8, 4, 6, 0.1)
    assert structure_ms(grown, profile, verified=8, context_len=0) == profile.step_ms(4, 6, 8, 0)
