"""The step over rows: every row drafts a tree of its own, all rows share each forward.

The stages are those of a single request: draft, prune, verify, accept, commit. A chain is a tree of width
1, plain decoding a tree of depth 0. `StepOverRows` runs the stages on any device and specifies
kernels/step.cpp, which runs them on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.errors import YggError
from yggdrasil.models.packing import Chunk, empty_meta, pack_chains_, pack_nodes_
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.staging import upload
from yggdrasil.state import PLAIN, Row, Shape, StepResult
from yggdrasil.step.accept import Accepted, accept
from yggdrasil.step.choice import Calibration, Choice
from yggdrasil.step.draft import Frontier, grown, num_candidates
from yggdrasil.step.prune import Pruned
from yggdrasil.step.sampling import largest_scores, tokens_to_host
from yggdrasil.trace import Trace
from yggdrasil.tree import TokenTree

__all__ = [
    "RowDraft",
    "StepOverRows",
    "accept_rows",
    "catch_up_rows_",
    "commit_row_",
    "draft_rows",
    "prune_rows",
    "run_chunks",
    "undrafted",
    "verify_rows",
]

MOST_WIDEST_FORWARDS = 3  # up to 3 replays of the draft's widest graph cost less than its prompt chunk


@dataclass(frozen=True)
class RowDraft:
    """What one row drafted.

    Args:
        tree: The whole tree.
        num_run: Its first nodes have KV in the draft's storage; 0 if the draft did not run.
        shape: The grown shape; a stop rule may have made it less deep.
    """

    tree: TokenTree
    num_run: int
    shape: Shape


def undrafted(model: TokenGraphs, row: Row) -> Pruned:
    """The tree of a row that does not draft: its root."""
    root = row.state.tokens[-1]
    tree = TokenTree.root(root, 1, max_depth=model.max_depth, device=model.device)
    return Pruned(tree, [0], 1.0)


# ---- draft ----


def run_chunks(
    model: TokenGraphs, chunks: Sequence[Chunk], limit: int
) -> Iterator[tuple[Sequence[Chunk], tuple[Tensor, Tensor]]]:
    """Run chunks in forwards of at most `limit` tokens; a chunk that does not fit is split.

    Yields:
        The chunks of a forward, and its outputs. Aliasing: on CUDA overwritten by the next replay.
    """
    batch: list[Chunk] = []
    room = limit
    for chunk in chunks:
        start = 0
        while start < len(chunk.tokens):
            part = chunk.part(start, room)
            batch.append(part)
            start += len(part.tokens)
            room -= len(part.tokens)
            if room == 0:
                yield batch, _forward(model, batch)
                batch = []
                room = limit
    if batch:
        yield batch, _forward(model, batch)


def _forward(model: TokenGraphs, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    meta_NM = model.meta(sum(len(chunk.tokens) for chunk in chunks))
    pack_chains_(meta_NM, chunks)
    return model.forward(meta_NM)


def _limit(model: TokenGraphs, chunks: Sequence[Chunk]) -> int:
    """Size of the draft's graph for these chunks: its widest one or the prompt chunk's."""
    num_tokens = sum(len(chunk.tokens) for chunk in chunks)
    return model.widest if num_tokens <= MOST_WIDEST_FORWARDS * model.widest else model.prefill_chunk


def catch_up_rows_(model: TokenGraphs, rows: Sequence[Row]) -> None:
    """Complete the draft's KV up to every row's root: after a prompt, or after steps without speculation.

    A lag of one token is left to the head draft.

    Source: Nightjar section 4.2, "Prefill Cost Modeling".
    """
    lagging = [row for row in rows if row.lag > 1]
    chunks = [
        Chunk(row.row, row.state.tokens[row.draft_len : row.state.root_pos], row.draft_len, 0)
        for row in lagging
    ]
    for _ in run_chunks(model, chunks, _limit(model, chunks)):
        pass
    for row in lagging:
        row.draft_len = row.state.root_pos


class _Growing:
    """A row's tree while it grows.

    Attributes:
        candidates: Of the nodes that ran last, and their log-probabilities: (nodes, C) each.
        num_run: Nodes that the draft has run.
    """

    def __init__(
        self,
        model: TokenGraphs,
        row: Row,
        shape: Shape,
        calibration: Calibration,
        head: tuple[Tensor, Tensor],
    ) -> None:
        capacity = shape.num_nodes
        root = row.state.tokens[-1]
        self.row = row
        self.shape = shape
        self.depth = 0
        self.num_run = 1
        self.candidates = head
        self.tree = TokenTree.root(root, capacity, max_depth=model.max_depth, device=model.device)
        self._frontier = Frontier(capacity, num_candidates(model, shape), model.device, calibration.platt)

    @property
    def next_width(self) -> int:
        """The number of nodes of the next growth step."""
        levels = self.shape.levels
        return self.shape.width if levels is None else len(levels[self.depth])

    @property
    def is_grown(self) -> bool:
        shape = self.shape
        return self.depth == shape.depth or (shape.stop is not None and shape.stop.enough(self.tree))

    def attach_(self) -> None:
        """One growth step: W nodes anywhere, or the next level of a static tree."""
        tree = self.tree
        levels = self.shape.levels
        self._frontier.add(*self.candidates, tree.log_prob_N[self._frontier.len :])
        if levels is None:
            tree.grow(*self._frontier.take(self.shape.width))
        else:
            tree.grow(*self._frontier.ranked(levels[self.depth]))
        self.depth += 1

    def pack_(self, meta_WM: Tensor) -> None:
        """Write the metadata of the nodes that have not run."""
        row = self.row
        pack_nodes_(meta_WM, self.tree, self.num_run, len(self.tree), row.state.root_pos, row=row.row)


def draft_rows(model: TokenGraphs, rows: Sequence[Row], choice: Choice) -> list[RowDraft]:
    """A tree under every row's root.

    Args:
        model: The draft. A row's KV after its root is provisional.
        rows: With at most one token before the root that the draft's KV lacks, if they draft.
        choice: The shapes, and the scales of the draft's probabilities.

    Cost: one forward for the roots, then max(D) - 1 of all rows' W nodes, if these fit in a graph.
    Source: Yggdrasil section 4.2, over the rows of Nightjar section 4.1.
    """
    drafting = [place for place, shape in enumerate(choice.shapes) if shape.depth]
    heads = _heads(model, [rows[place] for place in drafting])
    growing = {
        place: _Growing(model, rows[place], choice.shapes[place], choice.calibrations[place], head)
        for place, head in zip(drafting, heads, strict=True)
    }
    _grow_(model, list(growing.values()))
    return [
        RowDraft(each.tree, each.num_run, grown(each.shape, each.depth))
        if (each := growing.get(place)) is not None
        else RowDraft(undrafted(model, row).tree, 0, PLAIN)
        for place, row in enumerate(rows)
    ]


def _heads(model: TokenGraphs, rows: Sequence[Row]) -> list[tuple[Tensor, Tensor]]:
    """The candidates after every root, (1, C), and their log-probabilities; completes the KV before it."""
    chunks = [Chunk(row.row, row.state.tokens[row.draft_len :], row.draft_len, 1) for row in rows]
    heads = {}
    for batch, outputs in run_chunks(model, chunks, _limit(model, chunks)):
        last = 0
        for chunk in batch:
            last += len(chunk.tokens)
            # a later part of a split chunk replaces the entry of an earlier one
            heads[chunk.row] = tuple(output[last - 1 : last].clone() for output in outputs)
    for row in rows:
        row.draft_len = row.state.root_pos
    return [(heads[row.row][0], heads[row.row][1]) for row in rows]


def _grow_(model: TokenGraphs, live: list[_Growing]) -> None:
    """Grow all trees; every forward runs the newest nodes of as many rows as fit."""
    while live:
        batch: list[_Growing] = []
        growing = []
        for each in live:
            width = each.next_width
            if sum(len(other.tree) - other.num_run for other in batch) + width > model.prefill_chunk:
                _run_nodes_(model, batch)
                batch = []
            each.attach_()
            if not each.is_grown:
                batch.append(each)
                growing.append(each)
        _run_nodes_(model, batch)
        live = growing


def _run_nodes_(model: TokenGraphs, batch: Sequence[_Growing]) -> None:
    """Run the draft over the newest nodes of several trees."""
    if not batch:
        return
    widths = [len(each.tree) - each.num_run for each in batch]
    meta_NM = model.meta(sum(widths))
    *parts, rest_NM = torch.split(meta_NM, [*widths, len(meta_NM) - sum(widths)])
    for each, meta_WM in zip(batch, parts, strict=True):
        each.pack_(meta_WM)
        each.num_run = len(each.tree)
    rest_NM.copy_(empty_meta(len(rest_NM), model.max_depth, device=model.device))
    # on CUDA the next replay overwrites the outputs
    outputs = [torch.split(output[: sum(widths)].clone(), widths) for output in model.forward(meta_NM)]
    for each, tokens_WC, log_probs_WC in zip(batch, *outputs, strict=True):
        each.candidates = (tokens_WC, log_probs_WC)


# ---- prune ----


def prune_rows(drafts: Sequence[RowDraft], choice: Choice) -> list[Pruned]:
    """Keep the best nodes of the whole batch, as many as emit the most tokens per millisecond.

    Calibrated acceptance never rises from parent to child, so the best n nodes of the batch are n nodes of
    connected trees, and one sort serves every n.

    Cost: one sync for each drafted tree (its values).
    Source: Yggdrasil section 4.2, "Verification Width Pruning", over all rows as in TETRIS.
    """
    values = [
        calibration.values(draft.tree.log_prob_N.tolist())[1:]  # sync: the number of nodes is a shape
        for draft, calibration in zip(drafts, choice.calibrations, strict=True)
    ]
    # among equals the lower node, so a parent before its child, then the earlier row
    competing = sorted(
        (int(node), place)
        for place, shape in enumerate(choice.shapes)
        for node in _best(values[place])[: None if shape.verify is None else shape.verify - 1]
    )
    of_batch = np.array([values[place][node] for node, place in competing])
    order = _best(of_batch)
    sums = [0.0, *of_batch[order].cumsum().tolist()]
    depth = max(draft.shape.depth for draft in drafts)
    kept = [
        competing[index] for index in order[: choice.menu.best(sums, num_rows=len(drafts), depth=depth)]
    ]
    pruned = []
    for place, draft in enumerate(drafts):
        nodes = [node for node, row in kept if row == place]
        keep = [0, *(1 + node for node in sorted(nodes))]
        tree = draft.tree if len(draft.tree) == 1 else draft.tree.subtree(keep)
        pruned.append(Pruned(tree, keep, 1.0 + sum(float(values[place][node]) for node in nodes)))
    return pruned


def _best(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Indices by falling value; among equals the earlier one."""
    return np.argsort(-values, kind="stable")


