"""What a policy chooses for a step over rows: their shapes, and the numbers that both forms of it read.

Shapes: M = knots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.state import Shape
from yggdrasil.step.platt import PlattScale

__all__ = ["VERIFY_ALL", "Calibration", "Choice", "VerifyMenu", "verify_most"]


@dataclass(frozen=True, eq=False)
class Calibration:
    """From the draft's log-probabilities to acceptance.

    Args:
        platt: Scale of edges while a tree grows.
        knots: Acceptance by path log-probability, (2, M) float64 on the host. Row 0: path
            log-probabilities, ascending. Row 1: acceptance of such nodes, not falling; linear between.
    """

    platt: PlattScale
    knots: Tensor

    def values(self, log_probs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Acceptance of nodes: linear between knots, clamped outside."""
        at = np.asarray(log_probs, dtype=np.float64)
        values: npt.NDArray[np.float64] = np.interp(at, *self.knots.numpy())
        return values


@dataclass(frozen=True, eq=False)
class VerifyMenu:
    """How many drafted nodes of the whole batch a step may verify, and what the step costs then.

    Args:
        nodes: Numbers of nodes, roots not counted, ascending.
        ms: Milliseconds of the step with each, growth left out.
        growth_ms: Milliseconds of one growth step.
        scale: Accepted tokens per token that the calibration expects.
        extra: Emitted tokens that the step gains in addition with each number: the value of prompt tokens
            that run in the same graph. Empty for none.
    """

    nodes: tuple[int, ...]
    ms: tuple[float, ...]
    growth_ms: float = 0.0
    scale: float = 1.0
    extra: tuple[float, ...] = ()

    def best(self, sums: Sequence[float], *, num_rows: int, depth: int) -> int:
        """The number of nodes that maximises emitted tokens per millisecond; the first among equals.

        Args:
            sums: sums[n] is the acceptance of the n best nodes of the batch together; sums[0] is 0. More
                nodes than that means all of them.
            num_rows: Rows of the batch; each emits one token without a draft.
            depth: Growth steps that ran: those of the deepest tree.

        Source: Yggdrasil Eq. (3) and section 4.2, "Verification Width Pruning", over the whole batch.
        """
        drafted = len(sums) - 1
        extra = self.extra or (0.0,) * len(self.nodes)

        def speed(entry: int) -> float:
            tokens = num_rows + extra[entry] + self.scale * sums[min(self.nodes[entry], drafted)]
            return tokens / (self.ms[entry] + depth * self.growth_ms)

        return min(self.nodes[max(range(len(self.nodes)), key=speed)], drafted)


def verify_most(num_nodes: int) -> VerifyMenu:
    """The menu of a step that verifies this many nodes of the batch, the best ones."""
    return VerifyMenu((num_nodes,), (1.0,))


VERIFY_ALL = verify_most(2**31)
"""The menu of a step that verifies all nodes, or as many as the shapes allow."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The choice for one step.

    Args:
        shapes: One for every row. A shape's `verify` limits the nodes of its row, root included.
        calibrations: One for every row.
        menu: Of the whole batch.
        gamma: Depth that was selected, before the limits of rows; 0 is plain decoding.
    """

    shapes: tuple[Shape, ...]
    calibrations: tuple[Calibration, ...]
    menu: VerifyMenu
    gamma: int = 0
