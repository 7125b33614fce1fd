"""Prune: keep the subtree that emits the most tokens for its time.

Shapes: M = knots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from yggdrasil.state import Shape
from yggdrasil.tree import TokenTree

__all__ = ["Pruned", "VerifyPolicy", "best_width", "prune", "prune_reference"]


class VerifyPolicy(Protocol):
    """What pruning needs from a policy."""

    @property
    def knots(self) -> Tensor:
        """Calibrated acceptance by path log-probability, (2, M) float64 on the host.

        Row 0: path log-probabilities, ascending. Row 1: acceptance of such nodes, not falling; linear
        between.
        """
        ...

    def verify_costs(
        self, shape: Shape, num_nodes: int, context_len: int, lag: int
    ) -> tuple[list[int], list[float]]:
        """The allowed K for a tree of `num_nodes` nodes, ascending, and the step's milliseconds with each.

        Args:
            shape: Shape of the tree.
            num_nodes: Size of the tree.
            context_len: Committed tokens before the root.
            lag: Tokens of the text that run in the same target forward.
        """
        ...


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


def prune(tree: TokenTree, shape: Shape, policy: VerifyPolicy, context_len: int, *, lag: int) -> Pruned:
    """The subtree that maximises Eq. 3 over the menu of K, or the best one of `shape.verify` nodes.

    Args:
        policy: Knows the acceptance of nodes and the cost of verification.
        context_len: Committed tokens before the root.
        lag: How many of them the target has yet to compute, in the same forward as the tree.

    Cost: one host call on a CPU. On a device see `prune_reference`.
    Source: Yggdrasil section 4.2, "Verification Width Pruning"; the reference is `TokenTree.prune`.
    """
    if len(tree) == 1:
        return Pruned(tree, [0], 1.0)
    widths, costs_ms = policy.verify_costs(shape, len(tree), context_len, lag)
    if not tree.is_cpu:
        return prune_reference(tree, policy.knots, widths, costs_ms)
    *arrays, keep, expected_emitted = torch.ops.ygg.prune(
        *tree.arrays, len(tree), policy.knots, widths, costs_ms
    )
    return Pruned(TokenTree.of(*arrays, length=len(keep)), keep, expected_emitted)


def prune_reference(
    tree: TokenTree, knots_2M: Tensor, widths: Sequence[int], costs_ms: Sequence[float]
) -> Pruned:
    """The specification of `ygg::prune`, operator by operator; on a device this runs.

    Calibrated acceptance never rises from parent to child, so for every K the best subtree is the K best
    nodes, and the best for K - 1 is its prefix: one sort serves the whole menu.

    Args:
        knots_2M: `VerifyPolicy.knots`.
        widths: The K to choose from; among equally good ones the first is taken.
        costs_ms: Milliseconds of the step with each K.

    Cost: one sync (the values), one sort on the host.
    """
    values_N = np.interp(tree.log_prob_N.tolist(), *knots_2M.numpy())  # sync: K is a shape
    # among equals the earlier node, so a parent before its child
    order_N = np.argsort(-values_N[1:], kind="stable") + 1
    expected = [1.0, *(1.0 + values_N[order_N].cumsum()).tolist()]
    count = best_width(expected, widths, costs_ms)
    keep = [0, *np.sort(order_N[: count - 1]).tolist()]
    return Pruned(tree.subtree(keep), keep, expected[count - 1])


def best_width(expected: Sequence[float], widths: Sequence[int], costs_ms: Sequence[float]) -> int:
    """The K that maximises Eq. 3 for one tree, whose best k nodes emit expected[k - 1] tokens.

    In theory steps should maximise tokens - rate * milliseconds. But that follows every error of the
    expected tokens and of the rate. The step's own ratio is more robust and measures better (bench/LOG.md).

    Source: Yggdrasil Eq. (3) and section 4.2, "Verification Width Pruning".
    """
    choices = zip(widths, costs_ms, strict=True)
    width, _ = max(choices, key=lambda choice: expected[choice[0] - 1] / choice[1])
    return width
