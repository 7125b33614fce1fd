"""Every operator of the step's host side agrees with its specification."""

from __future__ import annotations

import pytest
import torch

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError
from yggdrasil.kv import move_slots_reference_
from yggdrasil.models.packing import (
    Chunk,
    empty_meta,
    pack_chains_,
    pack_chains_reference_,
    pack_nodes_,
    pack_nodes_reference_,
)
from yggdrasil.step.accept import Accepted, accept, follow, target_tokens
from yggdrasil.tree import TokenTree

pytestmark = pytest.mark.usefixtures("kernels")

MAX_DEPTH = 6


def random_tree(num_nodes: int, seed: int) -> TokenTree:
    """Nodes attached at random, no deeper than MAX_DEPTH, in a tree with room to spare."""
    generator = torch.Generator().manual_seed(seed)
    tree = TokenTree.root(7, num_nodes + 3, max_depth=MAX_DEPTH)
    for node in range(1, num_nodes):
        shallow = torch.nonzero(tree.depth_N < MAX_DEPTH)[:, 0]
        parent = shallow[torch.randint(len(shallow), (1,), generator=generator)]
        tree.grow(
            parent, torch.tensor([100 + node]), tree.log_prob_N[parent] - torch.rand(1, generator=generator)
        )
    return tree


@pytest.mark.parametrize(("first", "last"), ((0, 1), (0, 12), (5, 9), (11, 12)))
def test_packing_nodes_agrees_with_the_reference(first: int, last: int) -> None:
    tree = random_tree(12, 0)
    meta_NM = empty_meta(14, MAX_DEPTH).fill_(99)
    expected_NM = empty_meta(14, MAX_DEPTH).fill_(98)
    pack_nodes_(meta_NM, tree, first, last, 40, row=3)
    pack_nodes_reference_(expected_NM, tree, first, last, 40, row=3)
    assert torch.equal(meta_NM, expected_NM)


@pytest.mark.parametrize("lens", ((), (0,), (1,), (8,), (3, 0, 4), (1, 1, 1, 1)))
def test_packing_chains_agrees_with_the_reference(lens: tuple[int, ...]) -> None:
    meta_NM = empty_meta(8, MAX_DEPTH).fill_(99)
    expected_NM = empty_meta(8, MAX_DEPTH).fill_(98)
    chunks = [
        Chunk(
            2 * place,
            range(10 * place, 10 * place + count),
            40 + place,
            (None, 0, 1)[place % 3] if count else 0,
        )
        for place, count in enumerate(lens)
    ]
    pack_chains_(meta_NM, chunks)
    pack_chains_reference_(expected_NM, chunks)
    assert torch.equal(meta_NM, expected_NM)


def test_more_tokens_than_the_graph_takes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="9 tokens for 8 rows"):
        pack_chains_(empty_meta(8, MAX_DEPTH), [Chunk(0, range(5), 0), Chunk(1, range(4), 0)])


def best_tokens(tree: TokenTree, generator: torch.Generator, *, elsewhere: bool) -> torch.Tensor:
    """Tokens of a target that follows the tree with some probability at every node.

    Otherwise its token is 5, or one from elsewhere in the tree.
    """
    num_nodes = len(tree)
    token_K = (
        tree.token_N[torch.randint(num_nodes, (num_nodes,), generator=generator)].long()
        if elsewhere
        else torch.full((num_nodes,), 5)
    )
    for node in range(1, num_nodes):
        if torch.rand(1, generator=generator) < 0.7:
            token_K[tree.parent_N[node]] = tree.token_N[node]
    return token_K


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("seed", range(20))
def test_following_in_one_call_agrees_with_following_stage_by_stage(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(int(torch.randint(1, 24, (1,), generator=generator)), seed)
    token_K = best_tokens(tree, generator, elsewhere=seed % 2 == 1)
    logits_KV = (
        torch.randn(len(tree), 200, generator=generator).to(dtype).scatter_(1, token_K[:, None], 9.0)
    )
    [expected] = follow([tree], [target_tokens(tree, logits_KV, 3, SamplingConfig(), depth=MAX_DEPTH)])
    assert isinstance(expected, Accepted)
    assert accept(tree, logits_KV, 3, SamplingConfig()) == expected
    token, parent, *_ = tree.arrays
    assert torch.ops.ygg.follow(logits_KV, parent, token) == (expected.path, expected.tokens)


def test_a_tree_with_a_broken_node_is_not_followed() -> None:
    tree = random_tree(4, 0)
    logits_KV = torch.zeros(4, 40)
    logits_KV[3, 7] = float("nan")
    assert torch.ops.ygg.follow(logits_KV, tree.parent_N, tree.token_N) == ([], [])
    with pytest.raises(YggError, match="not finite"):
        accept(tree, logits_KV, 3, SamplingConfig())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("source", ([4], [4, 5, 9], [3, 4, 5], [5, 8, 15], [4, 15, 16, 31]))
def test_moving_slots_agrees_with_the_reference(source: list[int], dtype: torch.dtype) -> None:
    storage = torch.randn(2, 2, 2, 3, 16, 4).to(dtype)
    expected = storage.clone()
    move_slots_reference_(expected, source, 3)
    torch.ops.ygg.move_slots_(storage, source, 3)
    assert torch.equal(storage, expected)


def test_slots_outside_the_cache_are_refused() -> None:
    storage = torch.zeros(1, 1, 2, 1, 16, 4)
    for source, target in (([16], 3), ([2], 3), ([-1], -1)):
        with pytest.raises(RuntimeError, match="outside the cache"):
            torch.ops.ygg.move_slots_(storage, source, target)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("places", (1, 15, 16, 257))
def test_the_largest_score_is_the_first_of_equal_ones(places: int, dtype: torch.dtype) -> None:
    scores = torch.randint(-20, 20, (9, places)).to(dtype)
    values, tokens = torch.ops.ygg.largest(scores)
    assert torch.equal(values, scores.float().max(dim=-1).values)
    assert tokens.tolist() == [row.index(max(row)) for row in scores.tolist()]


def test_a_row_with_nan_has_no_finite_largest_score() -> None:
    scores = torch.zeros(3, 40)
    scores[1, 37] = float("nan")
    scores[2, 0] = float("inf")
    assert torch.ops.ygg.largest(scores)[0].isfinite().tolist() == [True, False, False]
