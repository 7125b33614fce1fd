"""The step over rows by hand: which tokens run in which forward, which nodes of a batch are verified."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError
from yggdrasil.layout import INDEX, PATH, POSITION, PREFIX, ROW, TOKEN
from yggdrasil.models.packing import Chunk, empty_meta
from yggdrasil.state import PLAIN, DecodeState, Head, Row, Shape
from yggdrasil.step.accept import Accepted, choose_rows, follow
from yggdrasil.step.choice import Calibration, Choice, VerifyMenu
from yggdrasil.step.growth import RowDraft, catch_up_rows_, draft_rows
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.step.prune import Pruned, drafted_nodes, prune_rows
from yggdrasil.step.rows import commit_row_
from yggdrasil.step.verify import undrafted, verify_rows
from yggdrasil.tree import TokenTree

# acceptance by path log-probability: the probability itself between these knots
KNOTS = torch.tensor(
    [[math.log(p / 100) for p in range(1, 101)], [p / 100 for p in range(1, 101)]]
).double()
NEXT = {
    10: (11, 0.6),
    11: (12, 0.6),
    20: (21, 0.4),
    21: (22, 0.4),
}  # token: the next token and its probability


def calibration(platt: PlattScale = UNSCALED) -> Calibration:
    return Calibration(platt, KNOTS)


def most(num_nodes: int) -> VerifyMenu:
    return VerifyMenu((num_nodes,), (1.0,))


class Scripted:
    """A draft with fixed candidates after each token; records the (row, token, index) that ran.

    The best next token has the probability of `NEXT`, every other one half of that before it.
    """

    device = "cpu"
    max_depth = 4
    vocab = 100
    graph_ms = 0.0

    def __init__(self, *, widest: int = 8, prefill_chunk: int = 8, num_candidates: int = 1) -> None:
        self.sizes = (widest, prefill_chunk)
        self.widest = widest
        self.prefill_chunk = prefill_chunk
        self.num_candidates = num_candidates
        self.forwards: list[list[tuple[int, int, int]]] = []
        self.metas: list[Tensor] = []
        self._meta = {size: empty_meta(size, self.max_depth) for size in self.sizes}

    def meta(self, num_tokens: int) -> Tensor:
        return self._meta[next(size for size in self.sizes if size >= num_tokens)]

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        stored = meta_NM[meta_NM[:, INDEX] >= 0]
        self.metas.append(stored.clone())
        self.forwards.append([tuple(row) for row in stored[:, [ROW, TOKEN, INDEX]].tolist()])
        following = [NEXT.get(int(token), (7 * int(token) % 100, 0.5)) for token in meta_NM[:, TOKEN]]
        ranks = range(self.num_candidates)
        tokens_NC = torch.tensor([[token + rank for rank in ranks] for token, _ in following])
        probabilities_NC = torch.tensor([[best / 2**rank for rank in ranks] for _, best in following])
        return tokens_NC, probabilities_NC.log()


def rows_of(*texts: Sequence[int], lag: int = 0) -> list[Row]:
    """Rows in reverse order of the page table; both models' KV reaches the root, or `lag` tokens less."""
    last = len(texts) - 1
    rows = [Row(last - place, DecodeState(list(text))) for place, text in enumerate(texts)]
    for row in rows:
        row.target_len = row.state.root_pos
        row.draft_len = max(0, row.state.root_pos - lag)
    return rows


def choice(shapes: Sequence[Shape], menu: VerifyMenu | None = None) -> Choice:
    return Choice(tuple(shapes), (calibration(),) * len(shapes), menu or most(10**6))


def pruned_of(drafts: Sequence[RowDraft], chosen: Choice) -> list[Pruned]:
    return prune_rows(drafts, drafted_nodes(drafts, chosen), chosen.menu)


def whole(drafted: RowDraft) -> Pruned:
    """All nodes of a drafted tree."""
    return Pruned(drafted.tree, [*range(len(drafted.tree))], drafted.tree.depth_N.tolist(), 1.0)


