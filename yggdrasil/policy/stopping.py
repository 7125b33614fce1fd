"""Rules that stop the growth of a tree early.

Shapes: X = any further dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.tree import TokenTree

__all__ = ["LowConfidence", "SmallGain", "last_gain"]


@dataclass(frozen=True)
class LowConfidence:
    """Stop a chain once the probability of its last token is below a threshold.

    Args:
        threshold: Probability of the token after its parent, not of the path; scaled like the policy's
            edges.

    Example:
        >>> str(LowConfidence(0.4))
        'until P<0.4'
    """

    threshold: float

    def enough(self, tree: TokenTree) -> bool:
        log_probs: list[float] = tree.log_prob_N[-2:].tolist()  # sync: the chain ends or goes on
        return log_probs[-1] - log_probs[0] < math.log(self.threshold)

    @property
    def numbers(self) -> tuple[Tensor, float]:
        return torch.empty(0, dtype=torch.float64), math.log(self.threshold)

    def __str__(self) -> str:
        return f"until P<{self.threshold:g}"


@dataclass(frozen=True)
class SmallGain:
    """Stop equal growth once the last step raised the value of the best nodes by less than a minimum.

    The value of a node is its acceptance probability minus the cost of verifying it. The cost rises with
    the node's rank among all nodes. Nodes of negative value are left out.

    Args:
        width: W, the nodes of the last step.
        costs: Verification costs, in tokens, of the best node, the second best, and so on; never falling.
            Further nodes are not verified.
        min_gain: Value, in tokens, that a step must add.

    Example:
        >>> str(SmallGain(8, (0.0,) * 32, 0.1))
        'until gain<0.1'
    """

    width: int
    costs: tuple[float, ...]
    min_gain: float

    def enough(self, tree: TokenTree) -> bool:
        log_probs = tree.log_prob_N.numpy(force=True)  # sync: the tree ends or goes on
        return bool(last_gain(log_probs, self.width, self.costs) < self.min_gain)

    @cached_property
    def _costs(self) -> Tensor:
        return torch.tensor(self.costs, dtype=torch.float64)

    @property
    def numbers(self) -> tuple[Tensor, float]:
        return self._costs, self.min_gain

    def __str__(self) -> str:
        return f"until gain<{self.min_gain:g}"


def last_gain(log_prob_XN: npt.ArrayLike, width: int, costs: Sequence[float]) -> npt.NDArray[np.float64]:
    """The value that the last `width` nodes of each tree, (..., N), add to its best nodes, (...)."""
    probabilities = np.exp(np.asarray(log_prob_XN, dtype=np.float64))

    def value(nodes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        best = np.sort(nodes, axis=-1)[..., ::-1][..., : len(costs)]
        values = np.maximum(best - np.array(costs)[: best.shape[-1]], 0.0)
        total: npt.NDArray[np.float64] = values.sum(axis=-1)
        return total

    return value(probabilities) - value(probabilities[..., : probabilities.shape[-1] - width])