# ---- verify, accept, commit ----


def verify_rows(
    model: TokenGraphs, rows: Sequence[Row], pruned: Sequence[Pruned], prompts: Sequence[Chunk]
) -> tuple[Tensor, Tensor, list[int]]:
    """One forward of the target over every row's tree, and over parts of other rows' prompts.

    Args:
        model: The target; KV after the roots is provisional.
        rows: The rows that emit. Tokens before a row's root that the target lacks (the end of a prompt) run
            in the same forward.
        prompts: Tokens of rows whose root this forward does not reach; their logits are not used.

    Returns:
        (N, V) logits, defined for tree nodes, (N, E) last hidden states, and the index among the N of each
        row's root; its tree follows it.

    Raises:
        ShapeNotCompiled: more tokens than the menu's largest graph.

    Cost: one graph. Aliasing: on CUDA overwritten by the next replay.
    """
    lags = [row.state.root_pos - row.target_len for row in rows]
    lens = [len(each.tree) for each in pruned]
    ends = np.cumsum([lag + length for lag, length in zip(lags, lens, strict=True)]).tolist()
    num_tokens = (ends[-1] if ends else 0) + sum(len(chunk.tokens) for chunk in prompts)
    meta_NM = model.meta(num_tokens)
    for (first, last), row, each in zip(pairwise([0, *ends]), rows, pruned, strict=True):
        root_pos = row.state.root_pos
        root = last - len(each.tree)
        if root > first:
            text = Chunk(row.row, row.state.tokens[row.target_len : root_pos], row.target_len, 0)
            pack_chains_(meta_NM[first:root], [text])
        pack_nodes_(meta_NM[root:last], each.tree, 0, len(each.tree), root_pos, row=row.row)
    pack_chains_(meta_NM[ends[-1] if ends else 0 :], prompts)
    logits_NV, hidden_NE = model.forward(meta_NM)
    return logits_NV, hidden_NE, [end - length for end, length in zip(ends, lens, strict=True)]


