"""Commit: make the accepted path history in both models and in the text; everything else of the tree is
forgotten.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from yggdrasil.models.protocol import TokenModel
from yggdrasil.state import DecodeState
from yggdrasil.step.accept import Accepted
from yggdrasil.step.prune import Pruned

__all__ = ["commit_", "commit_draft_", "commit_text_", "forget_unfinished_"]


def commit_(
    state: DecodeState,
    target: TokenModel,
    draft: TokenModel,
    pruned: Pruned,
    accepted: Accepted,
    num_run: int,
    hidden_KE: Tensor,
) -> None:
    """Commit one step.

    The target has KV for every verified node. The draft has it for the nodes it ran: all but the last
    growth step's, so the tail of the path may stay behind for the next head draft.

    Args:
        state: The request.
        target: Its cache.
        draft: Its cache.
        pruned: The verified tree.
        accepted: The path.
        num_run: Nodes of the drafted tree that the draft ran.
        hidden_KE: (K, E) the target's last hidden states.

    Cost: one gather and scatter per model whose path is not a chain already. Until it returns, the
    committed history of both caches is what it was: an error or a cancelled request loses the step, never
    the text before it."""
    target.cache.commit_(accepted.path)
    commit_draft_(draft, pruned, accepted, num_run)
    commit_text_(state, accepted, hidden_KE)


def commit_draft_(draft: TokenModel, pruned: Pruned, accepted: Accepted, num_run: int) -> None:
    """Keep the path's nodes that the draft ran: the first `num_run` of the drafted tree."""
    drafted = [pruned.drafted_node[node] for node in accepted.path]
    draft.cache.commit_([node for node in drafted if node < num_run])


def commit_text_(state: DecodeState, accepted: Accepted, hidden_KE: Tensor) -> None:
    """Extend the text; keep the hidden state of the last accepted token for the next choice of a shape."""
    state.hidden_of = partial(hidden_KE.select, 0, accepted.path[-1])
    state.tokens.extend(accepted.tokens)
    state.head = None


def forget_unfinished_(target: TokenModel, draft: TokenModel, root_pos: int) -> None:
    """Whatever an interrupted step left in the caches is not history: the text is."""
    target.cache.rollback_(min(target.cache.len, root_pos))
    draft.cache.rollback_(min(draft.cache.len, root_pos))
