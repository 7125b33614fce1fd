"""Commit: add the accepted path to the text and to both KV caches; drop the rest of the tree."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from yggdrasil.models.protocol import TokenModel
from yggdrasil.state import DecodeState
from yggdrasil.step.accept import Accepted
from yggdrasil.step.prune import Pruned

__all__ = ["commit_", "commit_draft_", "commit_text_", "roll_back_unfinished_"]


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

    The target has KV for every verified node. The draft has KV for the nodes it ran: all but those of the
    last growth step. So the tail of the path may be left to the next head draft.

    Args:
        num_run: Nodes of the drafted tree that the draft ran.
        hidden_KE: (K, E) the target's last hidden states.

    Cost: one gather and scatter per model whose path is not a chain already.

    An error or a cancelled request loses this step, never the text before it: committed KV is not changed.
    """
    target.cache.commit_(accepted.path)
    commit_draft_(draft, pruned, accepted, num_run)
    commit_text_(state, accepted, hidden_KE)


def commit_draft_(draft: TokenModel, pruned: Pruned, accepted: Accepted, num_run: int) -> None:
    """Keep the nodes of the path that the draft ran: the first `num_run` of the drafted tree."""
    drafted = [pruned.drafted_node[node] for node in accepted.path]
    draft.cache.commit_([node for node in drafted if node < num_run])


def commit_text_(state: DecodeState, accepted: Accepted, hidden_KE: Tensor) -> None:
    """Extend the text; keep the last accepted token's hidden state for the next choice of a shape."""
    state.hidden_of = partial(hidden_KE.select, 0, accepted.path[-1])
    state.tokens.extend(accepted.tokens)
    state.head = None


def roll_back_unfinished_(target: TokenModel, draft: TokenModel, root_pos: int) -> None:
    """Drop KV that an interrupted step committed beyond the text."""
    target.cache.rollback_(min(target.cache.len, root_pos))
    draft.cache.rollback_(min(draft.cache.len, root_pos))
