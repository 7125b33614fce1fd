"""Draft: catch the draft model up with the committed text, then grow an equal-growth tree."""

from __future__ import annotations

import torch
from torch import Tensor

from yggdrasil.models.packing import pack_chain_, pack_nodes_
from yggdrasil.models.protocol import TokenModel
from yggdrasil.state import DecodeState, Shape
from yggdrasil.tree import TokenTree

__all__ = ["Frontier", "draft", "prefill"]


class Frontier:
    """The candidate children of every node drafted so far; growing takes the best and strikes them out.

    Args:
        num_nodes: Most nodes whose children it will hold.
        num_candidates: C, children known per node.
    """

    def __init__(self, num_nodes: int, num_candidates: int, device: str = "cpu") -> None:
        self._log_prob_NC = torch.full((num_nodes, num_candidates), -torch.inf, device=device)
        self._token_NC = torch.zeros(num_nodes, num_candidates, dtype=torch.int64, device=device)
        self._len = 0

    def add(self, tokens_WC: Tensor, log_probs_WC: Tensor, path_log_prob_W: Tensor) -> None:
        """Enter the children of the next W nodes, (W, C), with their parents' path log-probabilities, (W,)."""
        new = slice(self._len, self._len + len(tokens_WC))
        torch.add(log_probs_WC, path_log_prob_W[:, None], out=self._log_prob_NC[new])
        self._token_NC[new] = tokens_WC
        self._len = new.stop

    def take(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `width` best (parent, token, path log-probability) among all nodes so far, best first; struck out.

        Source: Yggdrasil section 4.2: attach W leaves anywhere, by generation probabilities. Departure: of each node only
        its C best children are candidates, C being at least W.
        """
        log_prob_M = self._log_prob_NC[: self._len].view(-1)
        best = log_prob_M.topk(width)
        log_prob_M[best.indices] = -torch.inf
        return best.indices // self._token_NC.shape[1], self._token_NC.view(-1)[best.indices], best.values


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

    Cost: 1 + (D - 1) forwards and D selections; no sync. The head draft is one forward of width two when one token lags.
    Source: Yggdrasil section 4.2 and 5.1 (plain head and tail draft).
    """
    tree = TokenTree.root(state.tokens[-1], shape.num_nodes, max_depth=model.max_depth, device=model.device)
    if shape.depth == 0:
        return tree
    prefill(model, state.tokens[: max(model.cache.len, state.root_pos + 1 - model.prefill_chunk)])
    frontier = Frontier(shape.num_nodes, model.num_candidates, model.device)
    tokens_NC, log_probs_NC = _head(model, state)
    frontier.add(tokens_NC, log_probs_NC, tree.log_prob_N)
    for step in range(shape.depth):
        first = len(tree)
        tree.grow(*frontier.take(shape.width))
        if step < shape.depth - 1:
            meta_NM = model.meta(shape.width)
            pack_nodes_(meta_NM, tree, first, len(tree), state.root_pos)
            tokens_NC, log_probs_NC = model.forward(meta_NM)
            frontier.add(tokens_NC[: shape.width], log_probs_NC[: shape.width], tree.log_prob_N[first:])
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
