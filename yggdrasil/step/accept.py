"""Accept: walk down the tree while the target says what the draft guessed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.step.sampling import next_tokens
from yggdrasil.tree import TokenTree

__all__ = ["Accepted", "accept", "follow", "next_positions"]


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
    return follow(tree, next_tokens(logits_KV, next_positions(tree, root_pos, sampling), sampling))


def next_positions(tree: TokenTree, root_pos: int, sampling: SamplingConfig) -> list[int]:
    """Where the token after every node stands; greedy decoding does not ask."""
    return [] if sampling.temperature == 0 else [root_pos + 1 + depth for depth in tree.depth_N.tolist()]  # sync: noise is drawn on the host


def follow(tree: TokenTree, said_K: Tensor) -> Accepted:
    """The path on which the tree says what the target said, (K,), and the tokens that are emitted. Cost: one sync."""
    path, said = tree.walk(said_K), said_K.tolist()
    return Accepted(path, [said[node] for node in path])
