"""Prune: keep the subtree whose verification is worth its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from yggdrasil.state import Shape
from yggdrasil.tree import TokenTree

__all__ = ["Pruned", "VerifyPolicy", "best_width", "prune", "prune_plain"]


class VerifyPolicy(Protocol):
    """What pruning asks of a policy."""

    @property
    def knots(self) -> Tensor:
        """(2, M) float64 on the host: ascending path log-probabilities, and the calibrated acceptance of
        such nodes, not falling; linear between.
        """
        ...

    def verify_costs(
        self, shape: Shape, num_nodes: int, context_len: int, lag: int
    ) -> tuple[list[int], list[float]]:
        """The K that a tree of so many nodes may be verified with, ascending, and what the step takes with
        each beside `lag` tokens, in milliseconds.
        """
        ...


@dataclass(frozen=True)
class Pruned:
    """A subtree to verify.

    Args:
        tree: Its nodes, renumbered.
        drafted_node: For each, the id it had in the drafted tree.
        expected_emitted: Emitted tokens that the calibrated acceptance expects of it, the bonus included.
    """

    tree: TokenTree
    drafted_node: list[int]
    expected_emitted: float


def prune(tree: TokenTree, shape: Shape, policy: VerifyPolicy, context_len: int, *, lag: int) -> Pruned:
    """The subtree of K nodes that maximises Eq. 3 over the menu of verified widths, or of `shape.verify`
    nodes where that is set.

    Args:
        tree: As it was drafted.
        shape: Of the tree.
        policy: Knows what nodes are worth and what verification takes.
        context_len: Committed tokens before the root.
        lag: Of these, the tokens that the target has yet to compute, in the same forward as the tree.

    Cost: one host call on a CPU. On a device see `prune_plain`.
    Source: Yggdrasil section 4.2, "Verification Width Pruning"; the reference is `TokenTree.prune`.
    """
    if len(tree) == 1:
        return Pruned(tree, [0], 1.0)
    widths, costs_ms = policy.verify_costs(shape, len(tree), context_len, lag)
    if not tree.is_cpu:
        return prune_plain(tree, policy.knots, widths, costs_ms)
    *arrays, keep, expected_emitted = torch.ops.ygg.prune(
        *tree.arrays, len(tree), policy.knots, widths, costs_ms
    )
    return Pruned(TokenTree.of(*arrays, length=len(keep)), keep, expected_emitted)


def prune_plain(
    tree: TokenTree, knots_2M: Tensor, widths: Sequence[int], costs_ms: Sequence[float]
) -> Pruned:
    """`ygg::prune`, operator by operator: its specification, and what runs on a device.

    Calibrated acceptance never rises from parent to child, so for every K the best subtree is the K best
    nodes, and the best for K - 1 is its prefix: one sort serves the whole menu.

    Args:
        tree: More than the root.
        knots_2M: As a policy has them.
        widths: The K to choose from; of equals the first is taken.
        costs_ms: What the step takes with each.

    Cost: one sync (the values), one sort on the host.
    """
    values_N = np.interp(tree.log_prob_N.tolist(), *knots_2M.numpy())  # sync: K is a shape
    # of equals the earlier node, so a parent before its child
    order_N = np.argsort(-values_N[1:], kind="stable") + 1
    expected = [1.0, *(1.0 + values_N[order_N].cumsum()).tolist()]
    count = best_width(expected, widths, costs_ms)
    keep = [0, *np.sort(order_N[: count - 1]).tolist()]
    return Pruned(tree.subtree(keep), keep, expected[count - 1])


def best_width(expected: Sequence[float], widths: Sequence[int], costs_ms: Sequence[float]) -> int:
    """The K that Eq. 3 likes best for this very tree, given expected[k - 1] emitted tokens of its best k
    nodes; everything but K is settled by now.

    The mean of a run would be greatest if steps maximised tokens - rate * milliseconds, but that follows
    every error of what is expected and of the rate; the step's own ratio keeps to the middle, and does
    better (bench/LOG.md).

    Source: Yggdrasil Eq. (3) and section 4.2, "Verification Width Pruning".
    """
    return max(zip(widths, costs_ms, strict=True), key=lambda choice: expected[choice[0] - 1] / choice[1])[
        0
    ]
