"""What a step of many rows emits whose drafts compete for verification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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

    Cost: some 0.2 ms.
    Source: Yggdrasil Eq. (3) over the selection of TETRIS, which Nightjar describes in section 6.1.
    """
    steps = _steps(acceptance, latency, num_rows, context_len, waiting, scale)
    best = max(steps, key=lambda step: step.expected.rate(num_rows), default=None)
    if best is None:
        return None
    growth_ms = latency.draft.graphs_ms(num_rows, context_len) + latency.growth_host_ms
    # in expected tokens, which are the nodes' probabilities
    min_gain = best.expected.rate(num_rows) / scale * growth_ms / num_rows
    threshold = _lowest_acceptance(acceptance, best.depth, best.drafts_per_row)
    stop = SmallGain(1, (threshold,) * best.depth, min_gain)
    return Chains(Shape(1, best.depth, stop=stop), best.expected)


class _Step(NamedTuple):
    depth: int
    drafts_per_row: float
    expected: Expected


def _steps(
    acceptance: Acceptance,
    latency: LatencyModel,
    num_rows: int,
    context_len: int,
    waiting: int,
    scale: float,
) -> Iterator[_Step]:
    """Chains of every depth, as many of their nodes as fill each graph next to the prompts."""
    sizes = latency.verify.sizes
    reserved = num_rows + min(waiting, PROMPT_TOKENS)
    drafts = [size - reserved for size in sizes if size > reserved]
    prompts = [prompt_budget(sizes, num_rows + count, waiting) if waiting else 0 for count in drafts]
    totals = [num_rows + count + more for count, more in zip(drafts, prompts, strict=True)]
    verify_ms = latency.verify.at_each(totals, context_len)
    root_ms = latency.draft.graphs_ms(2 * num_rows, context_len) + latency.step_host_ms
    growth_ms = latency.draft.graphs_ms(num_rows, context_len)
    for depth in range(1, len(acceptance.pooled) + 1):
        before_ms = root_ms + (depth - 1) * growth_ms + depth * latency.growth_host_ms
        for count, prompt_tokens, ms in zip(drafts, prompts, verify_ms, strict=True):
            drafts_per_row = count / num_rows
            alike = _accepted_alike(acceptance, depth, drafts_per_row)
            gain = acceptance.pooled_accepted(depth, drafts_per_row) - alike
            accepted = scale * (num_rows * alike + (num_rows - 1) * gain)
            yield _Step(depth, drafts_per_row, Expected(accepted, before_ms + ms, prompt_tokens))


def _lowest_acceptance(acceptance: Acceptance, depth: int, drafts_per_row: float) -> float:
    """Acceptance of the last draft of a large batch that verifies the likeliest, this many a row."""
    last = min(drafts_per_row, depth)
    first = max(0.0, last - 1 / POOL_STEPS)
    gain = acceptance.pooled_accepted(depth, last) - acceptance.pooled_accepted(depth, first)
    return gain / (last - first)


def _accepted_alike(acceptance: Acceptance, depth: int, drafts_per_row: float) -> float:
    """Mean accepted tokens of a row if all rows verify equally many drafts."""
    whole = min(int(drafts_per_row), depth - 1)
    low, high = (acceptance.expected_emitted(1, depth, 1 + drafts) for drafts in (whole, whole + 1))
    return low - 1.0 + min(1.0, drafts_per_row - whole) * (high - low)