def accept_rows(
    rows: Sequence[Row], pruned: Sequence[Pruned], logits_NV: Tensor, roots: Sequence[int]
) -> list[Accepted | YggError]:
    """Apply the acceptance law to each row; a row whose logits are not finite gets an error instead.

    Args:
        logits_NV: Result of `verify_rows`.
        roots: Result of `verify_rows`.

    Cost: one sync if all rows are greedy, else one a row. A CPU samples only along the accepted paths.
    """
    if all(row.state.sampling.temperature == 0 for row in rows):
        try:
            return list(_accept_greedy(pruned, logits_NV, roots))
        except YggError:
            pass  # some row is broken: the loop over rows below finds which
    return [_accept(*each, logits_NV) for each in zip(rows, pruned, roots, strict=True)]


def _accept_greedy(pruned: Sequence[Pruned], logits_NV: Tensor, roots: Sequence[int]) -> Iterator[Accepted]:
    lens = [len(each.tree) for each in pruned]
    nodes = [root + node for root, length in zip(roots, lens, strict=True) for node in range(length)]
    chosen = largest_scores(logits_NV[: nodes[-1] + 1])
    index = upload(nodes, logits_NV.device)
    chosen = type(chosen)(*(column[index] for column in chosen))
    per_row = torch.split(chosen.token_K, lens)
    on_walk = torch.cat([each.tree.on_walk(token_K) for each, token_K in zip(pruned, per_row, strict=True)])
    tokens, is_on_walk = tokens_to_host(chosen, on_walk)
    first = 0
    for length in lens:
        path = [node for node in range(length) if is_on_walk[first + node]]
        yield Accepted(path, [tokens[first + node] for node in path])
        first += length


