"""The shape of the next step: the policy protocol, and its policies as values.

Shapes: M = arms of the menu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from yggdrasil.kernels.prediction import ArmsStruct, DepthCall
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.depth import DepthPredictor
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.stopping import SmallGain
from yggdrasil.state import PLAIN, Row, Shape, StepResult
from yggdrasil.step.choice import VERIFY_ALL, Choice, VerifyMenu

__all__ = [
    "MOST_GRAFTED",
    "REPEATS",
    "Arms",
    "BestShape",
    "ContextShape",
    "DepthRule",
    "FixedShape",
    "ShapePolicy",
    "StoppingShape",
    "best_shape",
    "grafted",
]

DepthRule = Literal["fixed", "predicted", "stopping"]
"""What determines D: the calibration text, the context, or the growing tree.

The policies are `BestShape`, `ContextShape` and `StoppingShape`.
"""

CONTEXT_STEP = 128  # tokens of context after which the shape is chosen again: costs change slowly
CHOICES_KEPT = 256
MOST_GRAFTED = 15  # with the root they fill a graph of 16 tokens
REPEATS = Shape(1, 0, graft=MOST_GRAFTED)  # what repeats in the text, without a draft


class ShapePolicy:
    """Chooses the shapes of a step, and observes its result. The base class of all policies of one request.

    A policy defines `choose`; one that learns also defines `observe`.

    Attributes:
        is_guard: Whether it may end speculation that is measured to be slower.
    """

    is_guard: ClassVar[bool] = False

    def choose(self, rows: Sequence[Row]) -> Choice:
        """The shapes of the next step and the numbers that it reads; called once per step.

        Args:
            rows: The requests of the step. A shape of depth 0 is plain decoding.
        """
        raise NotImplementedError

    def observe(self, result: StepResult) -> None:
        """Take note of a step's result; does nothing here."""


