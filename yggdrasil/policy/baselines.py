"""The tree structures of other systems, as values of `Shape`.

```
sequence            chain of D                     vanilla speculative decoding, vLLM-Spec
dynamic_sequence    chain, stops when unsure       DISCO
k_ary               k best children everywhere     SpecInfer
sequoia             static, by dynamic programme   Sequoia
opt_tree            equal width, stops when flat   OPT-Tree
equal_growth        W nodes anywhere, D times      Yggdrasil
```

All use the same engine, graphs and policy protocol, and run through `FixedShape`. All that read the draft's
probabilities read them scaled to the target's acceptance (`PlattScale`). On a device, the two structures
with a stop rule wait for the draft after every growth step, which costs time. On a CPU equal growth may
have a stop rule, too (`StoppingShape`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from yggdrasil.errors import ConfigError
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.stopping import LowConfidence, SmallGain
from yggdrasil.state import Shape

__all__ = [
    "dynamic_sequence",
    "equal_growth",
    "k_ary",
    "opt_tree",
    "sequence",
    "sequoia",
    "sequoia_latency",
    "static_accepted",
    "structure_ms",
]

Levels = tuple[tuple[tuple[int, int], ...], ...]


def sequence(depth: int) -> Shape:
    """A chain of `depth` tokens, all verified.

    Source: Leviathan et al. 2023; what vLLM runs with a draft model.
    """
    return Shape(1, depth, verify=depth + 1)


def dynamic_sequence(max_depth: int, threshold: float) -> Shape:
    """A chain that ends with the first token less probable than `threshold`; that token is verified, too.

    Source: DISCO (Mamou et al. 2024). Departure: DISCO trains a classifier on the draft's probability, its
    entropy and the position; here only the probability decides, with a threshold tuned on validation text.
    """
    return Shape(1, max_depth, verify=max_depth + 1, stop=LowConfidence(threshold))


def equal_growth(width: int, depth: int, verify: int | None = None) -> Shape:
    """W nodes anywhere in each of D steps; K nodes are verified, or as many as the objective selects.

    Source: Yggdrasil section 4.2.
    """
    return Shape(width, depth, verify=verify)


def opt_tree(budget: int, width: int, max_depth: int, min_gain: float) -> Shape:
    """The tree of `budget` verified nodes with the largest expected accepted length.

    Growth stops once a step raises the expected accepted length of the best `budget` nodes by less than
    `min_gain`.

    Source: OPT-Tree (Wang et al. 2024), which stops alike. Departure: each layer of OPT-Tree has `budget`
    nodes, children of the layer before; here a step attaches `width` nodes anywhere, so that a draft graph
    of the menu runs it.
    """
    return Shape(width, max_depth, verify=budget, stop=SmallGain(width, (0.0,) * budget, min_gain))


def k_ary(k: int, depth: int, *, num_nodes: int | None = None) -> Shape:
    """Every node gets its `k` best children, level by level.

    Args:
        num_nodes: Size, root included, to which the tree is cut in its last level; None cuts nothing.

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
        first += size
        size = len(level)
        room -= len(level)
    return _static(tuple(levels))


def sequoia(by_rank: Sequence[float], num_nodes: int, max_depth: int) -> Shape:
    """The static tree of exactly `num_nodes` nodes with the most accepted tokens in expectation.

    Args:
        by_rank: P(the target's token is the draft's r-th candidate), the same at every node.
        num_nodes: Size, root included.
        max_depth: Maximum levels below the root.

    Raises:
        ConfigError: a tree with these ranks and levels has fewer nodes.

    Source: Sequoia (Chen et al. 2024), section 3.1. Departure: our draft proposes its best tokens, so
    `by_rank` counts how often each of them is the target's token; Sequoia counts acceptances of its
    sampling without replacement.
    """
    return _static(_Programme(by_rank, num_nodes, max_depth).levels(num_nodes, max_depth))


