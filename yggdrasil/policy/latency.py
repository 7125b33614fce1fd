"""T_draft(W) and T_verify(K), measured on this machine, at any context length.

Shapes: M = token counts, S = sizes of graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BUSY_FACTOR", "Curve", "LatencyModel"]

BUSY_FACTOR = 3.0  # times the predicted milliseconds: another process uses the machine


@dataclass(frozen=True)
class Curve:
    """Milliseconds of one model's forward by token count, at a few context lengths.

    Args:
        contexts: Measured context lengths, ascending.
        sizes: Measured token counts, ascending.
        ms: ms[i][j] at contexts[i], sizes[j].
    """

    contexts: tuple[int, ...]
    sizes: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...] = field(repr=False)

    def at(self, num_tokens: int, context_len: int) -> float:
        """Milliseconds of the smallest measured size that holds `num_tokens`.

        Linear between contexts, clamped at both ends.
        """
        column = min(bisect_left(self.sizes, num_tokens), len(self.sizes) - 1)
        place = bisect_left(self.contexts, context_len)
        if place == 0 or place == len(self.contexts):
            return self.ms[min(place, len(self.contexts) - 1)][column]
        low = self.contexts[place - 1]
        high = self.contexts[place]
        share = (context_len - low) / (high - low)
        return self.ms[place - 1][column] * (1 - share) + self.ms[place][column] * share

    def at_each(self, nums_tokens: Sequence[int], context_len: int) -> list[float]:
        """`at` for several token counts."""
        return [self.at(num_tokens, context_len) for num_tokens in nums_tokens]

    def graphs_ms(self, num_tokens: int, context_len: int) -> float:
        """Milliseconds of as many full graphs as `num_tokens` needs, and of one graph for the rest."""
        full, rest = divmod(num_tokens, self.sizes[-1])
        if full == 0:
            return self.at(rest, context_len)
        return full * self.at(self.sizes[-1], context_len) + (self.at(rest, context_len) if rest else 0.0)

    def graphs_each_ms(
        self, num_tokens_M: npt.NDArray[np.int64], context_len: int
    ) -> npt.NDArray[np.float64]:
        """`graphs_ms` for many token counts."""
        sizes_S = np.array(self.sizes)
        ms_S = np.array(self.at_each(self.sizes, context_len))
        full_M, rest_M = np.divmod(num_tokens_M, sizes_S[-1])
        rest_ms_M = np.where(rest_M, ms_S[sizes_S.searchsorted(rest_M)], 0.0)
        all_ms_M: npt.NDArray[np.float64] = full_M * ms_S[-1] + rest_ms_M
        return all_ms_M

    def marginal_ms(self, most: int, context_len: int) -> list[float]:
        """Milliseconds that each further token adds, up to `most` tokens; the first adds 0.

        The values are slopes of the largest convex curve that is nowhere above this curve at its sizes, 0
        where a wider graph was measured as quicker.
        Graph sizes come in steps, so a rule that adds tokens one by one would stop before a step that gains
        as a whole.
        """
        sizes = [1, *(size for size in self.sizes if 1 < size <= most)]
        hull: list[tuple[int, float]] = []
        for point in zip(sizes, self.at_each(sizes, context_len), strict=True):
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        slopes = [(max(0.0, _slope(low, high)), high[0] - low[0]) for low, high in pairwise(hull)]
        return [0.0, *(slope for slope, num_tokens in slopes for _ in range(num_tokens))]

    def slower(self, factors: Mapping[int, float]) -> Curve:
        """The curve of graphs that take a multiple of their milliseconds, by size."""
        by_size = [factors.get(size, 1.0) for size in self.sizes]
        return replace(
            self,
            ms=tuple(
                tuple(ms * factor for ms, factor in zip(row, by_size, strict=True)) for row in self.ms
            ),
        )

    def graph(self, num_tokens: int) -> int:
        """The size of the smallest graph that holds `num_tokens`, of the largest one if none does."""
        return self.sizes[min(bisect_left(self.sizes, num_tokens), len(self.sizes) - 1)]

    @property
    def widest(self) -> int:
        """Token count of the largest graph that a step uses; the next larger one is the prefill chunk's."""
        return self.sizes[-2:][0]

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> Curve:
        return cls(
            tuple(payload["contexts"]), tuple(payload["sizes"]), tuple(tuple(row) for row in payload["ms"])
        )


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


@dataclass(frozen=True)
class LatencyModel:
    """The profile of a pair on a machine.

    Args:
        growth_host_ms: Host time of one growth step outside the draft's graph.
        step_host_ms: Time of a speculative step outside growth and the target's graph: host time, and what
            the draft's first forward takes longer than later ones, after the target's weights have replaced
            its own in the processor's caches.
        plain_host_ms: Host time of a plain step outside the graph.
        plain_share: Time of the target's forward when no draft runs between two of them, over `verify`. A
            small target then stays in the processor's caches.
        num_threads: Threads of the measured operators; 0 if nothing was measured.

    Source: Yggdrasil Fig. 5 and Eq. 3.
    """

    draft: Curve
    verify: Curve
    growth_host_ms: float
    step_host_ms: float
    plain_host_ms: float
    plain_share: float = 1.0
    num_threads: int = 0

    def plain_ms(self, context_len: int) -> float:
        """Milliseconds of one token without speculation."""
        return self.undrafted_ms(1, context_len)

    def undrafted_ms(self, num_tokens: int, context_len: int) -> float:
        """Milliseconds of a step in which no draft runs."""
        return self.plain_share * self.verify.at(num_tokens, context_len) + self.plain_host_ms

    def step_ms(self, width: int, depth: int, verify: int, context_len: int) -> float:
        """Milliseconds of one iteration: head draft, D - 1 growth forwards, verification, host time.

        Without growth steps no draft runs.
        """
        if depth == 0:
            return self.undrafted_ms(verify, context_len)
        return self.before_verify_ms(width, depth, context_len) + self.verify.at(verify, context_len)

    def before_verify_ms(self, width: int, depth: int, context_len: int) -> float:
        """The part of `step_ms` that does not depend on K: drafting and host time."""
        drafting = self.draft.at(2, context_len) + (depth - 1) * self.draft.at(width, context_len)
        return drafting + depth * self.growth_host_ms + self.step_host_ms

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> LatencyModel:
        return cls(
            draft=Curve.from_json(payload["draft"]),
            verify=Curve.from_json(payload["verify"]),
            growth_host_ms=payload["growth_host_ms"],
            step_host_ms=payload["step_host_ms"],
            plain_host_ms=payload["plain_host_ms"],
            plain_share=payload["plain_share"],
            num_threads=payload["threads"],
        )
