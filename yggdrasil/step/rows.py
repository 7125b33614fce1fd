"""The step over rows: every row drafts a tree of its own, and all rows share each forward.

The stages are those of a single request: draft, prune, verify, accept, commit. A chain is a tree of width
1, plain decoding a tree of depth 0, a single request a batch of one. Only pruning looks at all rows
together.

This is the specification of kernels/step.cpp, in torch alone; on CUDA it runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.errors import YggError
from yggdrasil.models.packing import Chunk, pack_chains_, pack_nodes_
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.staging import upload
from yggdrasil.state import PLAIN, Row, StepResult
from yggdrasil.step.accept import Accepted, accept
from yggdrasil.step.choice import Choice, VerifyMenu
from yggdrasil.step.growth import RowDraft, catch_up_rows_, draft_rows, root_of
from yggdrasil.step.prune import Pruned
from yggdrasil.step.sampling import BROKEN, largest_scores
from yggdrasil.trace import Trace
from yggdrasil.tree import TokenTree, walk

__all__ = ["StepOverRows", "accept_rows", "commit_row_", "prune_rows", "undrafted", "verify_rows"]


def prune_rows(drafts: Sequence[RowDraft], choice: Choice) -> list[Pruned]:
    """Keep the best nodes of the whole batch; `choice.menu` says how many.

    A node's calibrated acceptance never is above its parent's, and the lower of two equal nodes comes
    first. So the best nodes of the batch are a tree in every row.

    Args:
        drafts: Result of `draft_rows`.
        choice: The one that they were drafted with. Of a row whose shape sets `verify`, only its best
            `verify - 1` nodes compete.

    Cost: one sync (the values), one sort on the host.
    Source: Yggdrasil section 4.2, "Verification Width Pruning"; over a batch as TETRIS does, which Nightjar
    describes in section 6.1.
    """
    return _prune(drafts, _on_host(drafts, choice)[0], choice.menu)


def _on_host(drafts: Sequence[RowDraft], choice: Choice) -> tuple[list[tuple[float, ...]], list[list[int]]]:
    """For every row the calibrated acceptance of its drafted nodes but the root, and all nodes' depths."""
    lens = [len(draft.tree) for draft in drafts]
    if all(length == 1 for length in lens):
        return [()] * len(drafts), [[0]] * len(drafts)
    columns = torch.stack(
        (
            torch.cat([draft.tree.log_prob_N for draft in drafts]),
            torch.cat([draft.tree.depth_N for draft in drafts]).float(),
        )
    )
    log_probs: list[float]
    log_probs, depths = columns.tolist()  # sync: the number of kept nodes is a shape
    values = []
    depths_of_rows = []
    for calibration, length, end in zip(choice.calibrations, lens, accumulate(lens), strict=True):
        values.append(tuple(calibration.values(log_probs[end - length + 1 : end]).tolist()))
        depths_of_rows.append([int(depth) for depth in depths[end - length : end]])
    return values, depths_of_rows


class _Node(NamedTuple):
    """A drafted node with its calibrated acceptance; `place` is its row's among the drafts."""

    value: float
    place: int
    node: int


def _prune(drafts: Sequence[RowDraft], values: Sequence[Sequence[float]], menu: VerifyMenu) -> list[Pruned]:
    competing = [
        _Node(values[place][node - 1], place, node)
        for place, draft in enumerate(drafts)
        for node in _best(values[place], draft.shape.verify)
    ]
    # among equals the lower node, so a parent before its child, then the earlier row
    ranked = sorted(competing, key=lambda each: (-each.value, each.node, each.place))
    sums = [0.0, *accumulate(each.value for each in ranked)]
    depth = max((draft.shape.depth for draft in drafts), default=0)
    num_kept = menu.best(sums, num_rows=len(drafts), depth=depth)
    keeps = [[0] for _ in drafts]
    gains = [0.0] * len(drafts)
    for value, place, node in ranked[:num_kept]:
        keeps[place].append(node)
        gains[place] += value
    return [
        Pruned(draft.tree.subtree(sorted(keep)), sorted(keep), 1.0 + gain)
        for draft, keep, gain in zip(drafts, keeps, gains, strict=True)
    ]


def _best(values: Sequence[float], verify: int | None) -> list[int]:
    """Ids, ascending, of a row's nodes that compete with those of other rows; the root does not."""
    nodes = range(1, 1 + len(values))
    ranked = sorted(nodes, key=lambda node: -values[node - 1])
    return sorted(ranked if verify is None else ranked[: verify - 1])


def undrafted(model: TokenGraphs, rows: Sequence[Row]) -> list[Pruned]:
    """What rows without a draft verify: their root alone."""
    return [Pruned(root_of(model, row), [0], 1.0) for row in rows]


