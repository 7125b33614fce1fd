"""The fused growth step against its reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.errors import ConfigError
from yggdrasil.kernels import load_kernels
from yggdrasil.models.packing import empty_meta
from yggdrasil.offline.forest import grow_fused_, grow_reference_
from yggdrasil.step.growth import Frontier
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.tree import TokenTree

MAX_DEPTH = 6


def grown(grow_, *, width: int, depth: int, candidates: int, seed: int, platt: PlattScale = UNSCALED):
    """A tree grown over random candidates, and the metadata of every step."""
    generator = torch.Generator().manual_seed(seed)
    tree = TokenTree.root(3, 1 + width * depth, max_depth=MAX_DEPTH)
    frontier = Frontier(1 + width * depth, candidates, platt=platt)
    meta_NM = empty_meta(max(width, 2) + 1, MAX_DEPTH)
    metas = []
    num_new = 1
    for _ in range(depth):
        # padded rows, as a graph of a wider bucket returns them
        log_probs = -torch.rand(num_new + 1, candidates, generator=generator).sort(dim=1).values
        tokens = torch.stack(
            [torch.randperm(50, generator=generator)[:candidates] for _ in range(num_new + 1)]
        )
        grow_(frontier, tree, tokens, log_probs, width, meta_NM, 17)
        metas.append(meta_NM.clone())
        num_new = width
    return tree, metas


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 5),
    depth=st.integers(1, MAX_DEPTH),
    extra=st.integers(0, 3),
    seed=st.integers(0, 10_000),
)
def test_the_fused_growth_step_equals_its_reference(width: int, depth: int, extra: int, seed: int) -> None:
    load_kernels()
    reference, reference_metas = grown(
        grow_reference_, width=width, depth=depth, candidates=width + extra, seed=seed
    )
    fused, fused_metas = grown(grow_fused_, width=width, depth=depth, candidates=width + extra, seed=seed)
    fused.check()
    for name in ("token_N", "parent_N", "depth_N", "log_prob_N", "path_NA"):
        assert torch.equal(getattr(reference, name), getattr(fused, name)), name
    for reference_meta, fused_meta in zip(reference_metas, fused_metas, strict=True):
        assert torch.equal(reference_meta, fused_meta)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 5),
    depth=st.integers(1, MAX_DEPTH),
    slope=st.floats(0.1, 4),
    offset=st.floats(-3, 3),
    seed=st.integers(0, 10_000),
)
def test_both_growth_steps_scale_edges_the_same(
    width: int, depth: int, slope: float, offset: float, seed: int
) -> None:
    load_kernels()
    trees = [
        grown(grow_, width=width, depth=depth, candidates=8, seed=seed, platt=PlattScale(slope, offset))[0]
        for grow_ in (grow_reference_, grow_fused_)
    ]
    trees[1].check()
    # values, not nodes: logarithms round to near ties
    torch.testing.assert_close(trees[0].log_prob_N, trees[1].log_prob_N, rtol=1e-4, atol=1e-5)


def test_scaled_edges_can_make_a_tree_deep_instead_of_wide() -> None:
    def tree(platt: PlattScale) -> TokenTree:
        frontier = Frontier(3, 2, platt=platt)
        tree = TokenTree.root(3, 3, max_depth=2)
        meta_NM = empty_meta(2, 2)
        for token in (10, 20):
            grow_reference_(
                frontier,
                tree,
                torch.tensor([[token, token + 1]]),
                torch.tensor([[0.6, 0.4]]).log(),
                1,
                meta_NM,
                17,
            )
        return tree

    assert tree(UNSCALED).parent_N.tolist() == [-1, 0, 0]  # 0.4 before 0.6 * 0.6
    assert tree(PlattScale(2.0, 1.0)).parent_N.tolist() == [-1, 0, 1]


@pytest.mark.parametrize("grow_", (grow_reference_, grow_fused_))
def test_a_frontier_keeps_only_the_best_candidates(grow_) -> None:  # type: ignore[no-untyped-def]
    load_kernels()
    tree = TokenTree.root(3, 4, max_depth=3)
    frontier = Frontier(4, 1)
    meta_NM = empty_meta(2, 3)
    for token in (10, 20, 30):
        grow_(
            frontier, tree, torch.tensor([[token, token + 1]]), torch.tensor([[-0.9, -1.0]]), 1, meta_NM, 17
        )
    assert (tree.token_N.tolist(), tree.parent_N.tolist()) == ([3, 10, 20, 30], [-1, 0, 1, 2])


def test_a_graft_takes_the_larger_probability_and_leaves_the_rest_to_its_siblings() -> None:
    """Two nodes of a chain: the repetition is surer than the draft of the first, then less sure."""
    frontier = Frontier(3, 2)
    tokens = torch.tensor([[5, 6], [8, 7], [1, 2]])
    log_probs = torch.tensor([[0.6, 0.2], [0.9, 0.05], [0.7, 0.3]]).log()
    given = torch.tensor([0.8, 0.5, 0.0], dtype=torch.float64).log()
    paths = frontier.add_grafted(
        tokens, log_probs, torch.tensor([6, 8, -1]), given, torch.zeros(1, dtype=torch.float64)
    )
    assert paths.exp().tolist() == pytest.approx([1.0, 0.8, 0.72, 0.0])
    # the chain's own tokens are in the tree; of the first node's rest, 0.8, its sibling had 0.6
    values = frontier.log_prob_NC.exp().flatten().tolist()
    assert values == pytest.approx([0.6 * 0.2 / 0.8, 0.0, 0.0, 0.8 * 0.05, 0.72 * 0.7, 0.72 * 0.3])


def test_a_taken_candidate_is_not_taken_again() -> None:
    frontier = Frontier(2, 3)
    frontier.add(torch.tensor([[7, 8, 9]]), torch.tensor([[-0.1, -0.5, -0.9]]), torch.zeros(1))
    assert frontier.take(2)[1].tolist() == [7, 8]
    assert frontier.take(1)[1].tolist() == [9]


@pytest.mark.parametrize("grow_", (grow_reference_, grow_fused_))
def test_more_nodes_than_candidates_are_refused(grow_) -> None:  # type: ignore[no-untyped-def]
    load_kernels()
    with pytest.raises(RuntimeError):
        grown(grow_, width=5, depth=1, candidates=4, seed=0)


@pytest.mark.parametrize("grow_", (grow_reference_, grow_fused_))
def test_a_path_longer_than_max_depth_is_refused_and_adds_no_node(grow_) -> None:
    load_kernels()
    tree = TokenTree.root(3, 4, max_depth=1)
    frontier = Frontier(4, 1)
    meta_NM = empty_meta(2, 1)
    candidates = torch.tensor([[7]]), torch.tensor([[-0.5]])
    grow_(frontier, tree, *candidates, 1, meta_NM, 17)
    with pytest.raises((RuntimeError, ConfigError)):
        grow_(frontier, tree, *candidates, 1, meta_NM, 17)
    assert len(tree) == 2
    tree.check()
