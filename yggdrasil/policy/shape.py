"""The shape of the next step: the policy protocol, and its policies as values.

Shapes: M = arms of the menu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.depth import DepthPredictor
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.stopping import SmallGain
from yggdrasil.state import PLAIN, DecodeState, Shape, StepResult
from yggdrasil.step.platt import PlattScale

__all__ = [
    "Arms",
    "BestShape",
    "ContextShape",
    "DepthRule",
    "FixedShape",
    "NativeCosts",
    "ShapePolicy",
    "StoppingShape",
    "best_shape",
]

DepthRule = Literal["fixed", "predicted", "stopping"]
"""What determines D: the calibration text, the context, or the growing tree.

The policies are `BestShape`, `ContextShape` and `StoppingShape`.
"""

CONTEXT_STEP = 128  # tokens of context after which the shape is chosen again: costs change slowly


NativeCosts = tuple[Tensor, Tensor, float, float, list[int]]
"""Arguments of `ygg::verify_costs`.

T_draft and T_verify as `Curve.table`, host milliseconds of a growth step and of a step, and the verified
widths, ascending, followed by the size of the largest graph.
"""


class ShapePolicy(Protocol):
    """Chooses W and D before drafting and K after it, and observes the result."""

    def choose(self, state: DecodeState) -> Shape:
        """The shape of the next step; depth 0 is plain decoding."""
        ...

    @property
    def platt(self) -> PlattScale:
        """Scale of the draft's probabilities while a tree grows."""
        ...

    @property
    def knots(self) -> Tensor:
        """Calibrated acceptance by path log-probability; see step/prune.py."""
        ...

    def verify_costs(
        self, shape: Shape, num_nodes: int, context_len: int, lag: int
    ) -> tuple[list[int], list[float]]:
        """The K to choose from, and the step's milliseconds with each; see step/prune.py."""
        ...

    @property
    def native_costs(self) -> NativeCosts | None:
        """The data from which `verify_costs` is computed; None if the method must be called."""
        ...

    def observe(self, result: StepResult) -> None:
        """Take note of a step's result."""
        ...


@dataclass
class FixedShape:
    """One shape for every step; with `shape.verify` unset, K still follows the objective.

    Args:
        shape: W, D and optionally K.
    """

    shape: Shape
    acceptance: Acceptance
    latency: LatencyModel
    verify_widths: tuple[int, ...]

    def choose(self, state: DecodeState) -> Shape:
        return self.shape

    @property
    def platt(self) -> PlattScale:
        return self.acceptance.platt

    @property
    def knots(self) -> Tensor:
        return self.acceptance.knots

    def verify_costs(
        self, shape: Shape, num_nodes: int, context_len: int, lag: int
    ) -> tuple[list[int], list[float]]:
        """The room that each graph has after `lag` tokens, as far as the tree fills it, and its cost.

        Every cost includes the milliseconds before verification.
        """
        if shape.verify is not None:
            return [min(shape.verify, num_nodes)], [1.0]
        most = min(num_nodes, self.verify_widths[-1])
        sizes = (*self.verify_widths, self.latency.verify.sizes[-1])
        menu = sorted({min(size - lag, most) for size in sizes if size > lag})
        before_ms = self.latency.before_verify_ms(shape.width, shape.depth, context_len)
        verify_ms = self.latency.verify.at_each([lag + width for width in menu], context_len)
        return menu, [before_ms + ms for ms in verify_ms]

    @cached_property
    def native_costs(self) -> NativeCosts:
        latency = self.latency
        sizes = [*self.verify_widths, latency.verify.sizes[-1]]
        return (
            latency.draft.table,
            latency.verify.table,
            latency.growth_host_ms,
            latency.step_host_ms,
            sizes,
        )

    def observe(self, result: StepResult) -> None:
        """Does nothing: the choice of shapes depends only on the text."""