def verify_rows(
    model: TokenGraphs, rows: Sequence[Row], pruned: Sequence[Pruned], prompts: Sequence[Chunk]
) -> tuple[Tensor, Tensor, list[int]]:
    """One forward of the target over every row's tree, and over parts of other rows' prompts.

    Args:
        model: The target; KV from the roots on is provisional.
        rows: The rows that emit. Tokens before a row's root that the target lacks (the end of a prompt) run
            in the same forward.
        pruned: The tree of each.
        prompts: Tokens of rows whose root this forward does not reach; their logits are not used.

    Returns:
        (N, V) logits, defined for the trees' nodes, (N, E) last hidden states, and the index among the N of
        each row's root; the other nodes of its tree follow it.

    Raises:
        ShapeNotCompiled: more tokens than the menu's largest graph.

    Cost: one graph. Aliasing: on CUDA overwritten by the next replay.
    """
    texts = [
        Chunk(row.row, row.state.tokens[row.target_len : row.state.root_pos], row.target_len, 0)
        for row in rows
    ]
    num_text = sum(len(chunk.tokens) for chunk in (*texts, *prompts))
    meta_NM = model.meta(num_text + sum(len(each.tree) for each in pruned))
    roots = []
    end = 0
    for row, text, each in zip(rows, texts, pruned, strict=True):
        root = end + len(text.tokens)
        if text.tokens:
            pack_chains_(meta_NM[end:root], [text])
        end = root + len(each.tree)
        pack_nodes_(meta_NM[root:end], each.tree, 0, len(each.tree), row.state.root_pos, row=row.row)
        roots.append(root)
    pack_chains_(meta_NM[end:], prompts)
    logits_NV, hidden_NE = model.forward(meta_NM)
    return logits_NV, hidden_NE, roots


def accept_rows(
    rows: Sequence[Row], pruned: Sequence[Pruned], logits_NV: Tensor, roots: Sequence[int]
) -> list[Accepted | YggError]:
    """Apply the acceptance law to each row; a row whose logits are not finite gets an error instead.

    Args:
        rows: The rows that `verify_rows` got.
        pruned: The tree of each.
        logits_NV: Result of `verify_rows`.
        roots: Result of `verify_rows`.

    Cost: one sync for all greedy rows, and one for each row that samples.
    """
    trees = [each.tree for each in pruned]
    logits = [logits_NV[root : root + len(tree)] for root, tree in zip(roots, trees, strict=True)]
    is_greedy = [row.state.sampling.temperature == 0 for row in rows]
    places = [place for place, greedy in enumerate(is_greedy) if greedy]
    outcomes = iter(_accept_greedy([trees[place] for place in places], [logits[place] for place in places]))
    return [
        next(outcomes) if greedy else _accept(row, tree, logits_KV)
        for row, tree, logits_KV, greedy in zip(rows, trees, logits, is_greedy, strict=True)
    ]


def _accept(row: Row, tree: TokenTree, logits_KV: Tensor) -> Accepted | YggError:
    try:
        return accept(tree, logits_KV, row.state.root_pos, row.state.sampling)
    except YggError as error:
        return error


def _accept_greedy(trees: Sequence[TokenTree], logits: Sequence[Tensor]) -> list[Accepted | YggError]:
    """`accept` at temperature 0 for several trees of K nodes, given the logits of each, (K, V)."""
    if not trees:
        return []
    chosen = [largest_scores(logits_KV) for logits_KV in logits]
    is_sound_N = torch.cat([each.score_K for each in chosen]).isfinite()
    columns = (
        torch.cat([each.token_K for each in chosen]).masked_fill(~is_sound_N, -1),
        torch.cat([tree.token_N for tree in trees]).long(),
        torch.cat([tree.parent_N for tree in trees]).long(),
    )
    all_wanted, all_tokens, all_parents = torch.stack(columns).tolist()  # sync: this is the text
    outcomes: list[Accepted | YggError] = []
    end = 0
    for tree in trees:
        nodes = slice(end, end + len(tree))
        end = nodes.stop
        wanted = all_wanted[nodes]
        if min(wanted) < 0:
            outcomes.append(YggError(BROKEN))
            continue
        path = walk(all_parents[nodes], all_tokens[nodes], wanted)
        outcomes.append(Accepted(path, [wanted[node] for node in path]))
    return outcomes


def commit_row_(
    target: TokenGraphs, draft: TokenGraphs, row: Row, drafted: RowDraft, pruned: Pruned, accepted: Accepted
) -> None:
    """Keep the accepted path in both models' KV and add its tokens to the text.

    Cost: one gather and scatter per model whose path is not a chain already. No sync.
    """
    root_pos = row.state.root_pos
    target.cache.keep_(row.row, root_pos, accepted.path)
    row.target_len = root_pos + len(accepted.path)
    if drafted.num_run:
        nodes = [pruned.drafted_node[node] for node in accepted.path]
        kept = [node for node in nodes if node < drafted.num_run]
        draft.cache.keep_(row.row, root_pos, kept)
        row.draft_len = root_pos + len(kept)
    row.state.tokens.extend(accepted.tokens)
    row.state.head = None