def tokens_of(drafts: Sequence[RowDraft]) -> list[list[int]]:
    return [draft.tree.token_N[1:].tolist() for draft in drafts]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("platt", "kept"), [(UNSCALED, [1, 1]), (PlattScale(1.8, 1.3), [2, 0])], ids=("unscaled", "scaled")
)
def test_draft_tokens_of_a_batch_are_ordered_by_scaled_probability(
    platt: PlattScale, kept: list[int]
) -> None:
    """Unscaled, 0.6 * 0.6 = 0.36 is less than 0.4. Scaled, 0.88 * 0.88 = 0.78 is more than 0.64."""
    chosen = Choice((Shape(1, 2),) * 2, (calibration(platt),) * 2, most(2))
    drafts = draft_rows(Scripted(), rows_of([10], [20]), chosen, vocab=100)
    assert tokens_of(drafts) == [[11, 12], [21, 22]]
    assert [len(each.tree) - 1 for each in pruned_of(drafts, chosen)] == kept


@pytest.mark.usefixtures("kernels")
def test_each_row_uses_its_own_scale() -> None:
    platts = [PlattScale(1.8, 1.3), PlattScale(1.8, 1.3), UNSCALED, PlattScale(0.5, 0.0)]
    depths = (2, 0, 1, 2)
    chosen = Choice(
        tuple(Shape(1, depth) for depth in depths), tuple(map(calibration, platts)), most(10**6)
    )
    edge = math.log(0.6)
    for draft, platt, depth in zip(
        draft_rows(Scripted(), rows_of(*[[10]] * 4), chosen, vocab=100), platts, depths, strict=True
    ):
        expected = [platt.log(edge) * (node + 1) for node in range(depth)]
        assert draft.tree.log_prob_N[1:].tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("kernels")
def test_plain_rows_run_no_model_and_verify_their_root() -> None:
    model = Scripted()
    rows = rows_of([1, 2, 3], [4], lag=2)
    drafts = draft_rows(model, rows, choice([PLAIN, PLAIN]), vocab=100)
    assert model.forwards == []
    assert [row.draft_len for row in rows] == [0, 0]
    assert [(len(draft.tree), draft.num_run, draft.shape) for draft in drafts] == [(1, 0, PLAIN)] * 2
    pruned = pruned_of(drafts, choice([PLAIN, PLAIN]))
    for each, last in zip([*pruned, *undrafted(model, rows)], [3, 4, 3, 4], strict=True):
        assert (each.drafted_node, each.depths, each.expected_emitted) == ([0], [0], 1.0)
        assert each.tree.token_N.tolist() == [last]


@pytest.mark.usefixtures("kernels")
def test_rows_share_the_forwards_and_leave_them_at_their_depth() -> None:
    model = Scripted(num_candidates=3)
    rows = rows_of([5, 10], [20], [30, 31, 10])
    drafts = draft_rows(model, rows, choice([Shape(2, 3), PLAIN, Shape(1, 2)]), vocab=100)
    assert model.forwards[0] == [(2, 10, 1), (0, 10, 2)]
    # two nodes of the first row, one of the last; then only the first row's
    assert [[(row, index) for row, _, index in forward] for forward in model.forwards[1:]] == [
        [(2, 2), (2, 3), (0, 3)],
        [(2, 4), (2, 5)],
    ]
    assert [(len(draft.tree), draft.num_run) for draft in drafts] == [(7, 5), (1, 0), (3, 2)]
    for draft in drafts:
        draft.tree.check()
    first = model.metas[1]
    assert first[:, POSITION].tolist() == [2, 2 + int(drafts[0].tree.depth_N[2]) - 1, 3]
    assert first[:, PREFIX].tolist() == [1, 1, 2]
    assert torch.equal(first[:2, PATH:], drafts[0].tree.path_NA[1:3])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("widths", "sizes"),
    [((3, 3, 3), [6, 3]), ((5, 3, 6), [5, 3, 6]), ((4, 2, 1, 1), [6, 2]), ((8, 1), [6, 3])],
    ids=str,
)
def test_nodes_of_a_row_are_split_only_if_no_forward_holds_them(
    widths: Sequence[int], sizes: Sequence[int]
) -> None:
    shared = Scripted(widest=2, prefill_chunk=6, num_candidates=8)
    shapes = [Shape(width, 2) for width in widths]
    rows = rows_of(*[[40 + width] for width in widths])
    drafts = draft_rows(shared, rows, choice(shapes), vocab=100)
    num_head = sum(len(forward) for forward in shared.forwards[: -len(sizes)])
    assert num_head == len(widths)
    assert [len(forward) for forward in shared.forwards[-len(sizes) :]] == sizes
    for row, shape, draft in zip(rows, shapes, drafts, strict=True):
        alone = Scripted(widest=16, prefill_chunk=16, num_candidates=8)
        [expected] = draft_rows(alone, rows_of(row.state.tokens), choice([shape]), vocab=100)
        assert torch.equal(draft.tree.token_N, expected.tree.token_N)
        assert torch.equal(draft.tree.parent_N, expected.tree.parent_N)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("num_tokens", "largest"), [(7, 4), (12, 4), (13, 16), (40, 16)])