@dataclass(frozen=True)
class Arms:
    """Every (W, D, K) of the menu at one context length as arrays, plain decoding first.

    Args:
        shapes: (W, D) of every arm; pruning chooses K.
        width_M: (M,) W.
        depth_M: (M,) D; 0 for plain decoding.
        verify_M: (M,) the K that the arm's cost assumes.
        gain_M: (M,) accepted tokens, AAL - 1, on the calibration text; 0 for plain decoding.
        cost_M: (M,) milliseconds of an iteration.
    """

    shapes: tuple[Shape, ...]
    width_M: npt.NDArray[np.int64]
    depth_M: npt.NDArray[np.int64]
    verify_M: npt.NDArray[np.int64]
    gain_M: npt.NDArray[np.float64]
    cost_M: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls,
        acceptance: Acceptance,
        latency: LatencyModel,
        *,
        widths: Sequence[int],
        verify_widths: Sequence[int],
        context_len: int,
    ) -> Arms:
        """The arms of a menu. Cost: a millisecond."""
        shapes = [Shape(width, depth) for width in widths for depth in range(1, acceptance.max_depth + 1)]
        rows = [(PLAIN, 1, 0, 1, 0.0)] + [
            (
                shape,
                shape.width,
                shape.depth,
                min(verify, shape.num_nodes),
                acceptance.expected_emitted(shape.width, shape.depth, verify) - 1.0,
            )
            for shape in shapes
            for verify in verify_widths
        ]
        chosen, *columns = zip(*rows, strict=True)
        width_M, depth_M, verify_M, gain_M = map(np.array, columns)
        cost_M = _costs(width_M, depth_M, verify_M, latency, context_len)
        return cls(chosen, width_M, depth_M, verify_M, gain_M, cost_M)

    def at(self, latency: LatencyModel, context_len: int) -> Arms:
        """The same arms at another context length. Cost: some microseconds."""
        return replace(self, cost_M=_costs(self.width_M, self.depth_M, self.verify_M, latency, context_len))

    def best(self, growth_D: npt.NDArray[np.floating] | float = 1.0, rate: float | None = None) -> int:
        """Index of the arm that Eq. 3 prefers; among equals that of the smaller tree.

        Args:
            growth_D: (D,) growth_D[D - 1] is the accepted length within depth D, divided by that of the
                calibration; or one value for all depths.
            rate: Emitted tokens per millisecond of the whole run; None compares the arms' own ratios.
        """
        growth_M = growth_D if isinstance(growth_D, float) else growth_D[self.depth_M - 1]
        emitted_M = 1.0 + self.gain_M * growth_M
        score_M = emitted_M / self.cost_M if rate is None else emitted_M - rate * self.cost_M
        return int(score_M.argmax())

    @cached_property
    def calibrated_best(self) -> int:
        """Index of the arm that Eq. 3 prefers on the calibration text."""
        return self.best()

    @cached_property
    def rate(self) -> float:
        """Emitted tokens per millisecond of the best arm, by the calibration and the profile."""
        return float((1.0 + self.gain_M[self.calibrated_best]) / self.cost_M[self.calibrated_best])


def _costs(
    width_M: npt.NDArray[np.int64],
    depth_M: npt.NDArray[np.int64],
    verify_M: npt.NDArray[np.int64],
    latency: LatencyModel,
    context_len: int,
) -> npt.NDArray[np.float64]:
    """`LatencyModel.step_ms` of every arm."""
    widths, of_width_M = np.unique(width_M, return_inverse=True)
    verified, of_verify_M = np.unique(verify_M, return_inverse=True)
    draft_M = np.array(latency.draft.at_each(widths.tolist(), context_len))[of_width_M]
    verify_ms_M = np.array(latency.verify.at_each(verified.tolist(), context_len))[of_verify_M]
    drafting_M = latency.draft.at(2, context_len) + (depth_M - 1) * draft_M
    cost_M = drafting_M + depth_M * latency.growth_host_ms + latency.step_host_ms + verify_ms_M
    return np.where(depth_M == 0, latency.plain_ms(context_len), cost_M)


