"""The tree structures of other systems, as values of `Shape`: one engine, one set of graphs, one policy
protocol for all of them.

```
sequence            chain of D                    vanilla speculative decoding, vLLM-Spec
dynamic_sequence    chain, stops when unsure      DISCO
k_ary               k best children everywhere    SpecInfer
sequoia             static, by dynamic programme  Sequoia
opt_tree            equal width, stops when flat  OPT-Tree
equal_growth        W nodes anywhere, D times     Yggdrasil
```

All run through `FixedShape`, and all that read the draft's probabilities read them scaled to what the
target takes (`PlattScale`). On a device the two with a stop rule wait for the draft after every step; that
is their price. On a CPU equal growth may have one, too (`StoppingShape`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.errors import ConfigError
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.state import Shape
from yggdrasil.tree import TokenTree

__all__ = [
    "LowConfidence",
    "SmallGain",
    "dynamic_sequence",
    "equal_growth",
    "k_ary",
    "last_gain_plain",
    "opt_tree",
    "sequence",
    "sequoia",
    "sequoia_latency",
    "static_accepted",
    "structure_ms",
]

Levels = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class LowConfidence:
    """Stop a chain once its last token has less than this probability.

    Args:
        threshold: Probability of the token after its parent, not of the path; scaled as the policy's edges
            are.

    Example:
        >>> str(LowConfidence(0.4))
        'until P<0.4'
    """

    threshold: float

    def enough(self, tree: TokenTree) -> bool:
        log_probs: list[float] = tree.log_prob_N[-2:].tolist()  # sync: the chain ends or goes on
        return log_probs[-1] - log_probs[0] < math.log(self.threshold)

    @property
    def native(self) -> tuple[Tensor, float]:
        return torch.empty(0, dtype=torch.float64), math.log(self.threshold)

    def __str__(self) -> str:
        return f"until P<{self.threshold:g}"


@dataclass(frozen=True)
class SmallGain:
    """Stop equal growth once the last step raised what the best nodes are worth by less than a minimum.

    A node is worth the probability that it is accepted less the price of verifying it, which rises with its
    rank among all nodes; one that is worth less than nothing is left out.

    Args:
        width: W, the nodes of the last step.
        prices: Tokens that verifying the best node costs, the second best, and so on, never falling; beyond
            the last no node is verified.
        min_gain: Tokens that a step must add.

    Example:
        >>> str(SmallGain(8, (0.0,) * 32, 0.1))
        'until gain<0.1'
    """

    width: int
    prices: tuple[float, ...]
    min_gain: float

    def enough(self, tree: TokenTree) -> bool:
        if tree.is_cpu:
            return bool(
                torch.ops.ygg.last_gain(tree.arrays[3], len(tree), self.width, self._prices) < self.min_gain
            )
        # sync: the tree ends or goes on
        return bool(
            last_gain_plain(tree.log_prob_N.numpy(force=True), self.width, self.prices) < self.min_gain
        )

    @cached_property
    def _prices(self) -> Tensor:
        return torch.tensor(self.prices, dtype=torch.float64)

    @property
    def native(self) -> tuple[Tensor, float]:
        return self._prices, self.min_gain

    def __str__(self) -> str:
        return f"until gain<{self.min_gain:g}"


def last_gain_plain(
    log_prob_XN: npt.ArrayLike, width: int, prices: Sequence[float]
) -> npt.NDArray[np.float64]:
    """What the last `width` nodes of trees, (..., N), add to the worth of the best nodes, (...): the
    specification of `ygg::last_gain`.
    """
    values = np.exp(np.asarray(log_prob_XN, dtype=np.float64))

    def worth(nodes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        best = np.sort(nodes, axis=-1)[..., ::-1][..., : len(prices)]
        total: npt.NDArray[np.float64] = np.maximum(best - np.array(prices)[: best.shape[-1]], 0.0).sum(
            axis=-1
        )
        return total

    return worth(values) - worth(values[..., : values.shape[-1] - width])


def sequence(depth: int) -> Shape:
    """A chain of `depth` tokens, all verified.

    Source: Leviathan et al. 2023; what vLLM runs with a draft model.
    """
    return Shape(1, depth, verify=depth + 1)


def dynamic_sequence(max_depth: int, threshold: float) -> Shape:
    """A chain that ends with the first token of less probability than `threshold`; that token is verified,
    too.

    Source: DISCO (Mamou et al. 2024). Departure: DISCO trains a classifier on the draft's probability, its
    entropy and the position; here the probability alone decides, against a threshold tuned on validation
    text."""
    return Shape(1, max_depth, verify=max_depth + 1, stop=LowConfidence(threshold))


def equal_growth(width: int, depth: int, verify: int | None = None) -> Shape:
    """W nodes anywhere in each of D steps; K nodes verified, or as many as the objective likes.

    Source: Yggdrasil section 4.2.
    """
    return Shape(width, depth, verify=verify)


def opt_tree(budget: int, width: int, max_depth: int, min_gain: float) -> Shape:
    """The tree that maximises the draft's expected accepted length for `budget` verified nodes, grown until
    a step adds too little.

    Source: OPT-Tree (Wang et al. 2024). Departures: OPT-Tree's layers hold as many nodes as its budget,
    children of the layer before; here a step attaches `width` nodes anywhere, so that a draft graph of the
    menu runs it. Both stop when the expected accepted length of the best `budget` nodes rose by less than
    `min_gain`."""
    return Shape(width, max_depth, verify=budget, stop=SmallGain(width, (0.0,) * budget, min_gain))


def k_ary(k: int, depth: int, *, num_nodes: int | None = None) -> Shape:
    """Every node gets its `k` best children, level by level.

    Args:
        k: Children per node.
        depth: Levels below the root.
        num_nodes: Cut the last level, root included; None keeps the complete tree.

    Source: SpecInfer (Miao et al. 2024), its expansion of one draft.
    """
    levels: list[tuple[tuple[int, int], ...]] = []
    first = 0
    size = 1
    room = math.inf if num_nodes is None else num_nodes - 1
    for _ in range(depth):
        level = [(parent, rank) for parent in range(first, first + size) for rank in range(k)]
        level = level[: int(min(room, len(level)))]
        if level:
            levels.append(tuple(level))
        first = first + size
        size = len(level)
        room = room - len(level)
    return _static(tuple(levels))


def sequoia(by_rank: Sequence[float], num_nodes: int, max_depth: int) -> Shape:
    """The static tree of exactly `num_nodes` nodes that accepts the most tokens in expectation.

    Args:
        by_rank: P(the target's token is the draft's r-th candidate), at every node alike.
        num_nodes: Root included.
        max_depth: Most levels below the root.

    Raises:
        ConfigError: so many ranks and levels hold fewer nodes.

    Source: Sequoia (Chen et al. 2024), section 3.1. Departure: our draft proposes its best tokens, so
    `by_rank` counts how often the target says each of them, where Sequoia's counts acceptances of its
    sampling without replacement."""
    return _static(_Programme(by_rank, num_nodes, max_depth).levels(num_nodes, max_depth))


def sequoia_latency(
    by_rank: Sequence[float],
    max_depth: int,
    latency: LatencyModel,
    verify_widths: Sequence[int],
    context_len: int,
) -> Shape:
    """The `sequoia` tree whose size and depth emit the most tokens per millisecond by the profile.

    Sizes are those of the menu: a smaller tree costs as much as the graph that holds it. There is no plain
    arm: it always speculates.

    Source: Sequoia section 3.3, "hardware-aware tree optimizer". Departure: a level costs what the draft's
    graph of its width costs, and the host counts."""
    programme = _Programme(by_rank, max(verify_widths), max_depth)
    shapes = [
        _static(programme.levels(size, depth))
        for depth in range(1, max_depth + 1)
        for size in verify_widths
        if programme.holds(size, depth)
    ]
    if not shapes:
        raise ConfigError(
            "verify_widths",
            tuple(verify_widths),
            f"a size that {len(by_rank)} ranks and {max_depth} levels can fill",
        )

    def rate(shape: Shape) -> float:
        return (1 + static_accepted(shape, by_rank)) / structure_ms(
            shape, latency, verified=shape.num_nodes, context_len=context_len
        )

    return max(shapes, key=rate)


class _Programme:
    """Sequoia's dynamic programme: `_value[d, n]` is the greatest expected length, root included, of a tree
    of n nodes and at most d levels.

    A tree is a root over one subtree per rank, any of them empty. `_forest[d][r, m]` is the greatest value
    of m nodes shared among the subtrees of ranks r and later, each of at most d levels: a max-plus
    convolution of `by_rank[r] * _value[d]` with `_forest[d][r + 1]`; `_size[d][r, m]` remembers how many of
    them rank r takes."""

    def __init__(self, by_rank: Sequence[float], num_nodes: int, max_depth: int) -> None:
        self._num_ranks = len(by_rank)
        self._value = np.full((max_depth + 1, num_nodes + 1), -np.inf)
        self._value[:, :2] = 0.0, 1.0
        self._size = np.zeros((max_depth, self._num_ranks, num_nodes), dtype=int)
        for depth in range(max_depth):
            self._value[depth + 1, 1:] = 1 + self._forest(by_rank, depth, num_nodes)

    def _forest(self, by_rank: Sequence[float], depth: int, num_nodes: int) -> npt.NDArray[np.float64]:
        taken, given = np.indices((num_nodes, num_nodes))  # rank r takes `given` of the m = `taken` nodes
        rest = taken - given
        best = np.where(np.arange(num_nodes) == 0, 0.0, -np.inf)
        for rank in range(self._num_ranks - 1, -1, -1):
            subtree = self._value[depth, :num_nodes]
            value = np.where(
                np.isfinite(subtree), by_rank[rank] * np.where(np.isfinite(subtree), subtree, 0.0), -np.inf
            )
            total = np.where(rest >= 0, value[given] + best[rest], -np.inf)
            self._size[depth, rank] = total.argmax(axis=1)
            best = total.max(axis=1)
        return best

    def holds(self, num_nodes: int, depth: int) -> bool:
        """Whether any tree of at most `depth` levels has exactly so many nodes."""
        return bool(np.isfinite(self._value[depth, num_nodes]))

    def levels(self, num_nodes: int, depth: int) -> Levels:
        """The best tree, breadth first."""
        if not self.holds(num_nodes, depth):
            raise ConfigError(
                "num_nodes", num_nodes, f"at most what {self._num_ranks} ranks and {depth} levels hold"
            )
        levels: list[tuple[tuple[int, int], ...]] = []
        # node and the size of its subtree
        parents = [(0, num_nodes)]
        next_id = 1
        for below in range(depth - 1, -1, -1):
            children = [
                (parent, rank, size)
                for parent, total in parents
                for rank, size in self._children(total, below)
            ]
            if not children:
                break
            levels.append(tuple((parent, rank) for parent, rank, _ in children))
            parents = [(next_id + index, size) for index, (_, _, size) in enumerate(children)]
            next_id += len(children)
        return tuple(levels)

    def _children(self, total: int, below: int) -> list[tuple[int, int]]:
        """Rank and subtree size of the children of a node whose own subtree has `total` nodes."""
        left = total - 1
        children = []
        for rank in range(self._num_ranks):
            size = int(self._size[below, rank, left])
            left -= size
            children += [(rank, size)] if size else []
        return children


def _static(levels: Levels) -> Shape:
    return Shape(
        max((len(level) for level in levels), default=1),
        len(levels),
        verify=1 + sum(map(len, levels)),
        levels=levels,
    )


def static_accepted(shape: Shape, by_rank: Sequence[float]) -> float:
    """Draft tokens that a static tree is expected to have accepted: over its nodes, the product of
    `by_rank` along the path.
    """
    assert shape.levels is not None
    reached = [1.0]
    for parent, rank in (place for level in shape.levels for place in level):
        reached.append(reached[parent] * by_rank[rank])
    return sum(reached) - 1


def structure_ms(shape: Shape, latency: LatencyModel, *, verified: int, context_len: int) -> float:
    """The denominator of Eq. 3 for any structure: what one step costs by the profile.

    Args:
        shape: Of the step, as it was grown.
        latency: The profile.
        verified: K.
        context_len: Committed tokens.

    Source: Yggdrasil Eq. (3). A level wider than the widest draft graph of a step runs in parts of that
    size."""
    if shape.levels is None:
        return latency.step_ms(shape.width, shape.depth, verified, context_len)
    widest = latency.draft.widest
    parts = [
        min(widest, len(level) - start)
        for level in shape.levels[:-1]
        for start in range(0, len(level), widest)
    ]
    settled_ms = latency.before_verify_ms(1, 1, context_len) + (shape.depth - 1) * latency.growth_host_ms
    return (
        settled_ms
        + sum(latency.draft.at(part, context_len) for part in parts)
        + latency.verify.at(verified, context_len)
    )
