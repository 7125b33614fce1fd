"""Prune: keep the subtrees that emit the most tokens for their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from yggdrasil.step.choice import Choice, VerifyMenu
from yggdrasil.step.coupling import LOWEST_PATH
from yggdrasil.step.growth import RowDraft
from yggdrasil.tree import TokenTree

__all__ = ["ROOT_ALONE", "DraftedNodes", "Pruned", "drafted_nodes", "prune_rows"]


@dataclass(frozen=True)
class Pruned:
    """A row's subtree to verify.

    Args:
        drafted_node: The id that each node had in the drafted tree.
        depths: Depth of each node, on the host.
        expected_emitted: Emitted tokens that the calibration expects, the bonus included.
    """

    tree: TokenTree
    drafted_node: list[int]
    depths: list[int]
    expected_emitted: float


@dataclass(frozen=True)
class DraftedNodes:
    """What pruning reads of a row's drafted nodes, on the host.

    Nodes whose path has a forbidden token are padding: they fill the W places of a growth step where a
    request allows fewer tokens. They count as not drafted.

    Args:
        ids: The drafted nodes in the grown tree, ascending, root first.
        values: Calibrated acceptance of each of them but the root.
        depths: Depth of every node of the grown tree, padding included.
    """

    ids: list[int]
    values: tuple[float, ...]
    depths: list[int]


ROOT_ALONE = DraftedNodes([0], (), [0])


def drafted_nodes(drafts: Sequence[RowDraft], choice: Choice) -> list[DraftedNodes]:
    """What pruning reads, for every row.

    Args:
        drafts: Result of `draft_rows`.
        choice: The one that they were drafted with.

    Cost: one sync if any row drafts.
    """
    lens = [len(draft.tree) for draft in drafts]
    if all(length == 1 for length in lens):
        return [ROOT_ALONE] * len(drafts)
    columns = torch.stack(
        (
            torch.cat([draft.tree.log_prob_N for draft in drafts]),
            torch.cat([draft.tree.depth_N for draft in drafts]).float(),
        )
    )
    log_probs: list[float]
    log_probs, depths = columns.tolist()  # sync: the number of kept nodes is a shape
    rows = []
    for calibration, length, end in zip(choice.calibrations, lens, accumulate(lens), strict=True):
        own = np.array(log_probs[end - length : end])
        ids = (own > LOWEST_PATH).nonzero()[0]
        values = calibration.values(own[ids[1:]])
        own_depths = [int(depth) for depth in depths[end - length : end]]
        rows.append(DraftedNodes(ids.tolist(), tuple(values.tolist()), own_depths))
    return rows


class _Node(NamedTuple):
    """A drafted node with its calibrated acceptance; `place` is its row's among the drafts."""

    value: float
    place: int
    node: int


def prune_rows(drafts: Sequence[RowDraft], nodes: Sequence[DraftedNodes], menu: VerifyMenu) -> list[Pruned]:
    """Keep the best nodes of the whole batch; the menu decides how many.

    A node's calibrated acceptance never is above its parent's, and the lower of two equal nodes comes
    first. So the best nodes of the batch are a tree in every row.

    Args:
        drafts: Result of `draft_rows`. Of a row whose shape sets `verify`, only its best `verify - 1` nodes
            compete.
        nodes: Result of `drafted_nodes`.

    Cost: one sort on the host, no sync.
    Source: Yggdrasil section 4.2, "Verification Width Pruning"; over a batch as TETRIS does, which Nightjar
    describes in section 6.1.
    """
    competing = [
        _Node(value, place, node)
        for place, draft in enumerate(drafts)
        for node, value in _best(nodes[place], draft.shape.verify)
    ]
    # among equals the lower node, so a parent before its child, then the earlier row
    ranked = sorted(competing, key=lambda each: (-each.value, each.node, each.place))
    sums = [0.0, *accumulate(each.value for each in ranked)]
    deepest = max((draft.shape.depth for draft in drafts), default=0)
    num_kept = menu.best(sums, num_rows=len(drafts), depth=deepest)
    keeps = [[0] for _ in drafts]
    gains = [0.0] * len(drafts)
    for value, place, node in ranked[:num_kept]:
        keeps[place].append(node)
        gains[place] += value
    pruned = []
    for place, draft in enumerate(drafts):
        keep = sorted(keeps[place])
        kept_depths = [nodes[place].depths[node] for node in keep]
        pruned.append(Pruned(draft.tree.subtree(keep), keep, kept_depths, 1.0 + gains[place]))
    return pruned


def _best(nodes: DraftedNodes, verify: int | None) -> list[tuple[int, float]]:
    """A row's nodes that compete with those of other rows, with their values; the root does not."""
    competing = zip(nodes.ids[1:], nodes.values, strict=True)
    ranked = sorted(competing, key=lambda each: -each[1])
    return ranked if verify is None else ranked[: verify - 1]
