"""The state of a request in the batcher: what it has emitted, what it may still emit, and its times."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from yggdrasil.kernels.threads import one_torch_thread
from yggdrasil.serve.request import CohortName, FinishReason, Request, RequestReport, TokenLogProb
from yggdrasil.state import DecodeState, Row, truncate
from yggdrasil.text.tokenizer import TextStream

__all__ = ["Ticket", "token_log_probs"]

UNQUEUED = CohortName("", "", "")


@dataclass(eq=False)
class Ticket:
    """The state of one request.

    Attributes:
        limit: Largest number of tokens to emit.
        ends: Tokens that end its text.
        speculation: Largest number of draft tokens in a step, None without a limit.
        cohort: Its cohort, from the moment it is queued.
        row: Its place in the batch; None while it waits.
        prompt_log_probs: Those computed so far, of the prompt's tokens from the second one on.
    """

    request: Request
    state: DecodeState
    stream: TextStream
    limit: int
    ends: Collection[int]
    speculation: int | None
    cohort: CohortName = UNQUEUED
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    first: float = 0.0
    row: Row | None = None
    shared_tokens: int = 0
    target_passes: int = 0
    preemptions: int = 0
    emitted_tokens: int = 0
    is_finished: bool = False
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)

    @property
    def running(self) -> Row:
        """The row of a request that is known to run."""
        assert self.row is not None
        return self.row

    @property
    def num_left(self) -> int:
        """Tokens that the request may still emit."""
        return self.limit - self.emitted_tokens

    @property
    def most_drafts(self) -> int:
        """Most draft tokens of a path that the request allows and can still emit."""
        most = self.num_left - 1
        return most if self.speculation is None else min(most, self.speculation)

    @property
    def num_unseen(self) -> int:
        """Tokens, root included, that the target has not processed; 1 in a row that decodes."""
        return len(self.state.tokens) - self.running.target_len

    def read_(self, accepted: list[int]) -> tuple[str, list[int]]:
        """Cut a step's tokens, and the row, at the end of the text.

        The end is the limit, an end-of-text token or a stop text, whichever comes first.

        Returns:
            The text that the tokens release, and the tokens.
        """
        tokens = truncate(accepted, room=self.num_left, eos_tokens=self.ends)
        before = self.stream.num_tokens
        text = self.stream.push(tokens)
        tokens = tokens[: self.stream.num_tokens - before]
        if len(tokens) < len(accepted):
            row = self.running
            del self.state.tokens[len(tokens) - len(accepted) :]
            row.target_len = min(row.target_len, self.state.root_pos)
            row.draft_len = min(row.draft_len, self.state.root_pos)
        return text, tokens

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of its prompt are complete or were not requested."""
        missing = self.state.prompt_len - 1 - len(self.prompt_log_probs)
        return self.request.prompt_top is None or missing == 0

    def log_probs(self, tokens: Sequence[int], logits_of: Callable[[], Tensor]) -> list[TokenLogProb]:
        """Log-probabilities of emitted tokens before temperature and filters, if the request wants them.

        Args:
            logits_of: Returns the target's logits that gave each token, (tokens, V).
        """
        if self.request.num_top is None:
            return []
        return token_log_probs(tokens, logits_of(), self.request.num_top)

    def report(self, reason: FinishReason) -> RequestReport:
        """Counts and times at the end of the request."""
        now = time.perf_counter()
        return RequestReport(
            finish=reason,
            prompt_tokens=self.state.prompt_len,
            emitted_tokens=self.emitted_tokens,
            shared_tokens=self.shared_tokens,
            target_passes=self.target_passes,
            preemptions=self.preemptions,
            queue_ms=((self.admitted or now) - self.arrived) * 1e3,
            ttft_ms=(self.first - self.arrived) * 1e3 if self.first else 0.0,
            total_ms=(now - self.arrived) * 1e3,
            is_shadow=self.request.is_shadow,
        )


@one_torch_thread()
def token_log_probs(tokens: Sequence[int], logits_NV: Tensor, num_top: int) -> list[TokenLogProb]:
    """Log-probabilities of N tokens before temperature and filters.

    Args:
        logits_NV: The target's logits that gave each token.
        num_top: Number of likeliest tokens to report in addition to every token.
    """
    log_probs_NV = logits_NV.float().log_softmax(-1)
    best = log_probs_NV.topk(num_top)
    own_N1 = log_probs_NV.gather(1, torch.tensor([tokens], device=logits_NV.device).T)
    ranks_N = (log_probs_NV > own_N1).sum(1) + 1
    # sync: a client requested them
    columns = (own_N1[:, 0].tolist(), ranks_N.tolist(), best.indices.tolist(), best.values.tolist())
    return [
        TokenLogProb(token, log_prob, tuple(zip(top, values, strict=True)), rank)
        for token, log_prob, rank, top, values in zip(tokens, *columns, strict=True)
    ]
