"""What a step of many rows emits whose drafts compete for verification.

Shapes: D = depths of a chain, N = graphs of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from yggdrasil.policy.acceptance import POOL_STEPS, Acceptance
from yggdrasil.policy.gamma.budget import PROMPT_TOKENS, PROMPT_VALUE, prompt_budget
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.stopping import SmallGain
from yggdrasil.state import Shape

__all__ = ["Chains", "Expected", "best_chains"]


class Expected(NamedTuple):
    """The prediction of a step.

    Args:
        accepted: Accepted tokens, of a row or of all rows.
        ms: Milliseconds of the step.
        prompt_tokens: Prompt tokens of the whole batch that run along.
    """

    accepted: float
    ms: float
    prompt_tokens: int = 0

    def rate(self, num_rows: int) -> float:
        """Emitted tokens and the value of prompts per millisecond, if `accepted` is that of all rows."""
        return (num_rows + self.accepted + PROMPT_VALUE * self.prompt_tokens) / self.ms


class Chains(NamedTuple):
    """A step of chains.

    Args:
        shape: Of every row.
        expected: With the accepted tokens of all rows.
    """

    shape: Shape
    expected: Expected


def best_chains(
    acceptance: Acceptance,
    latency: LatencyModel,
    *,
    num_rows: int,
    context_len: int,
    waiting: int = 0,
    scale: float = 1.0,
) -> Chains | None:
    """The step of chains that emits most tokens per millisecond if the batch verifies its likeliest drafts.

    Every row drafts up to the same depth. The best of all rows fill a graph of the target, so a row may
    have many verified drafts, and another none. An arm of `Arms`, which verifies equally many in every row,
    gains less. The calibration knows what a large batch gains by this; a batch of B gains 1 - 1/B of it.

    A chain ends early where it is less likely than the last draft that is expected to be verified.

    Args:
        waiting: Prompt tokens that wait to run along.
        scale: Accepted tokens over those that the calibration expects.

    Returns:
        None if the pair was calibrated without chains, or if no graph has room for a draft.

    Cost: some 0.05 ms.
    Source: Yggdrasil Eq. (3) over the selection of TETRIS, which Nightjar describes in section 6.1.
    """
    drafts, prompts = _tokens(latency.verify.sizes, num_rows, waiting)
    if not acceptance.pooled or not drafts:
        return None
    totals = [num_rows + count + more for count, more in zip(drafts, prompts, strict=True)]
    verify_ms_N = np.array(latency.verify.at_each(totals, context_len))
    growth_ms = latency.draft.graphs_ms(num_rows, context_len)
    step_ms = latency.draft.graphs_ms(2 * num_rows, context_len) - growth_ms + latency.step_host_ms
    growth_ms += latency.growth_host_ms
    pooled_DN, alike_DN = acceptance.chains_accepted([count / num_rows for count in drafts])
    accepted_DN = scale * (num_rows * alike_DN + (num_rows - 1) * (pooled_DN - alike_DN))
    depth_D1 = np.arange(1, len(accepted_DN) + 1)[:, None]
    ms_DN = step_ms + growth_ms * depth_D1 + verify_ms_N
    rate_DN = (num_rows + accepted_DN + PROMPT_VALUE * np.array(prompts)) / ms_DN
    level, graph = divmod(int(rate_DN.argmax()), len(drafts))
    depth = 1 + level
    # in expected tokens, which are the nodes' probabilities
    min_gain = float(rate_DN[level, graph]) / scale * growth_ms / num_rows
    threshold = _lowest_acceptance(acceptance, depth, drafts[graph] / num_rows)
    stop = SmallGain(1, (threshold,) * depth, min_gain)
    expected = Expected(float(accepted_DN[level, graph]), float(ms_DN[level, graph]), prompts[graph])
    return Chains(Shape(1, depth, stop=stop), expected)


def _tokens(sizes: Sequence[int], num_rows: int, waiting: int) -> tuple[list[int], list[int]]:
    """Draft tokens and prompt tokens that fill each graph next to the roots."""
    reserved = num_rows + min(waiting, PROMPT_TOKENS)
    drafts = [size - reserved for size in sizes if size > reserved]
    prompts = [prompt_budget(sizes, num_rows + count, waiting) if waiting else 0 for count in drafts]
    return drafts, prompts


def _lowest_acceptance(acceptance: Acceptance, depth: int, drafts_per_row: float) -> float:
    """Acceptance of the last draft of a large batch that verifies the likeliest, this many a row."""
    last = min(drafts_per_row, depth)
    first = max(0.0, last - 1 / POOL_STEPS)
    gain = acceptance.pooled_accepted(depth, last) - acceptance.pooled_accepted(depth, first)
    return gain / (last - first)
