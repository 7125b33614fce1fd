"""Verify: one forward of the target over the tree's nodes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from yggdrasil.models.packing import pack_chain_, pack_nodes_
from yggdrasil.models.protocol import TokenModel
from yggdrasil.tree import TokenTree

__all__ = ["verify"]


def verify(model: TokenModel, tree: TokenTree, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The target's logits, (K, V), and last hidden states, (K, E), after every node.

    Args:
        model: The target; the nodes' KV is provisional.
        tree: K nodes, whose root is the last of the tokens.
        tokens: The text. Tokens before the root that the cache lacks (the end of a prompt) run in the same
            forward and are committed.

    Raises:
        CapacityError: the cache cannot hold both the text and the nodes.
        ShapeNotCompiled: more nodes than the menu's widest graph.

    Cost: one graph. Aliasing: on CUDA the outputs are overwritten by the next replay of the same graph.
    """
    root_pos = len(tokens) - 1
    lagging = tokens[model.cache.len : root_pos]
    first = len(lagging)
    last = len(lagging) + len(tree)
    model.cache.reserve(last)
    meta_NM = model.meta(last)
    if lagging:
        pack_chain_(meta_NM[:first], lagging, model.cache.len, num_read=0)
    pack_nodes_(meta_NM[first:], tree, 0, len(tree), root_pos)
    outputs = model.forward(meta_NM)
    if lagging:
        model.cache.commit_(range(first))
    # nothing to cut off: right after a pass over the weights a slice takes some 30 us
    if len(meta_NM) == len(tree):
        return outputs
    logits_NV, hidden_NE = outputs
    return logits_NV[first:last], hidden_NE[first:last]