class StepOverRows:
    """One step after another over rows, each in two calls: `draft`, then `verify`.

    Args:
        target: The target, over pages of the rows.
        draft: The draft, over the same page table.
        trace: Gets the milliseconds of the stages catch up, draft, prune, verify, accept and commit.
    """

    def __init__(self, target: TokenGraphs, draft: TokenGraphs, trace: Trace) -> None:
        self._target = target
        self._draft = draft
        self._trace = trace
        self._forget_()

    def _forget_(self) -> None:
        """Drop what `draft` left for `verify`."""
        self._rows: list[Row] = []
        self._drafts: list[RowDraft] = []
        self._values: list[tuple[float, ...]] = []
        self._pruned: list[Pruned] = []
        self._depths: list[list[int]] = []
        self._draft_ms = 0.0

    def draft(self, rows: Sequence[Row], choice: Choice) -> int:
        """The first half of a step: draft and prune. Without decoding rows it may be left out.

        Args:
            rows: The rows that decode, with pages for their trees.
            choice: A shape and a calibration for every row, and the menu of the batch.

        Returns:
            The number of tokens that these rows verify: roots and kept nodes.

        Raises:
            RuntimeError: as `draft_rows`.

        Cost: that of `catch_up_rows_`, `draft_rows` and `prune_rows`.
        """
        began = time.perf_counter()
        stage = self._trace.stage
        self._forget_()
        with stage("catch up"):
            drafting = [row for row, shape in zip(rows, choice.shapes, strict=True) if shape.depth]
            catch_up_rows_(self._draft, drafting)
        with stage("draft"):
            drafts = draft_rows(self._draft, rows, choice)
        with stage("prune"):
            values, depths = _on_host(drafts, choice)
            pruned = _prune(drafts, values, choice.menu)
        self._rows = list(rows)
        self._drafts = drafts
        self._values = values
        self._pruned = pruned
        self._depths = [
            [of_row[node] for node in each.drafted_node]
            for of_row, each in zip(depths, pruned, strict=True)
        ]
        self._draft_ms = (time.perf_counter() - began) * 1e3
        return sum(len(each.tree) for each in pruned)

    def verify(self, joining: Sequence[Row], prompts: Sequence[Chunk]) -> list[StepResult]:
        """The second half: verify, accept and commit.

        Args:
            joining: Rows that emit without a draft: those whose prompt ends in this step.
            prompts: Tokens of other rows' prompts for the same forward. The caller counts them in.

        Returns:
            A result for every row, decoding rows first, then joining ones. A row whose logits are not
            finite has an error, and nothing of it is committed.

        Raises:
            ShapeNotCompiled: more tokens than the menu's largest graph; nothing is committed.

        Cost: one forward of the target and the syncs of `accept_rows`.
        """
        began = time.perf_counter()
        stage = self._trace.stage
        rows = [*self._rows, *joining]
        plain = undrafted(self._target, joining)
        pruned = [*self._pruned, *plain]
        drafts = [*self._drafts, *(RowDraft(each.tree, 0, PLAIN) for each in plain)]
        values = [*self._values, *[()] * len(plain)]
        depths = [*self._depths, *[[0]] * len(plain)]
        before_ms = self._draft_ms
        self._forget_()
        with stage("verify"):
            self._logits_NV, hidden_NE, self._roots = verify_rows(self._target, rows, pruned, prompts)
        with stage("accept"):
            accepted = accept_rows(rows, pruned, self._logits_NV, self._roots)
        root_positions = [row.state.root_pos for row in rows]
        with stage("commit"):
            for place, outcome in enumerate(accepted):
                if isinstance(outcome, Accepted):
                    row = rows[place]
                    commit_row_(self._target, self._draft, row, drafts[place], pruned[place], outcome)
                    last = self._roots[place] + outcome.path[-1]
                    row.state.hidden_of = partial(hidden_NE.select, 0, last)
        ms = before_ms + (time.perf_counter() - began) * 1e3
        return [
            _result(drafts[place], values[place], depths[place], pruned[place], outcome, root_pos, ms)
            for place, (outcome, root_pos) in enumerate(zip(accepted, root_positions, strict=True))
        ]

    def logits(self, place: int, path: Sequence[int]) -> Tensor:
        """(len(path), V) the target's logits after some nodes of a row of the last step.

        Args:
            place: Of the row among the results of `verify`.
            path: Nodes of its verified tree.

        Cost: one gather, no sync. Only until the target's next forward.
        """
        root = self._roots[place]
        nodes = upload([root + node for node in path], self._logits_NV.device)
        return self._logits_NV.index_select(0, nodes)


def _result(
    drafted: RowDraft,
    values: tuple[float, ...],
    depths: Sequence[int],
    pruned: Pruned,
    accepted: Accepted | YggError,
    root_pos: int,
    ms: float,
) -> StepResult:
    error = str(accepted) if isinstance(accepted, YggError) else ""
    emitted = Accepted([], []) if isinstance(accepted, YggError) else accepted
    return StepResult(
        tokens=emitted.tokens,
        shape=drafted.shape,
        drafted=len(drafted.tree),
        verified=len(pruned.tree),
        context_len=root_pos,
        predicted_emitted=pruned.expected_emitted,
        tree_of=lambda: pruned.tree,
        path=emitted.path,
        ms=ms,
        error=error,
        values=values,
        depths=depths,
    )
