"""The draft's half of the step: catch up with the texts, then grow a tree under every root.

Shapes: X = hidden features or candidates, M = candidates of a forward, or of all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.kernels.grafting import graft
from yggdrasil.models.packing import Chunk, pack_chain_, pack_chains_, pack_nodes_, pad_
from yggdrasil.models.protocol import TokenGraphs, TokenModel
from yggdrasil.staging import upload
from yggdrasil.state import DecodeState, Row, Shape
from yggdrasil.step.choice import Choice
from yggdrasil.step.coupling import coupled, is_ranked_again, noise_of, read_of
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.step.processors import allowed_after, paths_of, prefixes_of, process_candidates
from yggdrasil.text.repeats import MIN_EDGE, NO_GRAFT, Graft
from yggdrasil.tree import TokenTree

__all__ = [
    "Frontier",
    "RowDraft",
    "Span",
    "catch_up_rows_",
    "draft_rows",
    "grown",
    "num_candidates",
    "prefill",
    "root_of",
    "run_chunks",
    "run_nodes",
]

MOST_WIDEST_FORWARDS = 3  # up to 3 replays of the draft's widest graph cost less than its prompt chunk


@dataclass(frozen=True)
class RowDraft:
    """What one row drafted.

    Args:
        num_run: The first `num_run` nodes have KV in the draft's cache.
        shape: The grown shape; a stop rule may have made it less deep.
    """

    tree: TokenTree
    num_run: int
    shape: Shape


class Frontier:
    """The candidate children of all drafted nodes. Growing takes the best ones and removes them.

    Args:
        num_nodes: Largest number of nodes whose children it holds.
        num_candidates: C, children kept per node: the best of those that a forward returns.
        platt: Scale of the draft's probabilities.

    Attributes:
        log_prob_NC: Path log-probability of every candidate, edges scaled, -inf once taken. The first `len`
            rows are filled.
        token_NC: Token of every candidate.
        len: Number of filled rows.
    """

    def __init__(
        self, num_nodes: int, num_candidates: int, device: str = "cpu", platt: PlattScale = UNSCALED
    ) -> None:
        self.platt = platt
        self.log_prob_NC = torch.empty(num_nodes, num_candidates, device=device)
        self.token_NC = torch.empty(num_nodes, num_candidates, dtype=torch.int64, device=device)
        self.len = 0

    def add(self, tokens_WC: Tensor, log_probs_WC: Tensor, path_log_prob_W: Tensor) -> None:
        """Add the children of the next W nodes, (W, C), given the nodes' path log-probabilities, (W,)."""
        new = slice(self.len, self.len + len(path_log_prob_W))
        kept = self.token_NC.shape[1]
        torch.add(
            self.platt.logs(log_probs_WC[: len(path_log_prob_W), :kept]),
            path_log_prob_W[:, None],
            out=self.log_prob_NC[new],
        )
        self.token_NC[new] = tokens_WC[: len(path_log_prob_W), :kept]
        self.len = new.stop

    def add_grafted(
        self, tokens_WC: Tensor, log_probs_WC: Tensor, next_W: Tensor, log_next_W: Tensor, path: Tensor
    ) -> Tensor:
        """Add the children of the next W nodes of a grafted chain, (W, C).

        The chain's next node is not added: it is in the tree. Its probability is the draft's or that of the
        repetition, whichever is larger; then its siblings share what remains.

        Args:
            next_W: The chain's token after each node, int64; -1 after its end.
            log_next_W: float64 log-probability of each that the repetition gives; -inf after the end.
            path: float64 path log-probability of the first of these nodes, one element.

        Returns:
            The path log-probabilities of these nodes and of the next one, (W + 1,) float64.
        """
        new = slice(self.len, self.len + len(next_W))
        kept = self.token_NC.shape[1]
        tokens_WC = tokens_WC[: len(next_W), :kept]
        edges_WC = self.platt.logs(log_probs_WC[: len(next_W), :kept]).double()
        is_next_WC = tokens_WC == next_W[:, None]
        drafted_W = edges_WC.masked_fill(~is_next_WC, -torch.inf).amax(dim=1)
        rest_W = (-log_next_W.exp()).log1p() - (-drafted_W.exp()).log1p()
        edges_WC = edges_WC + rest_W.masked_fill(log_next_W <= drafted_W, 0.0)[:, None]
        paths = torch.cat((path, log_next_W.maximum(drafted_W))).cumsum(0)
        self.log_prob_NC[new] = (edges_WC + paths[:-1, None]).masked_fill(is_next_WC, -torch.inf)
        self.token_NC[new] = tokens_WC
        self.len = new.stop
        return paths

    def take(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Remove and return the `width` best (parent, token, path log-probability), best first.

        Of equal ones the children of the earlier node come first, then the better child.

        Source: Yggdrasil section 4.2: attach W leaves anywhere, by generation probabilities. Departures:
        the probabilities are scaled, see `PlattScale`; only the C best children of a node are candidates, C
        being at least W.
        """
        log_prob_M = self.log_prob_NC[: self.len].view(-1)
        if width > len(log_prob_M):
            raise RuntimeError(f"{width} nodes of {len(log_prob_M)} candidates")
        ranked = log_prob_M.sort(descending=True, stable=True)
        best_W = ranked.indices[:width]
        # an assignment by index would copy the number from the host, which is a sync
        log_prob_M.scatter_(0, best_W, -torch.inf)
        return best_W // self.token_NC.shape[1], self.token_NC.view(-1)[best_W], ranked.values[:width]

    def ranked(self, level: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """The same for the given (parent, rank) places of a static tree; nothing is removed."""
        parents, ranks = upload(level, self.token_NC.device).T
        return parents, self.token_NC[parents, ranks], self.log_prob_NC[parents, ranks]


def num_candidates(model: TokenGraphs, shape: Shape) -> int:
    """How many children of a node may be attached; in a chain only the best."""
    return 1 if shape.width == 1 and shape.levels is None else model.num_candidates


def grown(shape: Shape, depth: int) -> Shape:
    """The shape with the depth at which a stop rule or a long graft ended growth."""
    is_whole = shape.stop is None and depth == shape.depth
    return shape if is_whole else _shape(shape.width, depth, shape.verify)


_shape = lru_cache(maxsize=256)(Shape)


def prefill(model: TokenModel, tokens: list[int]) -> Tensor | None:
    """Run committed tokens that the only row's KV lacks, in chunks, and commit them.

    Returns:
        The last forward's second output for the last token: a target's hidden state, (E,). None if the KV
        lacked no token.
        Aliasing: on CUDA overwritten by the next replay.
    """
    last = None
    while model.cache.len < len(tokens):
        start = model.cache.len
        chunk = tokens[start : start + model.prefill_chunk]
        meta_NM = model.meta(len(chunk))
        pack_chain_(meta_NM, chunk, start, num_read=0)
        _, second_NX = model.forward(meta_NM)
        last = second_NX[len(chunk) - 1]
        model.cache.commit_(range(len(chunk)))
    return last


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


# ---- trees ----


def root_of(model: TokenGraphs, row: Row, capacity: int = 1) -> TokenTree:
    """The tree of a row's last token."""
    token = row.state.tokens[-1]
    return TokenTree.root(token, capacity, max_depth=model.max_depth, device=model.device)


class Span(NamedTuple):
    """Nodes `first..last-1` of a row's tree, which run in one forward."""

    row: Row
    tree: TokenTree
    first: int
    last: int

    @property
    def num_nodes(self) -> int:
        return self.last - self.first


def run_nodes(model: TokenGraphs, spans: Sequence[Span]) -> Iterator[tuple[Span, Tensor, Tensor]]:
    """Run the draft over nodes of several trees; their KV is provisional.

    Args:
        spans: The nodes of one tree are split only if they are more than the largest graph holds.

    Yields:
        Every span or part of one, with the candidates of its nodes and their log-probabilities, (n, M)
        each. Aliasing: on CUDA overwritten by the next replay.

    Cost: one graph for as many trees as it holds.
    """
    for batch in _forwards(spans, model.prefill_chunk):
        meta_NM = model.meta(sum(span.num_nodes for span in batch))
        end = 0
        for span in batch:
            start = end
            end += span.num_nodes
            row = span.row
            pack_nodes_(
                meta_NM[start:end],
                span.tree,
                span.first,
                span.last,
                row.state.root_pos,
                row=row.row,
                read=read_of(row.state.sampling),
            )
        pad_(meta_NM, end)
        tokens_NC, log_probs_NC = model.forward(meta_NM)
        end = 0
        for span in batch:
            start = end
            end += span.num_nodes
            yield span, tokens_NC[start:end], log_probs_NC[start:end]


def _forwards(spans: Sequence[Span], limit: int) -> Iterator[list[Span]]:
    """The spans by forwards of at most `limit` nodes."""
    batch: list[Span] = []
    room = limit
    for span in spans:
        for first in range(span.first, span.last, limit):
            part = span._replace(first=first, last=min(first + limit, span.last))
            if part.num_nodes > room:
                yield batch
                batch = []
                room = limit
            batch.append(part)
            room -= part.num_nodes
    if batch:
        yield batch


def graft_of(model: TokenGraphs, state: DecodeState, shape: Shape) -> Graft:
    """What a step grafts on a text's root: tokens that its grammar forces, or else those that may repeat.

    A path has room for them, a growth step and a head draft.
    """
    most = min(shape.graft, model.max_depth - 2)
    if most <= 0:
        return NO_GRAFT
    if state.grammar is not None:
        state.grammar.follow_(state.emitted)
        if forced := state.grammar.forced(most):
            return Graft(forced, (0.0,) * len(forced))
    state.repeats.follow_(state.tokens)
    return graft(state.repeats, most, MIN_EDGE if shape.depth else 0.0)


class _Growing:
    """A row's tree while it grows, the root first, then what is grafted.

    Attributes:
        tree: The nodes so far.
        graft: The chain of its first nodes.
    """

    def __init__(
        self, model: TokenGraphs, row: Row, shape: Shape, platt: PlattScale, *, capacity: int, vocab: int
    ) -> None:
        state = row.state
        self.row = row
        self.shape = shape
        self.tree = root_of(model, row, capacity)
        self.graft = graft_of(model, state, shape)
        num_grafted = len(self.graft.tokens)
        self._last_depth = shape.depth
        if num_grafted:
            self._last_depth = min(shape.depth, model.max_depth - 1 - num_grafted)
            self.tree.grow_chain(self.graft.tokens, self.graft.log_probs)
            self._next_N = upload([*self.graft.tokens, -1], model.device)
            self._log_next_N = upload([*self.graft.log_probs, -math.inf], model.device, dtype=torch.float64)
            self._path_1 = torch.zeros(1, dtype=torch.float64, device=model.device)
        self._depth = 0
        self._vocab = vocab
        self._noise_DV: Tensor | None = None
        if shape.depth and state.sampling.temperature > 0:
            positions = range(state.root_pos + 1, state.root_pos + 1 + num_grafted + shape.depth)
            self._noise_DV = noise_of(state.sampling, positions, vocab, model.device)
        self._frontier = Frontier(shape.num_nodes, num_candidates(model, shape), model.device, platt)

    @property
    def newest(self) -> Span:
        """The nodes whose candidates are not known yet."""
        return Span(self.row, self.tree, self._frontier.len, len(self.tree))

    def record_forward_(self, tokens_WM: Tensor, log_probs_WM: Tensor) -> None:
        """The next W nodes have run. Aliasing: the candidates are copied."""
        frontier = self._frontier
        nodes = slice(frontier.len, frontier.len + len(tokens_WM))
        if is_ranked_again(self.row.state.sampling):
            tokens_WM, log_probs_WM = self._ranked_again(nodes, tokens_WM, log_probs_WM)
        if self.graft.tokens and nodes.start <= len(self.graft.tokens):
            self._record_grafted_(nodes, tokens_WM, log_probs_WM)
        else:
            frontier.add(tokens_WM, log_probs_WM, self.tree.log_prob_N[nodes])

    def _record_grafted_(self, nodes: slice, tokens_WM: Tensor, log_probs_WM: Tensor) -> None:
        """Nodes of the graft, or the root before it, have run: the draft's opinion of the chain counts."""
        paths = self._frontier.add_grafted(
            tokens_WM, log_probs_WM, self._next_N[nodes], self._log_next_N[nodes], self._path_1
        )
        self._path_1 = paths[-1:]
        last = min(nodes.stop, len(self.graft.tokens))
        self.tree.log_prob_N[nodes.start + 1 : last + 1] = paths[1 : last - nodes.start + 1]

    def _ranked_again(self, nodes: slice, tokens_WM: Tensor, log_probs_WM: Tensor) -> tuple[Tensor, Tensor]:
        """The best candidates after processors and noise."""
        state = self.row.state
        if state.sampling.processors is not None:
            allowed_WV = None
            if state.grammar is not None:
                allowed_WV = allowed_after(paths_of(self.tree, nodes), state, tokens_WM.device.type)
            tokens_WM, log_probs_WM = process_candidates(
                tokens_WM,
                log_probs_WM,
                prefixes_of(self.tree, nodes, state, allowed_WV),
                state.sampling.processors,
                top_logit=state.top_logit,
                vocab=self._vocab,
            )
        noise_WM = torch.zeros_like(log_probs_WM)
        if self._noise_DV is not None:
            noise_WM = self._noise_DV[self.tree.depth_N[nodes, None].long(), tokens_WM]
        count = self._frontier.token_NC.shape[1]
        return coupled(tokens_WM, log_probs_WM, noise_WM, state.sampling, count)

    def grow_(self) -> bool:
        """Attach the nodes of one growth step; returns whether another step follows."""
        levels = self.shape.levels
        if levels is None:
            picked = self._frontier.take(self.shape.width)
        else:
            picked = self._frontier.ranked(levels[self._depth])
        self.tree.grow(*picked)
        self._depth += 1
        if self._depth == self._last_depth:
            return False
        return levels is not None or self.shape.stop is None or not self.shape.stop.enough(self.tree)

    def finished(self) -> RowDraft:
        shape = self.shape if self.shape.levels is not None else grown(self.shape, self._depth)
        return RowDraft(self.tree, self._frontier.len, shape)


def draft_rows(
    model: TokenGraphs, rows: Sequence[Row], choice: Choice, *, vocab: int, spare: int = 1
) -> list[RowDraft]:
    """A tree under every row's root: one forward over the text up to the roots, then growth.

    Sampled text couples the candidates with the target's noise, see step/coupling.py. What repeats an
    earlier part of the text is grafted on the root before growth (`Shape.graft`). It runs in the forward of
    the root.

    With W = 1 a node has one candidate, its best child: the tree is a chain. The nodes of a row's last
    growth step are leaves: the next step runs their forward. A row whose root ran ahead of time
    (`DecodeState.head`) grows at once.

    Args:
        model: The draft. Its KV becomes complete up to the roots of the rows that draft; from the roots on
            it is provisional.
        rows: Rows with pages for their trees. A row of a shape without depth runs no model; its tree is
            what repeats the text.
        choice: A shape and a calibration for every row.
        spare: Room of a tree as a multiple of its nodes.

    Raises:
        RuntimeError: a shape wider than the draft's candidates, or deeper than its paths.

    Cost: 1 + (max(D) - 1) forwards, more if one graph does not hold the nodes of all rows, and a dozen
    small operators a row for each. No sync without stop rules.
    Source: Yggdrasil section 4.2; Nightjar section 4.1 has chains.
    """
    growing = [
        _Growing(model, row, shape, calibration.platt, capacity=spare * shape.num_nodes, vocab=vocab)
        for row, shape, calibration in zip(rows, choice.shapes, choice.calibrations, strict=True)
    ]
    live = [each for each in growing if each.shape.depth]
    _run_roots_(model, live)
    # after a root that ran ahead of time
    _run_newest_(model, [each for each in live if each.newest.num_nodes])
    while live:
        live = [each for each in live if each.grow_()]
        _run_newest_(model, live)
    return [each.finished() for each in growing]


def _run_newest_(model: TokenGraphs, live: Sequence[_Growing]) -> None:
    """Run the nodes whose candidates are not known yet."""
    tree_of = {id(each.tree): each for each in live}
    for span, tokens_WM, log_probs_WM in run_nodes(model, [each.newest for each in live]):
        tree_of[id(span.tree)].record_forward_(tokens_WM, log_probs_WM)


def _run_roots_(model: TokenGraphs, live: Sequence[_Growing]) -> None:
    """Run the text that the draft's KV lacks, up to each root and its graft; commit it up to the roots."""
    without_head = {each.row.row: each for each in live if not _use_head_(each)}
    rows = [each.row for each in without_head.values()]
    chunks = []
    for each in without_head.values():
        row = each.row
        tokens = [*row.state.tokens[row.draft_len :], *each.graft.tokens]
        chunks.append(Chunk(row.row, tokens, row.draft_len, len(each.tree), read_of(row.state.sampling)))
    for batch, (tokens_NC, log_probs_NC) in run_chunks(model, chunks, _limit(model, chunks)):
        for chunk, end in zip(batch, accumulate(len(chunk.tokens) for chunk in batch), strict=True):
            # of a chunk that was split, the first parts may end before the root
            if chunk.read_len:
                nodes = slice(end - chunk.read_len, end)
                without_head[chunk.row].record_forward_(tokens_NC[nodes], log_probs_NC[nodes])
    for row in rows:
        row.draft_len = row.state.root_pos


def _use_head_(growing: _Growing) -> bool:
    """Take the root's candidates that were drafted ahead of time, if there are any."""
    row = growing.row
    head = row.state.head
    # dropped in any case, so an interrupted step leaves none
    row.state.head = None
    if head is None or not head.root_pos == row.state.root_pos == row.draft_len:
        return False
    growing.record_forward_(head.tokens_1M, head.log_probs_1M)
    return True