def test_the_text_that_a_draft_lacks_runs_with_its_root(num_tokens: int, largest: int) -> None:
    """Up to three forwards of the widest graph, else forwards of the prompt's."""
    model = Scripted(widest=4, prefill_chunk=16)
    [long, short, whole] = rows_of([*range(100, 100 + num_tokens - 3)], [1, 10], [10], lag=10**6)
    short.draft_len = 0
    rows = [long, short, whole]
    drafts = draft_rows(model, rows, choice([Shape(1, 1)] * 3), vocab=100)
    ran = [each for forward in model.forwards for each in forward]
    assert ran == [
        *((2, token, index) for index, token in enumerate(long.state.tokens)),
        (1, 1, 0),
        (1, 10, 1),
        (0, 10, 0),
    ]
    assert all(len(forward) == largest for forward in model.forwards[:-1])
    assert len(model.forwards[-1]) <= largest
    assert [row.draft_len for row in rows] == [num_tokens - 4, 1, 0]
    assert tokens_of(drafts) == [[7 * long.state.tokens[-1] % 100], [11], [11]]


@pytest.mark.usefixtures("kernels")
def test_only_lags_of_more_than_a_token_are_caught_up_ahead_of_the_draft() -> None:
    model = Scripted()
    rows = rows_of([1, 2, 3, 4], [5, 6], [7], lag=3)
    catch_up_rows_(model, rows)
    assert model.forwards == [[(2, 1, 0), (2, 2, 1), (2, 3, 2)]]
    assert [row.draft_len for row in rows] == [3, 0, 0]


class Deep:
    """Stops a tree at a depth."""

    numbers = None

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def enough(self, tree: TokenTree) -> bool:
        return int(tree.depth_N.max()) >= self._depth


@pytest.mark.usefixtures("kernels")
def test_a_stop_rule_ends_the_growth_of_its_row_only() -> None:
    model = Scripted()
    shapes = [Shape(1, 4, 3, stop=Deep(1)), Shape(1, 4), Shape(1, 3, stop=Deep(3))]
    drafts = draft_rows(model, rows_of([10], [10], [10]), choice(shapes), vocab=100)
    assert [draft.shape for draft in drafts] == [Shape(1, 1, 3), Shape(1, 4), Shape(1, 3)]
    assert [(len(draft.tree), draft.num_run) for draft in drafts] == [(2, 1), (5, 4), (4, 3)]
    assert [len(forward) for forward in model.forwards] == [3, 2, 2, 1]


@pytest.mark.usefixtures("kernels")
def test_a_static_tree_grows_next_to_a_chain() -> None:
    levels = (((0, 1), (0, 0)), ((2, 0), (2, 2), (1, 1)))
    model = Scripted(num_candidates=3)
    shapes = [Shape(3, 2, levels=levels), Shape(1, 1)]
    drafts = draft_rows(model, rows_of([10], [20]), choice(shapes), vocab=100)
    assert tokens_of(drafts) == [[12, 11, 12, 14, 85], [21]]
    assert drafts[0].tree.parent_N.tolist() == [-1, 0, 0, 2, 2, 1]
    assert [(draft.shape, draft.num_run) for draft in drafts] == list(zip(shapes, (3, 1), strict=True))