@dataclass
class FixedShape(ShapePolicy):
    """One shape for every step; with `shape.verify` unset, K still follows the objective.

    Args:
        shape: W, D and optionally K.
        graft: Most nodes that repeat the text, see `Shape.graft`.
    """

    shape: Shape
    acceptance: Acceptance
    latency: LatencyModel
    verify_widths: tuple[int, ...]
    graft: int = field(default=0, kw_only=True)
    _choices: dict[tuple[int, ...], tuple[Shape, Choice]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def choose(self, rows: Sequence[Row]) -> Choice:
        shape = self.shape_of(rows)
        lag = 0
        for row in rows:
            lag += row.state.root_pos - row.target_len
        key = (id(shape), context_key(rows), len(rows), lag)
        known = self._choices.get(key)
        if known is None:
            if len(self._choices) >= CHOICES_KEPT:
                self._choices.clear()
            # with the shape, so that no other one gets its id
            known = self._choices[key] = shape, self._choice(shape, *key[1:])
        return known[1]

    def shape_of(self, rows: Sequence[Row]) -> Shape:
        """The shape of every row in the next step."""
        return self.shape

    def _choice(self, shape: Shape, context_len: int, num_rows: int, lag: int) -> Choice:
        menu = VERIFY_ALL
        if shape.verify is None and shape.num_nodes > 1:
            menu = self.menu(shape.width if shape.depth else 0, context_len, num_rows, lag)
        shapes = (grafted(shape, self.graft),) * num_rows
        return Choice(shapes, (self.acceptance.calibration,) * num_rows, menu)

    def menu(self, width: int, context_len: int, num_rows: int, lag: int) -> VerifyMenu:
        """The nodes that each graph holds in addition to roots and lagging tokens, and the step's cost.

        Args:
            width: W; 0 without a draft.
            lag: Tokens of the texts that run in the same target forward.
        """
        latency = self.latency
        growth_ms = 0.0
        before_ms = latency.plain_host_ms
        share = latency.plain_share
        if width:
            share = 1.0
            draft_ms = latency.draft.graphs_ms(num_rows * width, context_len)
            growth_ms = draft_ms + latency.growth_host_ms
            before_ms = latency.draft.graphs_ms(2 * num_rows, context_len) - draft_ms + latency.step_host_ms
        reserved = lag + num_rows
        most = num_rows * (self.verify_widths[-1] - 1)
        larger = (size for size in latency.verify.sizes if size > self.verify_widths[-1])
        sizes = (*self.verify_widths, *larger)
        nodes = sorted({min(size - reserved, most) for size in sizes if size >= reserved})
        verify_ms = latency.verify.at_each([reserved + count for count in nodes], context_len)
        ms = tuple(before_ms + share * each for each in verify_ms)
        return VerifyMenu(tuple(nodes), ms, growth_ms)


@lru_cache(maxsize=CHOICES_KEPT)
def grafted(shape: Shape, graft: int) -> Shape:
    """The shape with this graft, unless it is plain, static or has one."""
    takes_graft = shape.depth > 0 and shape.levels is None and shape.graft == 0
    return replace(shape, graft=graft) if graft and takes_graft else shape


def context_key(rows: Sequence[Row]) -> int:
    """The context of the longest row, rounded down to a multiple of CONTEXT_STEP."""
    return max([row.state.root_pos for row in rows]) // CONTEXT_STEP * CONTEXT_STEP


@dataclass(frozen=True, eq=False)
class Arms:
    """Every (W, D, K) of the menu as arrays, plain decoding first.

    Args:
        shapes: (W, D) of every arm; pruning chooses K.
        width_M: (M,) W; 1 for plain decoding.
        depth_M: (M,) D; 0 for plain decoding.
        verify_M: (M,) the K that the arm's cost assumes.
        gain_M: (M,) accepted tokens of a row, AAL - 1, on the calibration text; 0 for plain decoding.
        latency: Gives the cost of every arm.
        context_len: Tokens of context.
        num_rows: Rows of a step.
    """

    shapes: tuple[Shape, ...]
    width_M: npt.NDArray[np.int64]
    depth_M: npt.NDArray[np.int64]
    verify_M: npt.NDArray[np.int64]
    gain_M: npt.NDArray[np.float64]
    latency: LatencyModel
    context_len: int
    num_rows: int = 1

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
        """The arms of a menu. Cost: some milliseconds."""
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
        return cls(chosen, width_M, depth_M, verify_M, gain_M, latency, context_len)

    def at(self, latency: LatencyModel, context_len: int, num_rows: int = 1) -> Arms:
        """The same arms at another context length or for more rows."""
        return replace(self, latency=latency, context_len=context_len, num_rows=num_rows)

    @cached_property
    def cost_M(self) -> npt.NDArray[np.float64]:
        """(M,) `LatencyModel.step_ms` over all rows; infinite if no graph holds the nodes.

        Cost: some ten microseconds.
        """
        latency = self.latency
        num_rows = self.num_rows
        context_len = self.context_len
        draft_M = latency.draft.graphs_each_ms(num_rows * self.width_M, context_len)
        verified_M = num_rows * self.verify_M
        largest = latency.verify.sizes[-1]
        verify_ms_M = latency.verify.graphs_each_ms(verified_M.clip(max=largest), context_len)
        if num_rows > 1:
            verify_ms_M[verified_M > largest] = np.inf
        drafting_M = latency.draft.graphs_ms(2 * num_rows, context_len) + (self.depth_M - 1) * draft_M
        cost_M = drafting_M + self.depth_M * latency.growth_host_ms + latency.step_host_ms + verify_ms_M
        plain_M = latency.plain_share * verify_ms_M + latency.plain_host_ms
        return np.where(self.depth_M == 0, plain_M, cost_M)

    def best(self, growth_D: npt.NDArray[np.floating] | float = 1.0, rate: float | None = None) -> int:
        """Index of the arm that Eq. 3 prefers; among equals that of the smaller tree.

        Args:
            growth_D: (D,) growth_D[D - 1] is the accepted length within depth D, divided by that of the
                calibration; or one value for all depths.
            rate: Emitted tokens of all rows per millisecond of the whole run; None compares the arms' own
                ratios.
        """
        growth_M = growth_D if isinstance(growth_D, float) else growth_D[self.depth_M - 1]
        emitted_M = self.num_rows * (1.0 + self.gain_M * growth_M)
        score_M = emitted_M / self.cost_M if rate is None else emitted_M - rate * self.cost_M
        return int(score_M.argmax())

    @cached_property
    def best_tree(self) -> int:
        """Index of the arm that Eq. 3 prefers on the calibration text if plain decoding is left out."""
        return 1 + int(((1.0 + self.gain_M[1:]) / self.cost_M[1:]).argmax())

    @cached_property
    def calibrated_best(self) -> int:
        """Index of the arm that Eq. 3 prefers on the calibration text."""
        return self.best()

    @cached_property
    def struct(self) -> ArmsStruct:
        """The arms of one row at the run's rate, for C++."""
        return ArmsStruct(self.depth_M, self.gain_M, self.cost_M, self.rate)

    @cached_property
    def rate(self) -> float:
        """Emitted tokens per millisecond of the best arm, by the calibration and the profile."""
        emitted = self.num_rows * (1.0 + self.gain_M[self.calibrated_best])
        return float(emitted / self.cost_M[self.calibrated_best])


@dataclass(kw_only=True)
class BestShape(FixedShape):
    """The (W, D) that maximises Eq. 3 at the current context length; chains and plain decoding included.

    Args:
        scale: Accepted tokens over those that the calibration expects.

    Source: Yggdrasil Eq. (3) over the whole menu. All contexts of a length get the same shape; the depth
    predictor refines it.
    """

    widths: tuple[int, ...]
    _arms: dict[tuple[int, int], Arms] = field(default_factory=dict, init=False, repr=False, compare=False)
    scale: float = 1.0

    def corrected(self, latency: LatencyModel, scale: float) -> Self:
        """The policy at another latency, whose trees accept `scale` times what this one expects."""
        arms = self.arms(0)
        policy = replace(self, latency=latency, scale=scale * self.scale)
        policy._arms[0, 1] = replace(arms, latency=latency, gain_M=scale * arms.gain_M)
        return policy

    def shape_of(self, rows: Sequence[Row]) -> Shape:
        arms = self.arms(context_key(rows), len(rows))
        return arms.shapes[arms.calibrated_best]

    def arms(self, context_len: int, num_rows: int = 1) -> Arms:
        """The menu at this context length, a multiple of CONTEXT_STEP, for this many rows."""
        key = (context_len, num_rows)
        known = self._arms
        if key not in known:
            first = next(iter(known.values()), None)
            if first is None:
                menu = {"widths": self.widths, "verify_widths": self.verify_widths}
                first = Arms.of(self.acceptance, self.latency, **menu, context_len=context_len)
            known[key] = first.at(self.latency, *key)
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
    _call: DepthCall = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._call = self.predictor.call(self.temperature)

    def shape_of(self, rows: Sequence[Row]) -> Shape:
        state = rows[0].state
        # a step that also ends the prompt has no hidden state before it
        if len(rows) > 1 or state.hidden_of is None:
            return super().shape_of(rows)
        arms = self.arms(context_key(rows))
        return arms.shapes[self._call.best_arm(arms.struct, state.hidden_of, state.tokens[-1])]


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

    _shapes: dict[tuple[int, int], Shape] = field(default_factory=dict, init=False, repr=False)

    def shape_of(self, rows: Sequence[Row]) -> Shape:
        key = (context_key(rows), len(rows))
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._stopping(*key)
        return shape

    def _stopping(self, context_len: int, num_rows: int) -> Shape:
        """Rows share the cost of a growth step and the marginal cost of verified nodes."""
        arms = self.arms(context_len, num_rows)
        shape = arms.shapes[arms.calibrated_best]
        if shape.depth == 0:
            return shape
        draft_ms = self.latency.draft.graphs_ms(num_rows * shape.width, context_len)
        step_ms = (draft_ms + self.latency.growth_host_ms) / num_rows
        most = min(num_rows * self.verify_widths[-1], self.latency.verify.sizes[-1])
        node_ms = self.latency.verify.marginal_ms(most, context_len)[::num_rows]
        rate = arms.rate / self.scale  # in expected tokens, which are the nodes' probabilities
        stop = SmallGain(shape.width, tuple(rate * ms for ms in node_ms), rate * step_ms)
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
