"""How many draft and prompt tokens a step takes: as many as fill the graph that runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["PROMPT_TOKENS", "PROMPT_VALUE", "draft_budget", "prompt_budget"]

# Prompt tokens that run together with decoding rows. More would delay those rows and help the prompt
# little: wide forwards are bound by arithmetic.
PROMPT_TOKENS = 32
PROMPT_SHARE = 8  # while prompts wait, an eighth of the largest graph stays free for them
MIN_PROMPT_TOKENS = 8  # with fewer per step, a prompt would wait too long for its first token
# Value of a prompt token in emitted tokens: at 1 prompts displace drafts, at 0.5 rows wait for their
# prompts (bench/LOG.md).
PROMPT_VALUE = 0.8
MIN_FILL = 0.8  # a graph twice as wide takes twice as long, even if half of its tokens are padding


def draft_budget(widths: Sequence[int], batch_size: int, waiting: int) -> int:
    """Draft tokens that fit in the largest graph, next to the roots and the share of waiting prompts.

    >>> [draft_budget((16, 32, 64), 20, waiting) for waiting in (0, 3, 100)]
    [44, 41, 36]
    """
    return max(0, widths[-1] - min(waiting, widths[-1] // PROMPT_SHARE) - batch_size)


def prompt_budget(widths: Sequence[int], num_tokens: int, wanted: int) -> int:
    """Prompt tokens that run together with `num_tokens` roots and drafts.

    They fill the graph that PROMPT_TOKENS more tokens need. If that graph would stay too empty, they fill
    the one that MIN_PROMPT_TOKENS more need.

    Args:
        widths: Sizes of the graphs, ascending.
        num_tokens: Tokens of the rows that decode.
        wanted: Prompt tokens that wait.

    >>> [prompt_budget((16, 32, 64), 12, wanted) for wanted in (2, 14, 25, 100)]
    [2, 14, 20, 52]
    """
    if num_tokens == 0 or wanted == 0 or num_tokens >= widths[-1]:
        return max(0, min(wanted, widths[-1] - num_tokens))

    def width(more: int) -> int:
        return widths[bisect_left(widths, min(num_tokens + min(wanted, more), widths[-1]))]

    wide = width(PROMPT_TOKENS)
    is_filled = num_tokens + wanted >= MIN_FILL * wide
    return min(wanted, (wide if is_filled else width(MIN_PROMPT_TOKENS)) - num_tokens)
