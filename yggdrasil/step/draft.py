"""Draft: catch the draft model up with the committed text, then grow an equal-growth tree."""

from __future__ import annotations

import torch
from torch import Tensor

from yggdrasil.models.packing import pack_chain_, pack_nodes_
from yggdrasil.models.protocol import TokenModel
from yggdrasil.state import DecodeState, Shape
from yggdrasil.tree import TokenTree

__all__ = ["Frontier", "draft", "grow_fused_", "grow_plain_", "prefill"]


class Frontier:
    """The candidate children of every node drafted so far; growing takes the best and strikes them out.

    Args:
        num_nodes: Most nodes whose children it will hold.
        num_candidates: C, children known per node.
        device: Where the arrays live.

    Attributes:
        log_prob_NC: Path log-probability of every candidate, -inf once taken.
        token_NC: Its token.
        len: Nodes entered.
    """

    def __init__(self, num_nodes: int, num_candidates: int, device: str = "cpu") -> None:
        self.log_prob_NC = torch.full((num_nodes, num_candidates), -torch.inf, device=device)
        self.token_NC = torch.zeros(num_nodes, num_candidates, dtype=torch.int64, device=device)
        self.len = 0

    def add(self, tokens_WC: Tensor, log_probs_WC: Tensor, path_log_prob_W: Tensor) -> None:
        """Enter the children of the next W nodes, (W, C), with their parents' path log-probabilities, (W,)."""
        new = slice(self.len, self.len + len(path_log_prob_W))
        torch.add(log_probs_WC[: len(path_log_prob_W)], path_log_prob_W[:, None], out=self.log_prob_NC[new])
        self.token_NC[new] = tokens_WC[: len(path_log_prob_W)]
        self.len = new.stop

    def take(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `width` best (parent, token, path log-probability) among all nodes so far, best first; struck out.

        Source: Yggdrasil section 4.2: attach W leaves anywhere, by generation probabilities. Departure: of each node only
        its C best children are candidates, C being at least W.
        """
        log_prob_M = self.log_prob_NC[: self.len].view(-1)
        best = log_prob_M.topk(width)
        log_prob_M[best.indices] = -torch.inf
        return best.indices // self.token_NC.shape[1], self.token_NC.view(-1)[best.indices], best.values


def grow_plain_(frontier: Frontier, tree: TokenTree, tokens_WC: Tensor, log_probs_WC: Tensor, width: int, meta_NM: Tensor, root_pos: int) -> None:
    """One growth step, operator by operator: the specification of `ygg::grow_`, and what runs on CUDA.

    Args:
        frontier: Gets the children of the nodes that were just run, loses the ones taken.
        tree: Gets `width` nodes.
        tokens_WC: Candidates of the nodes that were just run.
        log_probs_WC: Their log-probabilities.
        width: W.
        meta_NM: Filled for a forward over the new nodes.
        root_pos: Position of the root.

    Cost: about two dozen small operators; no sync.
    """
    frontier.add(tokens_WC, log_probs_WC, tree.log_prob_N[frontier.len :])
    first = len(tree)
    tree.grow(*frontier.take(width))
    pack_nodes_(meta_NM, tree, first, len(tree), root_pos)


def grow_fused_(frontier: Frontier, tree: TokenTree, tokens_WC: Tensor, log_probs_WC: Tensor, width: int, meta_NM: Tensor, root_pos: int) -> None:
    """`grow_plain_` in one host call, for a CPU: a dozen operators cost more than the draft's forward."""
    known, num_new = frontier.len, len(tree) - frontier.len
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
        )
    frontier.len += num_new


def prefill(model: TokenModel, tokens: list[int]) -> None:
    """Run committed tokens that the model's KV lacks, in chunks, and commit them."""
    while model.cache.len < len(tokens):
        start = model.cache.len
        chunk = tokens[start : start + model.prefill_chunk]
        meta_NM = model.meta(len(chunk))
        pack_chain_(meta_NM, chunk, start)
        model.forward(meta_NM)
        model.cache.commit_(range(len(chunk)))


def draft(model: TokenModel, state: DecodeState, shape: Shape) -> TokenTree:
    """An equal-growth tree of 1 + W * D nodes under the last token.

    The head draft runs the root together with the committed tokens the draft has not seen: the tail that the last
    acceptance left, or everything emitted while speculation was off. Then D growth steps attach W nodes each; the last
    step's nodes are leaves and their forward is left to the next head draft.

    Args:
        model: The draft; its cache is caught up to the root's position, tree nodes are provisional.
        state: The request.
        shape: W and D; D = 0 touches no model.

    Raises:
        CapacityError: the cache cannot hold the tree beside the text.

    Cost: 1 + (D - 1) forwards and D selections; no sync. The head draft is one forward of width two when one token lags.
    Source: Yggdrasil section 4.2 and 5.1 (plain head and tail draft).
    """
    tree = TokenTree.root(state.tokens[-1], shape.num_nodes, max_depth=model.max_depth, device=model.device)
    if shape.depth == 0:
        return tree
    prefill(model, state.tokens[: max(model.cache.len, state.root_pos + 1 - model.prefill_chunk)])
    frontier = Frontier(shape.num_nodes, model.num_candidates, model.device)
    grow_ = grow_fused_ if model.device == "cpu" else grow_plain_
    meta_NM = model.meta(shape.width)
    tokens_NC, log_probs_NC = _head(model, state)
    model.cache.reserve(shape.num_nodes)
    for step in range(shape.depth):
        grow_(frontier, tree, tokens_NC, log_probs_NC, shape.width, meta_NM, state.root_pos)
        if step < shape.depth - 1:
            tokens_NC, log_probs_NC = model.forward(meta_NM)
    return tree


def _head(model: TokenModel, state: DecodeState) -> tuple[Tensor, Tensor]:
    """The root's candidates, (1, C) each; commits the lagging tokens, leaves the root provisional."""
    lag = model.cache.len
    chain = state.tokens[lag:]
    meta_NM = model.meta(len(chain))
    pack_chain_(meta_NM, chain, lag)
    tokens_NC, log_probs_NC = model.forward(meta_NM)
    model.cache.commit_(range(len(chain) - 1))
    return tokens_NC[len(chain) - 1 : len(chain)], log_probs_NC[len(chain) - 1 : len(chain)]