def _accept(row: Row, pruned: Pruned, root: int, logits_NV: Tensor) -> Accepted | YggError:
    logits_KV = logits_NV[root : root + len(pruned.tree)]
    try:
        return accept(pruned.tree, logits_KV, row.state.root_pos, row.state.sampling)
    except YggError as error:
        return error


def commit_row_(
    target: TokenGraphs, draft: TokenGraphs, row: Row, num_run: int, pruned: Pruned, accepted: Accepted
) -> None:
    """Add the accepted path to the text and to both models' KV.

    Args:
        num_run: Nodes of the drafted tree that the draft ran.

    Cost: one gather and scatter per model whose path is not a chain already.
    """
    root_pos = row.state.root_pos
    target.cache.keep_(row.row, root_pos, accepted.path)
    row.target_len = root_pos + len(accepted.path)
    if num_run:
        drafted = [pruned.drafted_node[node] for node in accepted.path]
        kept = [node for node in drafted if node < num_run]
        draft.cache.keep_(row.row, root_pos, kept)
        row.draft_len = root_pos + len(kept)
    row.state.tokens.extend(accepted.tokens)


class StepOverRows:
    """The step over rows on any device.

    Args:
        target: Decides every token.
        draft: Proposes tokens, over the same rows.
        trace: Receives the milliseconds of every stage.
    """

    def __init__(self, target: TokenGraphs, draft: TokenGraphs, trace: Trace) -> None:
        self._target = target
        self._draft = draft
        self._trace = trace
        self._started = 0.0
        self._rows: list[Row] = []
        self._drafts: list[RowDraft] = []
        self._pruned: list[Pruned] = []
        self._values: list[Sequence[float]] = []
        self._logits = torch.empty(0)
        self._roots: list[int] = []

    def draft(self, rows: Sequence[Row], choice: Choice) -> int:
        """Draft and prune a tree for every row.

        Returns:
            The tokens of the verification: roots, kept nodes, and text that the target lacks.
        """
        self._started = time.perf_counter()
        self._rows = list(rows)
        stage = self._trace.stage
        with stage("catch up"):
            drafting = [row for row, shape in zip(rows, choice.shapes, strict=True) if shape.depth]
            catch_up_rows_(self._draft, drafting)
        with stage("draft"):
            self._drafts = draft_rows(self._draft, rows, choice)
        with stage("prune"):
            self._pruned = prune_rows(self._drafts, choice) if rows else []
        self._values = [
            calibration.values(draft.tree.log_prob_N.tolist())[1:].tolist()
            for draft, calibration in zip(self._drafts, choice.calibrations, strict=True)
        ]
        lags = sum(row.state.root_pos - row.target_len for row in rows)
        return lags + sum(len(each.tree) for each in self._pruned)

    def verify(self, joining: Sequence[Row], prompts: Sequence[Chunk]) -> list[StepResult]:
        """Verify, accept and commit the rows of the last `draft`, and rows without a draft.

        Args:
            joining: Rows whose prompt ends in this step.
            prompts: Tokens of rows whose root this step does not reach.

        Returns:
            The results, those of `joining` last. A row whose logits are not finite has an error instead of
            tokens.
        """
        self._rows += joining
        self._pruned += [undrafted(self._target, row) for row in joining]
        self._drafts += [RowDraft(each.tree, 0, PLAIN) for each in self._pruned[len(self._drafts) :]]
        self._values += [()] * len(joining)
        stage = self._trace.stage
        with stage("verify"):
            outputs = verify_rows(self._target, self._rows, self._pruned, prompts)
            self._logits, hidden_NE, self._roots = outputs
        with stage("accept"):
            rows = self._rows
            accepted = accept_rows(rows, self._pruned, self._logits, self._roots) if rows else []
        with stage("commit"):
            results = [self._commit_(place, each, hidden_NE) for place, each in enumerate(accepted)]
        ms = (time.perf_counter() - self._started) * 1e3
        return [replace(result, ms=ms) for result in results]

    def logits(self, place: int, path: Sequence[int]) -> Tensor:
        """The target's logits after nodes of the place-th row of the last step, (len(path), V)."""
        return self._logits[upload([self._roots[place] + node for node in path], self._logits.device)]

    def _commit_(self, place: int, accepted: Accepted | YggError, hidden_NE: Tensor) -> StepResult:
        row = self._rows[place]
        pruned = self._pruned[place]
        drafted = self._drafts[place]
        root_pos = row.state.root_pos
        error = str(accepted) if isinstance(accepted, YggError) else ""
        path = accepted.path if isinstance(accepted, Accepted) else []
        tokens = accepted.tokens if isinstance(accepted, Accepted) else []
        if isinstance(accepted, Accepted):
            commit_row_(self._target, self._draft, row, drafted.num_run, pruned, accepted)
            row.state.hidden_of = partial(hidden_NE.select, 0, self._roots[place] + path[-1])
        return StepResult(
            tokens=tokens,
            shape=drafted.shape,
            drafted=len(drafted.tree),
            verified=len(pruned.tree),
            context_len=root_pos,
            predicted_emitted=pruned.expected_emitted,
            tree_of=lambda: pruned.tree,
            path=path,
            error=error,
            values=self._values[place],
        )
