"""Accept: walk down the tree as long as the draft's token equals the target's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError
from yggdrasil.step.sampling import (
    BROKEN,
    TargetTokens,
    choose_tokens,
    largest_scores,
    next_token,
    tokens_to_host,
)
from yggdrasil.tree import TokenTree

__all__ = ["Accepted", "accept", "follow", "target_tokens", "walk_sampling"]


@dataclass(frozen=True)
class Accepted:
    """What the target accepts.

    Args:
        path: Nodes of the verified tree, root first.
        tokens: Emitted tokens, one for each node of the path; the last one is the bonus.
    """

    path: list[int]
    tokens: list[int]


def accept(tree: TokenTree, logits_KV: Tensor, root_pos: int, sampling: SamplingConfig) -> Accepted:
    """The exact acceptance law of a deterministic tree.

    The target's token at a node is emitted. If a child of the node has this token, the walk goes on there.

    Args:
        logits_KV: (K, V) the target's logits after each node.

    Raises:
        YggError: logits that are not finite.

    Cost: one sync. On a CPU, noise is drawn and logits are filtered only at the nodes of the path.
    Source: no draft probabilities enter, so the target's distribution is preserved for any tree.
    """
    if tree.is_cpu and sampling.temperature > 0:
        places = enumerate(zip(tree.parent_N.tolist(), tree.token_N.tolist(), strict=True))
        return walk_sampling({place: node for node, place in places}, logits_KV, root_pos, sampling)
    if not tree.is_cpu:
        return follow(tree, target_tokens(tree, logits_KV, root_pos, sampling))
    token, parent, *_ = tree.arrays
    # the same in one host call; even two slices would cost as much as this call
    path, tokens = torch.ops.ygg.follow(logits_KV, parent, token)
    if not path:
        raise YggError(BROKEN)
    return Accepted(path, tokens)


def walk_sampling(
    child_of: Mapping[tuple[int, int], int], logits_KV: Tensor, root_pos: int, sampling: SamplingConfig
) -> Accepted:
    """Sample and walk together, on a CPU: noise is drawn only for the nodes of the path.

    Args:
        child_of: The child of a node that has a token, by (node, token); the root is 0.
        logits_KV: (K, V) the target's logits after each node, on a CPU.
        sampling: A temperature above 0.

    Raises:
        YggError: logits of any node that are not finite.

    Cost: one pass over the logits; noise and filters of one row for each node of the path.
    """
    # broken logits are an error at every node, also off the path
    tokens_to_host(largest_scores(logits_KV))
    path = list[int]()
    tokens = list[int]()
    node: int | None = 0
    while node is not None:
        path.append(node)
        tokens.append(next_token(logits_KV[node : node + 1], root_pos + len(path), sampling))
        node = child_of.get((node, tokens[-1]))
    return Accepted(path, tokens)


def target_tokens(
    tree: TokenTree, logits_KV: Tensor, root_pos: int, sampling: SamplingConfig
) -> TargetTokens:
    """The target's own token after every node, on the device. Arguments as for `accept`. Cost: no sync."""
    if sampling.temperature == 0:
        return choose_tokens(logits_KV, (), tree.depth_N, sampling)
    # on a device, reading the depth would be a sync
    deepest = int(tree.depth_N.max()) if tree.is_cpu else min(len(tree) - 1, tree.max_depth)
    return choose_tokens(logits_KV, range(root_pos + 1, root_pos + 2 + deepest), tree.depth_N, sampling)


def follow(tree: TokenTree, chosen: TargetTokens) -> Accepted:
    """The path on which the tree has the target's tokens, and the emitted tokens.

    Raises as `accept`. Cost: one sync.
    """
    if tree.is_cpu:
        [tokens] = tokens_to_host(chosen)
        path = tree.walk(chosen.token_K)
    else:
        tokens, is_on_path = tokens_to_host(chosen, tree.on_walk(chosen.token_K))
        path = [node for node, on_path in enumerate(is_on_path) if on_path]
    return Accepted(path, [tokens[node] for node in path])
