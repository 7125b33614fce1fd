"""A request as the batcher keeps it: what it may still emit, what it has emitted, and when."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from yggdrasil.kernels.threads import one_torch_thread
from yggdrasil.serve.request import FinishReason, Request, RequestReport, TokenLogProb
from yggdrasil.state import DecodeState, Row, truncate
from yggdrasil.tokenizer import TextStream

__all__ = ["Ticket"]


@dataclass(eq=False)
class Ticket:
    """The state of one request.

    Attributes:
        row: Its place in the batch; None while it waits.
        speculation: Most draft tokens a step, None without a limit.
        limit: Most tokens to emit.
        ends: Tokens that end its text.
    """

    request: Request
    state: DecodeState
    stream: TextStream
    limit: int
    ends: Collection[int]
    speculation: int | None
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    first: float = 0.0
    row: Row | None = None
    shared_tokens: int = 0
    target_passes: int = 0
    preemptions: int = 0
    emitted_tokens: int = 0
    is_finished: bool = False

    @property
    def running(self) -> Row:
        """Its row, where it is known to run."""
        assert self.row is not None
        return self.row

    @property
    def num_left(self) -> int:
        """Tokens that it may still emit."""
        return self.limit - self.emitted_tokens

    @property
    def num_lacking(self) -> int:
        """Tokens of its text, the root included, without KV in the target; 1 for a row that decodes."""
        return len(self.state.tokens) - self.running.target_len

    def read_(self, emitted: list[int]) -> tuple[str, list[int]]:
        """The text that a step releases, and its tokens up to the end of the request's: its limit, an end
        of text or a stop text, whichever comes first.
        """
        tokens = truncate(emitted, room=self.num_left, eos_tokens=self.ends)
        before = self.stream.num_tokens
        text = self.stream.push(tokens)
        return text, tokens[: self.stream.num_tokens - before]

    @one_torch_thread()
    def log_probs(self, tokens: Sequence[int], logits_NV: Tensor) -> list[TokenLogProb]:
        """What the target gave the emitted tokens before temperature and filters, when the request wants
        it.
        """
        if self.request.num_top is None:
            return []
        log_probs_NV = logits_NV.float().log_softmax(-1)
        best = log_probs_NV.topk(self.request.num_top)
        top_tokens = best.indices.tolist()  # sync: a client asked
        top_log_probs = best.values.tolist()  # sync: a client asked
        rows = zip(tokens, log_probs_NV, top_tokens, top_log_probs, strict=True)
        return [
            TokenLogProb(token, float(row[token]), tuple(zip(top, values, strict=True)))
            for token, row, top, values in rows
        ]

    def report(self, reason: FinishReason) -> RequestReport:
        """Its figures at the end."""
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
        )
