"""The draft's half of the step over rows: catch up with the texts, then grow a tree under every root.

Each row's tree is the one that step/draft.py grows for it alone; all rows share each forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from yggdrasil.models.packing import Chunk, pack_chains_, pack_nodes_, pad_
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.state import Row, Shape
from yggdrasil.step.choice import Choice
from yggdrasil.step.draft import Drafted, Frontier, grown, num_candidates
from yggdrasil.step.platt import PlattScale
from yggdrasil.tree import TokenTree

__all__ = ["RowDraft", "catch_up_rows_", "draft_rows", "root_of", "run_chunks"]

MOST_WIDEST_FORWARDS = 3  # up to 3 replays of the draft's widest graph cost less than its prompt chunk

RowDraft = Drafted  # what one row drafted


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

    A lag of one token is left to the draft's first forward.

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
    """A row's tree while it grows, the root first.

    Attributes:
        tree: The nodes so far.
    """

    def __init__(self, model: TokenGraphs, row: Row, shape: Shape, platt: PlattScale) -> None:
        self.row = row
        self.shape = shape
        self.tree = root_of(model, row, shape.num_nodes)
        self._depth = 0
        self._frontier = Frontier(shape.num_nodes, num_candidates(model, shape), model.device, platt)

    @property
    def num_run(self) -> int:
        """The first `num_run` nodes have run: their candidates are known."""
        return self._frontier.len

    def ran_(self, tokens_WC: Tensor, log_probs_WC: Tensor) -> None:
        """The next W nodes have run. Aliasing: the candidates are copied."""
        nodes = slice(self.num_run, self.num_run + len(tokens_WC))
        self._frontier.add(tokens_WC, log_probs_WC, self.tree.log_prob_N[nodes])

    def grow_(self) -> bool:
        """Attach the nodes of one growth step; returns whether another step follows."""
        levels = self.shape.levels
        if levels is None:
            picked = self._frontier.take(self.shape.width)
        else:
            picked = self._frontier.ranked(levels[self._depth])
        self.tree.grow(*picked)
        self._depth += 1
        if self._depth == self.shape.depth:
            return False
        return levels is not None or self.shape.stop is None or not self.shape.stop.enough(self.tree)

    def finished(self) -> RowDraft:
        shape = self.shape if self.shape.levels is not None else grown(self.shape, self._depth)
        return RowDraft(self.tree, self.num_run, shape)


class _Span(NamedTuple):
    """Nodes `first..last-1` of a growing tree, which run in one forward."""

    growing: _Growing
    first: int
    last: int


def root_of(model: TokenGraphs, row: Row, capacity: int = 1) -> TokenTree:
    """The tree of a row's last token."""
    token = row.state.tokens[-1]
    return TokenTree.root(token, capacity, max_depth=model.max_depth, device=model.device)


def draft_rows(model: TokenGraphs, rows: Sequence[Row], choice: Choice) -> list[RowDraft]:
    """A tree under every row's root: one forward over the text up to the roots, then growth.

    The nodes of a row's last growth step are leaves: the next step runs their forward.

    Args:
        model: The draft. Its KV becomes complete up to the roots of the rows that draft; from the roots on
            it is provisional.
        rows: Rows with pages for their trees. A row of a shape without depth runs no model.
        choice: A shape and a calibration for every row.

    Raises:
        RuntimeError: a shape wider than the draft's candidates, or deeper than its paths.

    Cost: 1 + (max(D) - 1) forwards, more if one graph does not hold the nodes of all rows, and a dozen
    small operators a row for each. No sync without stop rules.
    Source: Yggdrasil section 4.2; Nightjar section 4.1 has chains.
    """
    growing = [
        _Growing(model, row, shape, calibration.platt)
        for row, shape, calibration in zip(rows, choice.shapes, choice.calibrations, strict=True)
    ]
    live = [each for each in growing if each.shape.depth]
    _run_roots_(model, live)
    while live:
        live = [each for each in live if each.grow_()]
        _run_newest_(model, live)
    return [each.finished() for each in growing]


def _run_roots_(model: TokenGraphs, live: Sequence[_Growing]) -> None:
    """Run the text that the draft's KV lacks, each row's up to its root, and commit all but the root."""
    growing_of = {each.row.row: each for each in live}
    rows = [each.row for each in live]
    chunks = [Chunk(row.row, row.state.tokens[row.draft_len :], row.draft_len, 1) for row in rows]
    for batch, (tokens_NC, log_probs_NC) in run_chunks(model, chunks, _limit(model, chunks)):
        for chunk, end in zip(batch, accumulate(len(chunk.tokens) for chunk in batch), strict=True):
            # of a chunk that was split, only the last part has the root
            if chunk.read_len:
                growing_of[chunk.row].ran_(tokens_NC[end - 1 : end], log_probs_NC[end - 1 : end])
    for row in rows:
        row.draft_len = row.state.root_pos


def _run_newest_(model: TokenGraphs, live: Sequence[_Growing]) -> None:
    """Run the nodes of every tree that have not run yet."""
    for spans in _forwards(live, model.prefill_chunk):
        meta_NM = model.meta(sum(last - first for _, first, last in spans))
        end = 0
        for growing, first, last in spans:
            start = end
            end += last - first
            row = growing.row
            pack_nodes_(meta_NM[start:end], growing.tree, first, last, row.state.root_pos, row=row.row)
        pad_(meta_NM, end)
        tokens_NC, log_probs_NC = model.forward(meta_NM)
        end = 0
        for growing, first, last in spans:
            start = end
            end += last - first
            growing.ran_(tokens_NC[start:end], log_probs_NC[start:end])


def _forwards(live: Sequence[_Growing], limit: int) -> Iterator[list[_Span]]:
    """The trees' newest nodes by forwards of at most `limit`; a tree's are split only if they are more."""
    spans: list[_Span] = []
    room = limit
    for growing in live:
        num_nodes = len(growing.tree)
        for first in range(growing.num_run, num_nodes, limit):
            last = min(first + limit, num_nodes)
            if last - first > room:
                yield spans
                spans = []
                room = limit
            spans.append(_Span(growing, first, last))
            room -= last - first
    if spans:
        yield spans
