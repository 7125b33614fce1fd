"""The step over rows by hand: which nodes of a batch are verified, and rows that cannot be decoded."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from yggdrasil.errors import YggError
from yggdrasil.kv import KVShape, KVStorage
from yggdrasil.layout import TOKEN
from yggdrasil.models.packing import empty_meta
from yggdrasil.policy.uncalibrated import UNCALIBRATED
from yggdrasil.state import PLAIN, DecodeState, Row, Shape
from yggdrasil.step.choice import Calibration, Choice, VerifyMenu, verify_most
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.step.prune import Pruned
from yggdrasil.step.rows import RowDraft, accept_rows, draft_rows, prune_rows
from yggdrasil.tree import TokenTree

NEXT = {
    10: (11, 0.6),
    11: (12, 0.6),
    20: (21, 0.4),
    21: (22, 0.4),
}  # token: the next token and its probability
KNOTS = UNCALIBRATED.calibration.knots


class Scripted:
    """A draft with a fixed next token after each token."""

    device = "cpu"
    max_depth = 3
    prefill_chunk = 8
    widest = 8
    sizes = (8,)
    num_candidates = 1
    graph_ms = 0.0

    def meta(self, num_tokens: int) -> Tensor:
        return empty_meta(8, self.max_depth)

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        following = [NEXT.get(int(token), (0, 1.0)) for token in meta_NM[:, TOKEN]]
        tokens_N1 = torch.tensor([[token] for token, _ in following])
        probabilities_N1 = torch.tensor([[probability] for _, probability in following])
        return tokens_N1, probabilities_N1.log()


def chains(roots: list[int], depths: list[int], platts: list[PlattScale]) -> tuple[list[RowDraft], Choice]:
    rows = [Row(row, DecodeState([root])) for row, root in enumerate(roots)]
    shapes = tuple(Shape(1, depth) if depth else PLAIN for depth in depths)
    choice = Choice(shapes, tuple(Calibration(platt, KNOTS) for platt in platts), verify_most(2))
    return draft_rows(Scripted(), rows, choice), choice  # type: ignore[arg-type]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("platt", "kept"), [(UNSCALED, [1, 1]), (PlattScale(1.8, 1.3), [2, 0])], ids=("unscaled", "scaled")
)
def test_draft_tokens_of_a_batch_are_ordered_by_scaled_probability(
    platt: PlattScale, kept: list[int]
) -> None:
    """Unscaled, 0.6 * 0.6 = 0.36 is less than 0.4. Scaled, 0.88 * 0.88 = 0.78 is more than 0.64."""
    drafts, choice = chains([10, 20], [2, 2], [platt] * 2)
    assert [draft.tree.token_N.tolist() for draft in drafts] == [[10, 11, 12], [20, 21, 22]]
    assert [len(each.tree) - 1 for each in prune_rows(drafts, choice)] == kept


@pytest.mark.usefixtures("kernels")
def test_each_row_uses_its_own_scale() -> None:
    platts = [PlattScale(1.8, 1.3), PlattScale(1.8, 1.3), UNSCALED, PlattScale(0.5, 0.0)]
    drafts, _ = chains([10] * 4, [2, 0, 1, 2], platts)
    edge = math.log(0.6)
    for draft, platt, depth in zip(drafts, platts, (2, 0, 1, 2), strict=True):
        expected = [platt.log(edge) * node for node in range(depth + 1)]
        assert draft.tree.log_prob_N.tolist() == pytest.approx(expected)
        assert draft.num_run == depth


def tree_of(parents: list[int], log_probs: list[float]) -> TokenTree:
    tree = TokenTree.root(0, 1 + len(parents))
    for node, (parent, log_prob) in enumerate(zip(parents, log_probs, strict=True), start=1):
        tree.grow(torch.tensor([parent]), torch.tensor([node]), torch.tensor([log_prob]))
    return tree


def pruned(menu: VerifyMenu, limits: tuple[int | None, ...]) -> list[list[int]]:
    """The kept nodes of three trees; the third has only its root."""
    trees = [
        tree_of([0, 0, 1], [-0.25, -0.5, -0.75]),
        tree_of([0, 1, 2], [-0.25, -0.5, -2.0]),
        tree_of([], []),
    ]
    shapes = [
        Shape(1, 3, verify) if len(tree) > 1 else PLAIN for tree, verify in zip(trees, limits, strict=True)
    ]
    drafts = [RowDraft(tree, 1, shape) for tree, shape in zip(trees, shapes, strict=True)]
    choice = Choice(tuple(shapes), (Calibration(UNSCALED, KNOTS),) * 3, menu)
    return [each.drafted_node for each in prune_rows(drafts, choice)]


@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (0, [[0], [0], [0]]),
        (1, [[0, 1], [0], [0]]),  # among equals the earlier row
        (3, [[0, 1, 2], [0, 1], [0]]),
        (5, [[0, 1, 2, 3], [0, 1, 2], [0]]),
        (99, [[0, 1, 2, 3], [0, 1, 2, 3], [0]]),
    ],
)
def test_the_best_nodes_of_the_whole_batch_are_kept(count: int, kept: list[list[int]]) -> None:
    assert pruned(verify_most(count), (None, None, None)) == kept


def test_a_row_with_a_limit_competes_with_its_best_nodes_only() -> None:
    assert pruned(verify_most(4), (2, None, None)) == [[0, 1], [0, 1, 2, 3], [0]]


def test_the_menu_decides_by_tokens_per_millisecond() -> None:
    """e^-0.25 twice and e^-0.5 twice: 3 + 2.77 tokens in 12 ms are better than 3 + 1.56 in 10."""
    assert pruned(VerifyMenu((2, 4), (10.0, 12.0)), (None, None, None)) == [[0, 1, 2], [0, 1, 2], [0]]
    assert pruned(VerifyMenu((2, 4), (10.0, 14.0)), (None, None, None)) == [[0, 1], [0, 1], [0]]


@pytest.mark.usefixtures("kernels")
def test_a_row_whose_logits_are_not_finite_is_an_error_and_the_others_go_on() -> None:
    rows = [Row(row, DecodeState([1])) for row in range(3)]
    trees = [Pruned(TokenTree.root(1, 1), [0], 1.0) for _ in rows]
    logits_NV = torch.eye(3, 5)
    logits_NV[1, 4] = torch.nan
    first, broken, last = accept_rows(rows, trees, logits_NV, [0, 1, 2])
    assert isinstance(broken, YggError)
    assert [accepted.tokens for accepted in (first, last)] == [[0], [2]]  # type: ignore[union-attr]


def test_kept_tokens_of_a_row_move_across_pages_in_any_order() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=4, capacity=48)
    pages_BP = torch.tensor([[5, 1, 3], [0, 2, 4]], dtype=torch.int32)
    cache = KVStorage(shape, num_pages=6, pages_BP=pages_BP, dtype=torch.float32, device="cpu")
    cache.storage_PL2GSF.copy_(torch.randn(cache.storage_PL2GSF.shape))

    def indices(row: int) -> Tensor:
        return cache.storage_PL2GSF[pages_BP[row].long()].permute(0, 4, 1, 2, 3, 5).flatten(0, 1).clone()

    before = [indices(row) for row in range(2)]
    cache.keep_(0, 14, [0, 2, 5, 20])
    assert torch.equal(indices(1), before[1])
    assert torch.equal(indices(0)[:18], before[0][[*range(15), 16, 19, 34]])
