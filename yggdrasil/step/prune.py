"""Prune: keep the subtree whose verification is worth its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.state import Shape
from yggdrasil.tree import TokenTree

__all__ = ["Pruned", "VerifyPolicy", "prune"]


class VerifyPolicy(Protocol):
    """What pruning asks of a policy."""

    def values(self, log_probs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Calibrated probability that each node is accepted, from path log-probabilities; monotone."""
        ...

    def verify_width(self, expected: Sequence[float], shape: Shape, context_len: int) -> int:
        """K, given the emitted tokens expected of the best 1, 2, ... nodes."""
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


def prune(tree: TokenTree, shape: Shape, policy: VerifyPolicy, context_len: int) -> Pruned:
    """The subtree of K nodes that maximises Eq. 3 over the menu of verified widths, or of `shape.verify` nodes where that is set.

    Calibrated acceptance never rises from parent to child, so for every K the best subtree is the K best nodes, and the
    best for K - 1 is its prefix: one sort serves the whole menu.

    Cost: one sync (the values), one sort on the host.
    Source: Yggdrasil section 4.2, "Verification Width Pruning"; the reference is `TokenTree.prune`.
    """
    if len(tree) == 1:
        return Pruned(tree, [0], 1.0)
    values_N = policy.values(tree.log_prob_N.tolist())  # sync: K is a shape
    order_N = np.argsort(-values_N[1:], kind="stable") + 1  # of equals the earlier node, so a parent before its child
    expected = [1.0, *(1.0 + values_N[order_N].cumsum()).tolist()]
    count = policy.verify_width(expected, shape, context_len)
    keep = [0, *np.sort(order_N[: count - 1]).tolist()]
    return Pruned(_subtree(tree, keep), keep, expected[count - 1])


def _subtree(tree: TokenTree, keep: Sequence[int]) -> TokenTree:
    """`tree.subtree(keep)`, in one call on a CPU."""
    if len(keep) == len(tree) or not tree.is_cpu:
        return tree.subtree(keep)
    return TokenTree.of(*torch.ops.ygg.subtree(*tree.arrays, keep), length=len(keep))