def sequoia_latency(
    by_rank: Sequence[float],
    max_depth: int,
    latency: LatencyModel,
    verify_widths: Sequence[int],
    context_len: int,
) -> Shape:
    """The `sequoia` tree whose size and depth emit the most tokens per millisecond by the profile.

    Sizes are those of the menu: a smaller tree costs as much as the graph that runs it. Plain decoding is
    not a candidate.

    Source: Sequoia section 3.3, "hardware-aware tree optimizer". Departure: the cost of a level is that of
    the draft's graph of its width, and the host's time is included.
    """
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
        ms = structure_ms(shape, latency, verified=shape.num_nodes, context_len=context_len)
        return (1 + static_accepted(shape, by_rank)) / ms

    return max(shapes, key=rate)


class _Programme:
    """Sequoia's dynamic programme over trees of n nodes and at most d levels.

    `_value[d, n]` is the largest expected length of such a tree, root included. A tree is a root over one
    subtree per rank, any of them empty. The forest of ranks r and later with m nodes, each subtree of at
    most d levels, has as its best value a max-plus convolution of `by_rank[r] * _value[d]` with the forest
    of ranks r + 1 and later. `_size[d][r, m]` is the number of nodes that rank r takes.
    """

    def __init__(self, by_rank: Sequence[float], num_nodes: int, max_depth: int) -> None:
        self._num_ranks = len(by_rank)
        self._value = np.full((max_depth + 1, num_nodes + 1), -np.inf)
        self._value[:, :2] = 0.0, 1.0
        self._size = np.zeros((max_depth, self._num_ranks, num_nodes), dtype=int)
        for depth in range(max_depth):
            self._value[depth + 1, 1:] = 1 + self._forest(by_rank, depth, num_nodes)

    def _forest(self, by_rank: Sequence[float], depth: int, num_nodes: int) -> npt.NDArray[np.float64]:
        total_nodes, subtree_nodes = np.indices((num_nodes, num_nodes))
        rest = total_nodes - subtree_nodes
        best = np.where(np.arange(num_nodes) == 0, 0.0, -np.inf)
        for rank in range(self._num_ranks - 1, -1, -1):
            subtree = self._value[depth, :num_nodes]
            exists = np.isfinite(subtree)
            value = np.where(exists, by_rank[rank] * np.where(exists, subtree, 0.0), -np.inf)
            total = np.where(rest >= 0, value[subtree_nodes] + best[rest], -np.inf)
            self._size[depth, rank] = total.argmax(axis=1)
            best = total.max(axis=1)
        return best

    def holds(self, num_nodes: int, depth: int) -> bool:
        """Whether any tree of at most `depth` levels has exactly `num_nodes` nodes."""
        return bool(np.isfinite(self._value[depth, num_nodes]))

    def levels(self, num_nodes: int, depth: int) -> Levels:
        """The best tree, breadth first."""
        if not self.holds(num_nodes, depth):
            allowed = f"at most the size of a full tree of {self._num_ranks} ranks and {depth} levels"
            raise ConfigError("num_nodes", num_nodes, allowed)
        levels: list[tuple[tuple[int, int], ...]] = []
        parents = [(0, num_nodes)]  # each node with the size of its subtree
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
    width = max((len(level) for level in levels), default=1)
    return Shape(width, len(levels), verify=1 + sum(map(len, levels)), levels=levels)


def static_accepted(shape: Shape, by_rank: Sequence[float]) -> float:
    """Expected accepted draft tokens of a static tree: over nodes, the product of `by_rank` on the path."""
    assert shape.levels is not None
    reached = [1.0]
    for parent, rank in (place for level in shape.levels for place in level):
        reached.append(reached[parent] * by_rank[rank])
    return sum(reached) - 1


def structure_ms(shape: Shape, latency: LatencyModel, *, verified: int, context_len: int) -> float:
    """The denominator of Eq. 3 for any structure: milliseconds of one step by the profile.

    Source: Yggdrasil Eq. (3). A level wider than the draft's widest graph runs in parts of that size.
    """
    if shape.levels is None:
        return latency.step_ms(shape.width, shape.depth, verified, context_len)
    widest = latency.draft.widest
    parts = [
        min(widest, len(level) - start)
        for level in shape.levels[:-1]
        for start in range(0, len(level), widest)
    ]
    before_ms = latency.before_verify_ms(1, 1, context_len) + (shape.depth - 1) * latency.growth_host_ms
    levels_ms = sum(latency.draft.at(part, context_len) for part in parts)
    return before_ms + levels_ms + latency.verify.at(verified, context_len)
