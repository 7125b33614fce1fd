"""What a client asks of the batch, and what it receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from yggdrasil.config import GenerateConfig

__all__ = [
    "DEFECT",
    "Event",
    "FinishReason",
    "Observer",
    "Request",
    "RequestReport",
    "StepReport",
    "TokenLogProb",
]

DEFECT = "internal error; the server's log has more"  # an exception's own words can hold paths and a stack
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogProb:
    """A token with what the target gave it before temperature and filters: the same with speculation and
    without.

    Args:
        token: Its id.
        log_prob: Natural logarithm.
        top: The likeliest tokens at its place, (id, log-probability), likeliest first; as many as were
            asked for.
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Event:
    """What one step, or the end, brought a request.

    Args:
        text: Released text; empty while a character or a stop text is unfinished.
        tokens: Emitted tokens.
        log_probs: Of those tokens, when asked for.
        finish: Why this is the last event; None when it is not.
        error: In words, when `finish` is "error".
    """

    text: str
    tokens: Sequence[int]
    log_probs: Sequence[TokenLogProb] = ()
    finish: FinishReason | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One completion.

    Args:
        prompt: At least one token.
        config: Limits, stop texts and sampling; `plain` is the same as `speculation=0`.
        speculation: Most draft tokens of a step; None leaves it to the policy, 0 decodes this row without
            speculation.
        num_top: Log-probabilities wanted for every emitted token: its own and this many of the likeliest;
            None wants none.
        on_event: Called after every step that emitted something and at the end, in the batcher's thread;
            must return at once.
    """

    prompt: Sequence[int]
    config: GenerateConfig = field(default_factory=GenerateConfig)
    speculation: int | None = None
    num_top: int | None = None
    on_event: Callable[[Event], None] = lambda event: None


@dataclass(frozen=True)
class RequestReport:
    """One finished request in figures.

    Args:
        shared_tokens: Prompt tokens whose KV another request had left.
        target_passes: Steps that emitted something for it.
        preemptions: Times it lost its pages and was computed again.
        queue_ms: Until it was first admitted.
        ttft_ms: From arrival to the first token; 0 when there was none.
        total_ms: From arrival to the end.
    """

    finish: FinishReason
    prompt_tokens: int
    emitted_tokens: int
    shared_tokens: int
    target_passes: int
    preemptions: int
    queue_ms: float
    ttft_ms: float
    total_ms: float

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token after the first step; 0 for a single token."""
        return (
            (self.total_ms - self.ttft_ms) / (self.emitted_tokens - 1) if self.emitted_tokens > 1 else 0.0
        )


@dataclass(frozen=True)
class StepReport:
    """One step of the batch in figures.

    Args:
        gamma: Speculative length that the policy chose.
        prompt_tokens: Tokens of prompts that ran in the target's forward, roots not counted.
        drafted: Draft tokens verified, row by row of the rows that emitted.
        emitted: Tokens that the target gave them: accepted + 1. Those after the end of a text, which no
            client gets, are among them.
        returned: Tokens that clients received, over all rows.
        max_lag: L_max: tokens that the draft's KV lagged behind in the worst row when the step began.
        catch_up_ms: Bringing the draft's KV up to the text.
        draft_ms: Drafting, that included.
        total_ms: The whole step; what is neither drafting nor verifying is the host's.
        running: Rows after the step.
        waiting: Queued requests after it.
        free_pages: KV pages in the free queue after it.
        num_pages: KV pages in all; more while the draft's room is lent to them.
        is_draft_in: Whether the draft's weights are in memory.
    """

    gamma: int
    prompt_tokens: int
    drafted: tuple[int, ...]
    emitted: tuple[int, ...]
    returned: int
    max_lag: int
    catch_up_ms: float
    draft_ms: float
    verify_ms: float
    total_ms: float
    running: int
    waiting: int
    free_pages: int
    num_pages: int
    is_draft_in: bool = True

    @property
    def batch_size(self) -> int:
        """B: rows that emitted something."""
        return len(self.emitted)

    @property
    def goodput(self) -> float:
        """Emitted tokens per second."""
        return sum(self.emitted) / self.total_ms * 1e3


class Observer:
    """Called after every step and every finished request, in the batcher's thread; this one listens to
    nothing.
    """

    def on_step(self, report: StepReport) -> None:
        """After every step."""

    def on_finish(self, report: RequestReport) -> None:
        """After every request."""
