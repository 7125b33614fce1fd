"""What a step of many rows emits whose drafts compete for verification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.latency import LatencyModel

__all__ = ["Expected", "best_chains"]


class Expected(NamedTuple):
    """The prediction of a step.

    Args:
        accepted: Accepted tokens, of a row or of all rows.
        ms: Milliseconds of the step.
    """

    accepted: float
    ms: float


def best_chains(
    acceptance: Acceptance, latency: LatencyModel, *, num_rows: int, context_len: int, scale: float = 1.0
) -> Expected | None:
    """The step of chains that emits most tokens per millisecond if the batch verifies its likeliest drafts.

    Every row drafts equally many tokens. The best of all rows fill a graph of the target, so a row may have
    many verified drafts, and another none. An arm of `Arms`, which verifies equally many in every row,
    gains less.

    Args:
        scale: Accepted tokens over those that the calibration expects.

    Returns:
        The mean accepted tokens of a row, and the milliseconds. None if the pair was calibrated without
        chains, or if no graph has room for a draft.

    Cost: some 0.2 ms.
    Source: Yggdrasil Eq. (3) over the selection of TETRIS, which Nightjar describes in section 6.1.
    """
    steps = _steps(acceptance, latency, num_rows, context_len, scale)
    return max(steps, key=lambda step: (1.0 + step.accepted) / step.ms, default=None)


def _steps(
    acceptance: Acceptance, latency: LatencyModel, num_rows: int, context_len: int, scale: float
) -> Iterator[Expected]:
    """Chains of every depth, as many of their nodes as fill each graph."""
    sizes = [size for size in latency.verify.sizes if size > num_rows]
    verify_ms = latency.verify.at_each(sizes, context_len)
    root_ms = latency.draft.graphs_ms(2 * num_rows, context_len) + latency.step_host_ms
    growth_ms = latency.draft.graphs_ms(num_rows, context_len)
    for depth in range(1, len(acceptance.pooled) + 1):
        before_ms = root_ms + (depth - 1) * growth_ms + depth * latency.growth_host_ms
        for size, ms in zip(sizes, verify_ms, strict=True):
            drafts_per_row = (size - num_rows) / num_rows
            yield Expected(scale * acceptance.pooled_accepted(depth, drafts_per_row), before_ms + ms)
