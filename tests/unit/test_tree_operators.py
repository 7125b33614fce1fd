"""Every operator of the step's host side does what its plain specification does."""

from __future__ import annotations

import pytest
import torch

from yggdrasil.kv import move_plain_
from yggdrasil.models.packing import Piece, empty_meta, pack_chains_, pack_chains_plain_, pack_nodes_, pack_nodes_plain_
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
        tree.grow(parent, torch.tensor([100 + node]), tree.log_prob_N[parent] - torch.rand(1, generator=generator))
    return tree


def assert_same_tree(one: TokenTree, other: TokenTree) -> None:
    for name in ("token_N", "parent_N", "depth_N", "log_prob_N", "path_NA"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert len(one) == len(other)


@pytest.mark.parametrize(("first", "last"), ((0, 1), (0, 12), (5, 9), (11, 12)))
def test_packing_nodes_fills_what_the_plain_packing_fills(first: int, last: int) -> None:
    tree, meta_NM, plain_NM = random_tree(12, 0), empty_meta(14, MAX_DEPTH).fill_(99), empty_meta(14, MAX_DEPTH).fill_(98)
    pack_nodes_(meta_NM, tree, first, last, 40, row=3)
    pack_nodes_plain_(plain_NM, tree, first, last, 40, row=3)
    assert torch.equal(meta_NM, plain_NM)


@pytest.mark.parametrize("lens", ((), (0,), (1,), (8,), (3, 0, 4), (1, 1, 1, 1)))
def test_packing_chains_fills_what_the_plain_packing_fills(lens: tuple[int, ...]) -> None:
    meta_NM, plain_NM = empty_meta(8, MAX_DEPTH).fill_(99), empty_meta(8, MAX_DEPTH).fill_(98)
    pieces = [Piece(2 * place, range(10 * place, 10 * place + count), 40 + place) for place, count in enumerate(lens)]
    pack_chains_(meta_NM, pieces)
    pack_chains_plain_(plain_NM, pieces)
    assert torch.equal(meta_NM, plain_NM)


def test_more_tokens_than_the_graph_takes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="9 tokens for 8 rows"):
        pack_chains_(empty_meta(8, MAX_DEPTH), [Piece(0, range(5), 0), Piece(1, range(4), 0)])


def test_a_root_is_the_root_of_a_tree() -> None:
    tree = TokenTree.of(*torch.ops.ygg.root(7, 9, MAX_DEPTH + 1), length=1)
    assert_same_tree(tree, TokenTree.root(7, 9, max_depth=MAX_DEPTH))
    assert (tree.capacity, tree.max_depth) == (9, MAX_DEPTH)
    tree.grow(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([-0.1, -0.2]))
    tree.check()


@pytest.mark.parametrize("seed", range(5))
def test_a_subtree_is_the_subtree_of_the_tree(seed: int) -> None:
    tree = random_tree(15, seed)
    for k in (1, 4, 9, 14):
        keep = tree.prune(k)[1].tolist()
        assert_same_tree(TokenTree.of(*torch.ops.ygg.subtree(*tree.arrays, keep), length=k), tree.subtree(keep))


@pytest.mark.parametrize("seed", range(40))
def test_the_walk_where_the_arrays_are_passes_the_nodes_of_the_walk(seed: int) -> None:
    """The target follows the tree with some probability at every node; in every second tree its token is one that stands elsewhere in the tree."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes = int(torch.randint(1, 24, (1,), generator=generator))
    tree = random_tree(num_nodes, seed)
    said_K = tree.token_N[torch.randint(num_nodes, (num_nodes,), generator=generator)].long() if seed % 2 else torch.full((num_nodes,), 5)
    for node in range(1, num_nodes):
        if torch.rand(1, generator=generator) < 0.7:
            said_K[tree.parent_N[node]] = tree.token_N[node]
    assert torch.nonzero(tree.on_walk(said_K))[:, 0].tolist() == tree.walk(said_K)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("source", ([4], [4, 5, 9], [3, 4, 5], [5, 8, 15], [4, 15, 16, 31]))
def test_slots_move_as_in_torch(source: list[int], dtype: torch.dtype) -> None:
    storage = torch.randn(2, 2, 2, 3, 16, 4).to(dtype)
    expected = storage.clone()
    move_plain_(expected, source, 3)
    torch.ops.ygg.move_slots_(storage, source, 3)
    assert torch.equal(storage, expected)


def test_slots_outside_the_cache_are_refused() -> None:
    storage = torch.zeros(1, 1, 2, 1, 16, 4)
    for source, target in (([16], 3), ([2], 3), ([-1], -1)):
        with pytest.raises(RuntimeError, match="outside the cache"):
            torch.ops.ygg.move_slots_(storage, source, target)
    with pytest.raises(RuntimeError, match="node 9 of 6"):
        torch.ops.ygg.subtree(*random_tree(3, 0).arrays, [0, 9])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("places", (1, 15, 16, 257))
def test_the_greatest_is_the_first_greatest(places: int, dtype: torch.dtype) -> None:
    scores = torch.randint(-20, 20, (9, places)).to(dtype)
    values, tokens = torch.ops.ygg.greatest(scores)
    assert torch.equal(values, scores.float().max(dim=-1).values)
    assert tokens.tolist() == [row.index(max(row)) for row in scores.tolist()]


def test_a_row_with_nan_has_no_finite_greatest() -> None:
    scores = torch.zeros(3, 40)
    scores[1, 37] = float("nan")
    scores[2, 0] = float("inf")
    assert torch.ops.ygg.greatest(scores)[0].isfinite().tolist() == [True, False, False]
