"""Accept: walk down the tree while the target says what the draft guessed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.step.sampling import next_tokens
from yggdrasil.tree import TokenTree

__all__ = ["Accepted", "accept", "follow"]


@dataclass(frozen=True)
class Accepted:
    """What the target keeps.

    Args:
        path: Nodes of the verified tree, root first.
        tokens: Emitted tokens: one for every node of the path, the last being the bonus.
    """

    path: list[int]
    tokens: list[int]


def accept(tree: TokenTree, logits_KV: Tensor, root_pos: int, sampling: SamplingConfig) -> Accepted:
    """The exact acceptance law of a deterministic tree: what the target says at a node is emitted, and followed if it is a child.

    Args:
        tree: K nodes.
        logits_KV: (K, V) of the target after each.
        root_pos: Position of the root.
        sampling: How the target chooses.

    Raises:
        YggError: logits that are not finite.

    Cost: one sync. Source: no draft probabilities enter, so the target's distribution is preserved for any tree.
    """
    return follow(tree, next_tokens(logits_KV, tree.positions(root_pos + 1), sampling))


def follow(tree: TokenTree, said_K: Tensor) -> Accepted:
    """The path on which the tree says what the target said, (K,), and the tokens that are emitted. Cost: one sync."""
    path, said = tree.walk(said_K), said_K.tolist()
    return Accepted(path, [said[node] for node in path])
