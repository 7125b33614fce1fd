"""Draft: let the draft model catch up with the committed text, then grow an equal-growth tree.

Shapes: X = hidden features or candidates, M = metadata columns or candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.models.packing import pack_chain_, pack_nodes_
from yggdrasil.models.protocol import TokenGraphs, TokenModel
from yggdrasil.staging import upload
from yggdrasil.state import DecodeState, Head, Row, Shape
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.tree import TokenTree

__all__ = [
    "NEVER",
    "Drafted",
    "Frontier",
    "catch_up_",
    "draft",
    "grow",
    "grow_fused_",
    "grow_reference_",
    "grown",
    "head_draft",
    "num_candidates",
    "prefill",
    "row_of",
    "run_nodes",
]

# the value of `StopRule.native` for a rule that never stops growth
NEVER = torch.empty(0, dtype=torch.float64), -math.inf


@dataclass(frozen=True)
class Drafted:
    """A drafted tree.

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

    def take(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Remove and return the `width` best (parent, token, path log-probability), best first.

        Source: Yggdrasil section 4.2: attach W leaves anywhere, by generation probabilities. Departures:
        the probabilities are scaled, see `PlattScale`; only the C best children of a node are candidates, C
        being at least W.
        """
        log_prob_M = self.log_prob_NC[: self.len].view(-1)
        best = log_prob_M.topk(width)
        # an assignment by index would copy the number from the host, which is a sync
        log_prob_M.scatter_(0, best.indices, -torch.inf)
        return best.indices // self.token_NC.shape[1], self.token_NC.view(-1)[best.indices], best.values

    def ranked(self, level: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """The same for the given (parent, rank) places of a static tree; nothing is removed."""
        parents, ranks = upload(level, self.token_NC.device).T
        return parents, self.token_NC[parents, ranks], self.log_prob_NC[parents, ranks]


def grow_reference_(
    frontier: Frontier,
    tree: TokenTree,
    tokens_WC: Tensor,
    log_probs_WC: Tensor,
    width: int,
    meta_NM: Tensor,
    root_pos: int,
) -> None:
    """One growth step, operator by operator: the specification of `ygg::grow_`; on CUDA this runs.

    Args:
        frontier: The children of the nodes that just ran are added; the attached ones are removed.
        tree: `width` nodes are attached.
        tokens_WC: Candidates of the nodes that just ran.
        meta_NM: Filled for a forward over the new nodes.

    Raises:
        RuntimeError: fewer candidates than `width`, or a path longer than the tree allows; then the tree's
            length is unchanged.

    Cost: about two dozen small operators; no sync.
    """
    frontier.add(tokens_WC, log_probs_WC, tree.log_prob_N[frontier.len :])
    first = len(tree)
    tree.grow(*frontier.take(width))
    pack_nodes_(meta_NM, tree, first, len(tree), root_pos)


def grow_fused_(
    frontier: Frontier,
    tree: TokenTree,
    tokens_WC: Tensor,
    log_probs_WC: Tensor,
    width: int,
    meta_NM: Tensor,
    root_pos: int,
) -> None:
    """`grow_reference_` in one host call, for a CPU: a dozen operators cost more than a forward."""
    known = frontier.len
    num_new = len(tree) - frontier.len
    with tree.growing(width) as (first, token, parent, depth, log_prob, path):
        torch.ops.ygg.grow_(
            frontier.log_prob_NC,
            frontier.token_NC,
            log_probs_WC,
            tokens_WC,
            known,
            num_new,
            token,
            parent,
            depth,
            log_prob,
            path,
            first,
            width,
            meta_NM,
            root_pos,
            frontier.platt.slope,
            frontier.platt.offset,
        )
    frontier.len += num_new


def row_of(state: DecodeState, target: TokenModel, draft: TokenModel) -> Row:
    """The only row of two caches."""
    return Row(0, state, target.cache.len, draft.cache.len)


def prefill(model: TokenModel, tokens: list[int]) -> Tensor | None:
    """Run committed tokens that the model's KV lacks, in chunks, and commit them.

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


def catch_up_(model: TokenModel, state: DecodeState) -> bool:
    """Run one chunk of the text that the draft's KV lacks, if the head draft cannot run it in one forward.

    A draft lags that far after many steps of plain decoding. It catches up over several steps, so no single
    step stalls.

    Returns:
        Whether a chunk ran. This step then decodes without speculation.
    """
    if state.root_pos - model.cache.len < model.prefill_chunk:
        return False
    prefill(model, state.tokens[: model.cache.len + model.prefill_chunk])
    return True


def draft(model: TokenModel, state: DecodeState, shape: Shape, platt: PlattScale = UNSCALED) -> Drafted:
    """A tree under the last token: head draft, then growth.

    Args:
        model: The draft; its cache becomes complete up to the root, tree nodes are provisional.
        shape: W and D; D = 0 runs no model.
        platt: Scale of the draft's probabilities.

    Raises:
        CapacityError: the cache cannot hold both the text and the tree.

    Cost: 1 + (D - 1) forwards and D selections; no sync. The head draft is one forward of width two when
    one token lags.
    Source: Yggdrasil section 4.2 and 5.1 (head and tail draft, neither ahead of time).
    """
    if shape.depth == 0:
        return Drafted(_root(model, state.tokens[-1], 1), 0, shape)
    return grow(model, state, shape, head_draft(model, state), platt)


def _root(model: TokenModel, token: int, capacity: int) -> TokenTree:
    if model.device == "cpu":  # allocates five arrays in one call
        return TokenTree.of(*torch.ops.ygg.root(token, capacity, model.max_depth + 1), length=1)
    return TokenTree.root(token, capacity, max_depth=model.max_depth, device=model.device)


def head_draft(model: TokenModel, state: DecodeState) -> Head:
    """The root's candidates; commits the lagging tokens before the root, leaves the root provisional.

    Lagging tokens are the tail of the last accepted path, or text emitted while speculation was off.

    Source: Yggdrasil section 5.1: head and tail draft in one forward.
    """
    prefill(model, state.tokens[: max(model.cache.len, state.root_pos + 1 - model.prefill_chunk)])
    lag = model.cache.len
    chain = state.tokens[lag:]
    meta_NM = model.meta(len(chain))
    pack_chain_(meta_NM, chain, lag, num_read=1)
    tokens_NC, log_probs_NC = model.forward(meta_NM)
    model.cache.commit_(range(len(chain) - 1))
    return Head(state.root_pos, tokens_NC, log_probs_NC, len(chain) - 1)


def grow(
    model: TokenModel,
    state: DecodeState,
    shape: Shape,
    head: Head,
    platt: PlattScale = UNSCALED,
    *,
    spare: int = 0,
) -> Drafted:
    """Grow a tree from the root's candidates: D steps of W nodes, or the levels of a static tree.

    With W = 1 a node has one candidate, its best child, so the tree is a chain; with more candidates
    single nodes would also be attached as siblings. The last step's nodes are leaves: the next head draft
    runs their forward.

    Args:
        model: The draft, its cache committed up to the root, the root provisional.
        platt: Scale of the draft's probabilities.
        spare: Room for this many nodes in addition to the shape's.
    """
    model.cache.reserve(shape.num_nodes)
    if shape.levels is not None:
        return _grow_levels(model, state, shape, head, platt, spare=spare)
    return _grow_equally(model, state, shape, head, platt, spare=spare)


def _grow_equally(
    model: TokenModel, state: DecodeState, shape: Shape, head: Head, platt: PlattScale, *, spare: int
) -> Drafted:
    """`grow` without levels, one forward and one selection at a time."""
    tree = _root(model, state.tokens[-1], shape.num_nodes + spare)
    frontier = Frontier(shape.num_nodes, num_candidates(model, shape), model.device, platt)
    grow_ = grow_fused_ if model.device == "cpu" else grow_reference_
    meta_NM = model.meta(shape.width)
    tokens_NC, log_probs_NC = head.candidates
    num_run = 1
    for depth in range(1, shape.depth + 1):
        grow_(frontier, tree, tokens_NC, log_probs_NC, shape.width, meta_NM, state.root_pos)
        if depth == shape.depth or (shape.stop is not None and shape.stop.enough(tree)):
            break
        tokens_NC, log_probs_NC = model.forward(meta_NM)
        num_run = len(tree)
    return Drafted(tree, num_run, grown(shape, depth))


def num_candidates(model: TokenGraphs, shape: Shape) -> int:
    """How many children of a node may be attached; in a chain only the best."""
    return 1 if shape.width == 1 and shape.levels is None else model.num_candidates


def grown(shape: Shape, depth: int) -> Shape:
    """The shape with the depth at which its stop rule ended growth."""
    return shape if shape.stop is None else Shape(shape.width, depth, shape.verify)


def _grow_levels(
    model: TokenModel, state: DecodeState, shape: Shape, head: Head, platt: PlattScale, *, spare: int
) -> Drafted:
    """A static tree, level by level."""
    assert shape.levels is not None
    tree = _root(model, state.tokens[-1], shape.num_nodes + spare)
    frontier = Frontier(shape.num_nodes, num_candidates(model, shape), model.device, platt)
    tokens_NC, log_probs_NC = head.candidates
    num_run = 1
    for depth, level in enumerate(shape.levels):
        frontier.add(tokens_NC, log_probs_NC, tree.log_prob_N[frontier.len :])
        tree.grow(*frontier.ranked(level))
        if depth < len(shape.levels) - 1:
            tokens_NC, log_probs_NC = run_nodes(model, tree, num_run, len(tree), state.root_pos)
            num_run = len(tree)
    return Drafted(tree, num_run, shape)


def run_nodes(
    model: TokenModel, tree: TokenTree, first: int, last: int, root_pos: int
) -> tuple[Tensor, Tensor]:
    """Run the draft over tree nodes `first..last-1`, in one or more forwards; their KV is provisional.

    Returns:
        Candidates and their log-probabilities, (last - first, C) each.

    Cost: one graph for every `model.widest` nodes. The results are copies.
    """
    outputs = []
    for start in range(first, last, model.widest):
        end = min(start + model.widest, last)
        meta_NM = model.meta(end - start)
        pack_nodes_(meta_NM, tree, start, end, root_pos)
        tokens_NC, log_probs_NC = model.forward(meta_NM)
        # on CUDA the next replay overwrites the outputs
        outputs.append((tokens_NC[: end - start].clone(), log_probs_NC[: end - start].clone()))
    if len(outputs) == 1:
        return outputs[0]
    tokens, log_probs = zip(*outputs, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)
