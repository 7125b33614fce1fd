"""Verify: one forward of the target over the tree's nodes."""

from __future__ import annotations

from torch import Tensor

from yggdrasil.models.packing import pack_nodes_
from yggdrasil.models.protocol import TokenModel
from yggdrasil.tree import TokenTree

__all__ = ["verify"]


def verify(model: TokenModel, tree: TokenTree, root_pos: int) -> tuple[Tensor, Tensor]:
    """The target's logits, (K, V), and last hidden states, (K, E), after every node.

    Args:
        model: The target, its cache committed up to `root_pos`; the nodes' KV is provisional.
        tree: K nodes.
        root_pos: Position of the root.

    Raises:
        CapacityError: the cache cannot hold the nodes beside the text.
        ShapeNotCompiled: more nodes than the menu's widest graph.

    Cost: one graph. Aliasing: on CUDA the outputs are overwritten by the next replay of the same graph.
    """
    model.cache.reserve(len(tree))
    meta_NM = model.meta(len(tree))
    pack_nodes_(meta_NM, tree, 0, len(tree), root_pos)
    logits_NV, hidden_NE = model.forward(meta_NM)
    return logits_NV[: len(tree)], hidden_NE[: len(tree)]
