"""Accept: walk down each tree as long as the draft's token equals the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError
from yggdrasil.state import Row
from yggdrasil.step.processors import allowed_after, paths_of, prefixes_of, process
from yggdrasil.step.prune import Pruned
from yggdrasil.step.sampling import BROKEN, TargetTokens, choose_tokens
from yggdrasil.tree import TokenTree, walk

__all__ = ["Accepted", "accept", "choose_rows", "follow", "grammar_masks", "grammar_paths", "target_tokens"]


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

    Cost: two syncs. A step uses `target_tokens` and `follow` for all its rows, with one.
    Source: no draft probabilities enter, so the target's distribution is preserved for any tree.
    """
    depth = int(tree.depth_N.max())  # sync: the positions to draw noise for
    chosen = target_tokens(tree, logits_KV, root_pos, sampling, depth=depth)
    [outcome] = follow([tree], [chosen])
    if isinstance(outcome, YggError):
        raise outcome
    return outcome


def target_tokens(
    tree: TokenTree, logits_KV: Tensor, root_pos: int, sampling: SamplingConfig, *, depth: int
) -> TargetTokens:
    """The target's own token after every node, on the device.

    Args:
        logits_KV: (K, V) the target's logits after each node.
        depth: Depth of the deepest node.

    Cost: no sync.
    """
    return choose_tokens(logits_KV, range(root_pos + 1, root_pos + 2 + depth), tree.depth_N, sampling)


def grammar_paths(rows: Sequence[Row], pruned: Sequence[Pruned]) -> list[list[tuple[int, ...]]]:
    """What the matcher of every row with a grammar reads: the path to each node of its tree.

    Cost: one sync for each of these rows. Others have no paths.
    """
    return [
        [] if row.state.grammar is None else paths_of(each.tree, slice(len(each.tree)))
        for row, each in zip(rows, pruned, strict=True)
    ]


def grammar_masks(
    rows: Sequence[Row], paths: Sequence[Sequence[tuple[int, ...]]], device: str
) -> list[Tensor | None]:
    """For every row with a grammar (K, V) whether it allows a token after each node.

    Args:
        paths: Result of `grammar_paths`.

    Cost: host work that reads no tensor: on CUDA it runs while the device does what was launched before.
    """
    return [
        allowed_after(each, row.state, device) if row.state.grammar is not None else None
        for row, each in zip(rows, paths, strict=True)
    ]


def choose_rows(
    rows: Sequence[Row],
    pruned: Sequence[Pruned],
    logits_NV: Tensor,
    roots: Sequence[int],
    masks: Sequence[Tensor | None] | None = None,
) -> list[TargetTokens]:
    """The target's own token after every node of every row, on the device.

    Args:
        rows: The rows that `verify_rows` got.
        pruned: The tree of each.
        logits_NV: Result of `verify_rows`.
        roots: Result of `verify_rows`.
        masks: Result of `grammar_masks`; else it is computed now.

    Cost: noise of one more position than a tree is deep, for each row that samples. No sync with `masks`.
    """
    if masks is None:
        masks = grammar_masks(rows, grammar_paths(rows, pruned), logits_NV.device.type)
    is_greedy = any(row.state.sampling.temperature == 0 for row in rows)
    greedy = choose_tokens(logits_NV, (), logits_NV, SamplingConfig()) if is_greedy else None
    chosen = []
    for row, each, root, allowed_KV in zip(rows, pruned, roots, masks, strict=True):
        nodes = slice(root, root + len(each.tree))
        sampling = row.state.sampling
        if sampling.processors is not None:
            chosen.append(_processed_tokens(row, each, logits_NV[nodes], allowed_KV))
        elif greedy is not None and sampling.temperature == 0:
            chosen.append(TargetTokens(greedy.token_K[nodes], greedy.score_K[nodes]))
        else:
            depth = max(each.depths)
            logits_KV = logits_NV[nodes]
            chosen.append(target_tokens(each.tree, logits_KV, row.state.root_pos, sampling, depth=depth))
    return chosen


def _processed_tokens(
    row: Row, pruned: Pruned, logits_KV: Tensor, allowed_KV: Tensor | None
) -> TargetTokens:
    """The target's tokens after processors; the scores are its own largest logits, before them."""
    state = row.state
    processors = state.sampling.processors
    assert processors is not None
    prefixes = prefixes_of(pruned.tree, slice(len(pruned.tree)), state, allowed_KV)
    processed_KV = process(logits_KV.float(), prefixes, processors)
    depth = max(pruned.depths)
    chosen = target_tokens(pruned.tree, processed_KV, state.root_pos, state.sampling, depth=depth)
    return TargetTokens(chosen.token_K, logits_KV.amax(dim=-1).float())


def follow(trees: Sequence[TokenTree], chosen: Sequence[TargetTokens]) -> list[Accepted | YggError]:
    """For every tree the path on which it has the target's tokens, and the emitted tokens.

    Returns:
        An error instead for a tree with logits that are not finite, also off the path: a broken model must
        not write text.

    Cost: one sync for all trees.
    """
    if not trees:
        return []
    is_sound_N = torch.cat([each.score_K for each in chosen]).isfinite()
    columns = (
        torch.cat([each.token_K for each in chosen]).masked_fill(~is_sound_N, -1),
        torch.cat([tree.token_N for tree in trees]).long(),
        torch.cat([tree.parent_N for tree in trees]).long(),
    )
    all_wanted, all_tokens, all_parents = torch.stack(columns).tolist()  # sync: this is the text
    outcomes: list[Accepted | YggError] = []
    end = 0
    for tree in trees:
        nodes = slice(end, end + len(tree))
        end = nodes.stop
        wanted = all_wanted[nodes]
        if min(wanted) < 0:
            outcomes.append(YggError(BROKEN))
            continue
        path = walk(all_parents[nodes], all_tokens[nodes], wanted)
        outcomes.append(Accepted(path, [wanted[node] for node in path]))
    return outcomes