@st.composite
def random_drafts(draw: st.DrawFn) -> list[RowDraft]:
    """Up to four trees whose log-probabilities often are equal."""
    drafts = []
    for _ in range(draw(st.integers(1, 4))):
        num_nodes = draw(st.integers(1, 9))
        tree = TokenTree.root(0, num_nodes)
        for node in range(1, num_nodes):
            parent = draw(st.integers(0, node - 1))
            edge = draw(st.sampled_from((0.0, -0.25, -0.5, -2.0)))
            log_prob = float(tree.log_prob_N[parent]) + edge
            tree.grow(torch.tensor([parent]), torch.tensor([node]), torch.tensor([log_prob]))
        shape = Shape(1, num_nodes - 1, draw(st.none() | st.integers(1, 6)))
        drafts.append(RowDraft(tree, max(0, num_nodes - 1), shape))
    return drafts


@settings(max_examples=100, deadline=None)
@given(drafts=random_drafts(), num_kept=st.integers(0, 20))
def test_the_best_nodes_of_the_batch_are_kept(drafts: list[RowDraft], num_kept: int) -> None:
    values = [calibration().values(draft.tree.log_prob_N).tolist() for draft in drafts]
    places = []
    for index, draft in enumerate(drafts):
        of_row = sorted((-values[index][node], node, index) for node in range(1, len(draft.tree)))
        places += of_row if draft.shape.verify is None else of_row[: draft.shape.verify - 1]
    places = sorted(places)[:num_kept]
    pruned = pruned_of(drafts, choice([draft.shape for draft in drafts], most(num_kept)))
    for index, (draft, each) in enumerate(zip(drafts, pruned, strict=True)):
        keep = sorted(node for _, node, row in places if row == index)
        assert each.drafted_node == [0, *keep]
        assert each.tree.token_N.tolist() == [0, *keep]
        assert each.depths == each.tree.depth_N.tolist()
        gains = accumulate((-value for value, _, row in places if row == index), initial=0.0)
        assert each.expected_emitted == 1.0 + list(gains)[-1]
        each.tree.check()
        for node, parent in enumerate(each.tree.parent_N.tolist()[1:], start=1):
            assert each.drafted_node[parent] == draft.tree.parent_N[each.drafted_node[node]]


def chain(probabilities: Sequence[float]) -> RowDraft:
    """A drafted chain with these path probabilities."""
    num_nodes = 1 + len(probabilities)
    tree = TokenTree.root(0, num_nodes, max_depth=max(num_nodes - 1, Scripted.max_depth))
    for node, probability in enumerate(probabilities, start=1):
        log_prob = torch.tensor([probability]).log()
        tree.grow(torch.tensor([node - 1]), torch.tensor([node]), log_prob)
    return RowDraft(tree, len(probabilities), Shape(1, len(probabilities)))


@pytest.mark.parametrize(
    ("growth_ms", "menu_ms", "kept"),
    [
        (0.0, (10.0, 12.0, 12.3), [1, 1, 0]),
        (1.0, (10.0, 12.0, 12.3), [2, 1, 0]),
        (1.0, (10.0, 12.0, 12.4), [1, 1, 0]),
        (1.0, (10.0, 20.0, 30.0), [0, 0, 0]),
    ],
)
def test_the_menu_chooses_the_number_of_nodes_for_the_whole_batch(
    growth_ms: float, menu_ms: tuple[float, ...], kept: list[int]
) -> None:
    """3, 4.5 or 4.6 tokens; the two growth steps of the deepest row are part of the time."""
    drafts = [chain([0.9, 0.1]), chain([0.6]), chain([])]
    chosen = choice([draft.shape for draft in drafts], VerifyMenu((0, 2, 3), menu_ms, growth_ms))
    assert [len(each.tree) - 1 for each in pruned_of(drafts, chosen)] == kept


@pytest.mark.usefixtures("kernels")
def test_text_that_the_target_lacks_and_prompts_run_in_the_same_forward() -> None:
    model = Scripted(widest=4, prefill_chunk=16)
    rows = rows_of([1, 2, 3], [4, 5, 6, 7])
    rows[1].target_len = 1
    pruned = [whole(chain([0.5])), whole(chain([0.5, 0.4]))]
    _, _, roots = verify_rows(model, rows, pruned, [Chunk(7, [8, 9], 20, 0), Chunk(9, [3], 0, 0)])
    assert roots == [0, 4]
    assert model.forwards == [
        [
            *((1, 0, 2), (1, 1, 3)),
            *((0, 5, 1), (0, 6, 2)),
            *((0, 0, 3), (0, 1, 4), (0, 2, 5)),
            *((7, 8, 20), (7, 9, 21), (9, 3, 0)),
        ]
    ]
    assert model.metas[0][:, PREFIX].tolist() == [2, 2, 2, 3, 3, 3, 3, 21, 22, 1]


