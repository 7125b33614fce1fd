"""Accept: walk down the tree while the target says what the draft guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError
from yggdrasil.step.sampling import BROKEN, Said, choose_tokens, greatest, next_token, told
from yggdrasil.tree import TokenTree

__all__ = ["Accepted", "accept", "follow", "say", "walk_sampling"]


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
    """The exact acceptance law of a deterministic tree: what the target says at a node is emitted, and
    followed if it is a child.

    Args:
        tree: K nodes.
        logits_KV: (K, V) of the target after each.
        root_pos: Position of the root.
        sampling: How the target chooses.

    Raises:
        YggError: logits that are not finite.

    Cost: one sync. On a CPU, noise is drawn and logits are filtered only where the walk passes.
    Source: no draft probabilities enter, so the target's distribution is preserved for any tree.
    """
    if tree.is_cpu and sampling.temperature > 0:
        places = enumerate(zip(tree.parent_N.tolist(), tree.token_N.tolist(), strict=True))
        return walk_sampling({place: node for node, place in places}, logits_KV, root_pos, sampling)
    if not tree.is_cpu:
        return follow(tree, say(tree, logits_KV, root_pos, sampling))
    token, parent, *_ = tree.arrays
    # the same in one host call; even two slices would cost as much as that
    path, tokens = torch.ops.ygg.follow(logits_KV, parent, token)
    if not path:
        raise YggError(BROKEN)
    return Accepted(path, tokens)


def walk_sampling(
    child_of: Mapping[tuple[int, int], int], logits_KV: Tensor, root_pos: int, sampling: SamplingConfig
) -> Accepted:
    """Say and follow in one, for a CPU: after a node that is not passed nothing is drawn.

    Args:
        child_of: The node that says a token under a node, by (node, token); the root is 0.
        logits_KV: (K, V) of the target after each node, on a CPU.
        root_pos: Position of the root.
        sampling: A temperature above 0.

    Raises:
        YggError: logits that are not finite, of whatever node.

    Cost: one pass over the logits; noise and filters of one row for every node that is passed.
    """
    # what is broken off the path is broken: it must not be found only where the walk passes
    told(greatest(logits_KV))
    path = list[int]()
    tokens = list[int]()
    node: int | None = 0
    while node is not None:
        path.append(node)
        tokens.append(next_token(logits_KV[node : node + 1], root_pos + len(path), sampling))
        node = child_of.get((node, tokens[-1]))
    return Accepted(path, tokens)


def say(tree: TokenTree, logits_KV: Tensor, root_pos: int, sampling: SamplingConfig) -> Said:
    """What the target says after every node, left where it is. Arguments as for `accept`. Cost: no sync."""
    if sampling.temperature == 0:
        return choose_tokens(logits_KV, (), tree.depth_N, sampling)
    # a device would have to be asked
    deepest = int(tree.depth_N.max()) if tree.is_cpu else min(len(tree) - 1, tree.max_depth)
    return choose_tokens(logits_KV, range(root_pos + 1, root_pos + 2 + deepest), tree.depth_N, sampling)


def follow(tree: TokenTree, said: Said) -> Accepted:
    """The path on which the tree says what the target said, and the tokens that are emitted. Raises as
    `accept`. Cost: one sync.
    """
    if tree.is_cpu:
        [tokens] = told(said)
        path = tree.walk(said.token_K)
    else:
        tokens, is_passed = told(said, tree.on_walk(said.token_K))
        path = [node for node, passed in enumerate(is_passed) if passed]
    return Accepted(path, [tokens[node] for node in path])
