"""Commit: make the accepted path history in both models and in the text; everything else of the tree is forgotten."""

from __future__ import annotations

from yggdrasil.models.protocol import TokenModel
from yggdrasil.state import DecodeState, Shape
from yggdrasil.step.accept import Accepted
from yggdrasil.step.prune import Pruned

__all__ = ["commit_"]


def commit_(state: DecodeState, target: TokenModel, draft: TokenModel, pruned: Pruned, accepted: Accepted, shape: Shape) -> None:
    """Commit one step.

    The target has KV for every verified node. The draft has it for the nodes it ran: all but the last growth step's, so
    the tail of the path may stay behind for the next head draft.

    Cost: one gather and scatter per model whose path is not a chain already. Until it returns, the committed history of
    both caches is what it was: an error or a cancelled request loses the step, never the text before it.
    """
    target.cache.commit_(accepted.path)
    if shape.depth > 0:
        num_run = shape.num_nodes - shape.width
        drafted = [pruned.drafted_node[node] for node in accepted.path]
        draft.cache.commit_([node for node in drafted if node < num_run])
    state.tokens.extend(accepted.tokens)
