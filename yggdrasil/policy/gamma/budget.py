"""How many tokens of prompts a step takes next to its rows' own: what fills the graph that runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["PROMPT_TOKENS", "draft_room", "prompt_room"]

# that run next to rows which decode: more would stall those for longer and gain the prompt little, for wide
# forwards are bound by arithmetic
PROMPT_TOKENS = 32
PROMPT_SHARE = 8  # an eighth of the largest graph is never speculated away while prompts wait: they go on
LEAST_PROMPT = 8  # fewer a step would keep a prompt waiting for its first token
WELL_FILLED = 0.8  # a graph twice as wide takes twice as long, whether its tokens are padding or not


def draft_room(widths: Sequence[int], batch_size: int, waiting: int) -> int:
    """Draft tokens that the largest graph holds next to this many roots and the share of prompts that wait.

    >>> [draft_room((16, 32, 64), 20, waiting) for waiting in (0, 3, 100)]
    [44, 41, 36]
    """
    return max(0, widths[-1] - min(waiting, widths[-1] // PROMPT_SHARE) - batch_size)


def prompt_room(widths: Sequence[int], num_tokens: int, wanted: int) -> int:
    """Prompt tokens that run next to `num_tokens` roots and drafts: what fills the graph for PROMPT_TOKENS
    more, or for LEAST_PROMPT where it stays too empty.

    Args:
        widths: Sizes of the graphs, ascending.
        wanted: Prompt tokens that wait.

    >>> [prompt_room((16, 32, 64), 12, wanted) for wanted in (2, 14, 25, 100)]
    [2, 14, 20, 52]
    """
    if num_tokens == 0 or wanted == 0 or num_tokens >= widths[-1]:
        return max(0, min(wanted, widths[-1] - num_tokens))

    def width(more: int) -> int:
        return widths[bisect_left(widths, min(num_tokens + min(wanted, more), widths[-1]))]

    wide = width(PROMPT_TOKENS)
    is_filled = num_tokens + wanted >= WELL_FILLED * wide
    return min(wanted, (wide if is_filled else width(LEAST_PROMPT)) - num_tokens)