@dataclass(kw_only=True)
class BestShape(FixedShape):
    """The (W, D) that maximises Eq. 3 at the current context length; chains and plain decoding included.

    Args:
        arms_by_context: A cache that takes a millisecond per entry to fill. Policies with the same
            acceptance and latency may share it.

    Source: Yggdrasil Eq. (3) over the whole menu. All contexts of a length get the same shape; the depth
    predictor refines it.
    """

    widths: tuple[int, ...]
    arms_by_context: dict[int, Arms] = field(default_factory=dict, repr=False)

    def choose(self, state: DecodeState) -> Shape:
        arms = self.arms(state.root_pos)
        return arms.shapes[arms.calibrated_best]

    def arms(self, context_len: int) -> Arms:
        """The menu at this context length, in steps of CONTEXT_STEP."""
        key = context_len // CONTEXT_STEP * CONTEXT_STEP
        known = self.arms_by_context
        if key in known:
            return known[key]
        if known:
            known[key] = next(iter(known.values())).at(self.latency, key)
        else:
            menu = {"widths": self.widths, "verify_widths": self.verify_widths}
            known[key] = Arms.of(self.acceptance, self.latency, **menu, context_len=key)
        return known[key]


@dataclass(kw_only=True)
class ContextShape(BestShape):
    """The (W, D) that maximises Eq. 3 with the accepted length predicted for this context.

    The predictor returns P(accepted >= d). Its sum up to D, divided by the same sum on the calibration
    text, scales the calibrated AAL of every shape of that depth. Eq. 3 is a ratio of means, so arms are
    compared by tokens - rate * milliseconds, at the expected rate of the run. A context with few expected
    tokens gets a small tree, one with many a large tree. Plain decoding is an arm.

    Args:
        predictor: Predictor for this pair and kind of text.

    Source: Yggdrasil section 4.2, "Draft Depth Prediction" and "Draft Width Selection". Departure: D and W
    are chosen together, which costs one product over the menu, instead of D first and W at that D.
    """

    predictor: DepthPredictor
    temperature: float
    _growth: Callable[[Tensor], npt.NDArray[np.floating]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._growth = self.predictor.at(self.temperature)

    def choose(self, state: DecodeState) -> Shape:
        if state.hidden_E is None:  # the first step, if the end of the prompt runs with its tree
            return super().choose(state)
        arms = self.arms(state.root_pos)
        return arms.shapes[arms.best(self._growth(state.hidden_E), arms.rate)]


@dataclass(kw_only=True)
class StoppingShape(BestShape):
    """The best shape's W, grown until a step adds less value than it costs.

    The expected rate of Eq. 3 converts milliseconds to tokens. So a growth step (draft forward and host
    time) and the verification of one more node have a cost in tokens. Growth ends with the first step that
    raises the value of the best nodes by less than the step's cost. So the depth of a tree follows its own
    probabilities, which cannot be predicted from the text before it. For a CPU only: on a device, the host
    would have to wait for every step.

    Source: Yggdrasil Eq. (3), as a cost per step; the rule is OPT-Tree's, with a cost for each node instead
    of a budget. Departure: the paper predicts D before drafting.
    """

    _shape_by_context: dict[int, Shape] = field(default_factory=dict, init=False, repr=False)

    def choose(self, state: DecodeState) -> Shape:
        key = state.root_pos // CONTEXT_STEP * CONTEXT_STEP
        shape = self._shape_by_context.get(key)
        if shape is None:
            shape = self._shape_by_context[key] = self._stopping(key)
        return shape

    def _stopping(self, context_len: int) -> Shape:
        arms = self.arms(context_len)
        shape = arms.shapes[arms.calibrated_best]
        if shape.depth == 0:
            return shape
        step_ms = self.latency.draft.at(shape.width, context_len) + self.latency.growth_host_ms
        node_ms = self.latency.verify.marginal_ms(self.verify_widths[-1], context_len)
        stop = SmallGain(shape.width, tuple(arms.rate * ms for ms in node_ms), arms.rate * step_ms)
        return Shape(shape.width, self.acceptance.max_depth, stop=stop)


def best_shape(
    acceptance: Acceptance,
    latency: LatencyModel,
    *,
    widths: Sequence[int],
    verify_widths: Sequence[int],
    context_len: int,
) -> tuple[Shape, float]:
    """The shape of the menu with the largest predicted speedup, and that speedup; pruning chooses K.

    Among equals the smaller tree is taken. Plain decoding is the first arm, with a speedup of exactly 1.
    """
    arms = Arms.of(acceptance, latency, widths=widths, verify_widths=verify_widths, context_len=context_len)
    best = arms.calibrated_best
    return arms.shapes[best], float((1.0 + arms.gain_M[best]) * arms.cost_M[0] / arms.cost_M[best])
