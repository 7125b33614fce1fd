"""Prune: keep the subtree that emits the most tokens for its time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from yggdrasil.state import Shape
from yggdrasil.step.choice import Choice
from yggdrasil.tree import TokenTree

__all__ = ["Pruned", "prune"]


@dataclass(frozen=True)
class Pruned:
    """A subtree to verify.

    Args:
        tree: Its nodes, renumbered.
        drafted_node: The id that each node had in the drafted tree.
        expected_emitted: Emitted tokens that the calibration expects, the bonus included.
    """

    tree: TokenTree
    drafted_node: list[int]
    expected_emitted: float


def prune(tree: TokenTree, shape: Shape, choice: Choice) -> Pruned:
    """The subtree that maximises Eq. 3 over the menu of K, or the best one of `shape.verify` nodes.

    Calibrated acceptance never rises from parent to child, so for every K the best subtree is the K best
    nodes, and the best for K - 1 is its prefix: one sort serves the whole menu.

    Args:
        shape: Shape of the tree as it has grown.
        choice: Of the only row: its calibration, and the menu.

    Cost: one sync (the values), one sort on the host.
    Source: Yggdrasil section 4.2, "Verification Width Pruning"; the reference is `TokenTree.prune`.
    """
    if len(tree) == 1:
        return Pruned(tree, [0], 1.0)
    values_N = choice.calibrations[0].values(tree.log_prob_N.tolist())  # sync: K is a shape
    # among equals the earlier node, so a parent before its child
    order_N = np.argsort(-values_N[1:], kind="stable") + 1
    most = len(order_N) if shape.verify is None else shape.verify - 1
    sums = [0.0, *values_N[order_N[:most]].cumsum().tolist()]
    count = choice.menu.best(sums, num_rows=1, depth=shape.depth)
    keep = [0, *np.sort(order_N[:count]).tolist()]
    return Pruned(tree.subtree(keep), keep, 1.0 + sums[count])