def logits_for(tokens: Sequence[int]) -> Tensor:
    """(N, 10) logits whose largest is at these tokens."""
    return torch.eye(10)[torch.tensor(tokens)] * 20


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "temperatures", [(0.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.5, 0.5, 0.5), (0.0, 0.5, 0.0)]
)
@pytest.mark.parametrize("broken", (None, 0, 1, 2))
def test_rows_are_accepted_one_by_one(temperatures: Sequence[float], broken: int | None) -> None:
    rows = rows_of([1], [2, 0], [3, 0, 0])
    for row, temperature in zip(rows, temperatures, strict=True):
        row.state.sampling = SamplingConfig(temperature=temperature)
    pruned = [whole(chain([0.5, 0.4])), whole(chain([])), whole(chain([0.5, 0.4, 0.1]))]
    # between the rows: the text before a root, whose logits mean nothing
    logits_NV = logits_for([1, 5, 5, 0, 7, 0, 1, 2, 3, 4])
    logits_NV[5] = float("nan")
    roots = [0, 4, 6]
    expected = [Accepted([0, 1], [1, 5]), Accepted([0], [7]), Accepted([0, 1, 2, 3], [1, 2, 3, 4])]
    if broken is not None:
        logits_NV[roots[broken] + len(pruned[broken].tree) - 1] = float("nan")
    outcomes = follow([each.tree for each in pruned], choose_rows(rows, pruned, logits_NV, roots))
    for place, outcome in enumerate(outcomes):
        if place == broken:
            assert isinstance(outcome, YggError)
        else:
            assert outcome == expected[place]
    assert choose_rows([], [], logits_NV, []) == follow([], []) == []


class Kept:
    """A model that records what a commit moves; it is its own cache."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, list[int]]] = []
        self.cache = self

    def keep_(self, row: int, start: int, path: Sequence[int]) -> None:
        self.calls.append((row, start, list(path)))


@pytest.mark.parametrize(("num_run", "kept"), [(0, None), (1, [0]), (3, [0, 2]), (6, [0, 2, 5])], ids=str)
def test_a_commit_keeps_the_path_and_of_the_draft_the_nodes_that_ran(
    num_run: int, kept: list[int] | None
) -> None:
    [row] = rows_of([7, 8, 9, 6], lag=2)
    target = Kept()
    draft = Kept()
    drafted = RowDraft(chain([0.5] * 5).tree, num_run, Shape(1, 5))
    pruned = Pruned(drafted.tree, [0, 2, 3, 5], [0, 1, 2, 3], 1.0)
    commit_row_(target, draft, row, drafted, pruned, Accepted([0, 1, 3], [4, 5, 6]))
    assert target.calls == [(0, 3, [0, 1, 3])]
    assert draft.calls == ([] if kept is None else [(0, 3, kept)])
    assert (row.target_len, row.draft_len) == (6, 1 if kept is None else 3 + len(kept))
    assert row.state.tokens == [7, 8, 9, 6, 4, 5, 6]
    assert row.state.head is None
    assert all(a < b for a, b in pairwise(kept or []))


def test_a_commit_keeps_the_kv_of_the_next_root_whose_candidates_are_known() -> None:
    """The node under the last accepted one, provisional: the draft's text ends before it."""
    [row] = rows_of([7, 8, 9, 6])
    draft = Kept()
    drafted = RowDraft(chain([0.5] * 5).tree, 6, Shape(1, 5))
    pruned = Pruned(drafted.tree, [0, 2, 3, 5], [0, 1, 2, 3], 1.0)
    head = Head(6, torch.tensor([[5]]), torch.tensor([[-0.5]]))
    commit_row_(Kept(), draft, row, drafted, pruned, Accepted([0, 1, 3], [4, 5, 6]), head)
    assert draft.calls == [(0, 3, [0, 2, 5, 6 + 3])]
    assert (row.target_len, row.draft_len) == (6, 6)
    assert row.state.head is head
