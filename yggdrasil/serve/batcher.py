"""Continuous batching: requests join and leave between steps, and every step is the one of the engine over
rows.

```
waiting  --admit-->  running: prefilling --root reached--> decoding  --end, cancel--> gone
   ^                     |
   +------ preempt ------+      no page left for the oldest rows' next token: the youngest is computed again later
```
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import groupby, islice

from torch import Tensor

from yggdrasil.engine import ANY_TOKEN, check_request, check_tokens
from yggdrasil.errors import CapacityError, YggError
from yggdrasil.layout import PAGE_LEN
from yggdrasil.models.packing import Chunk
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.gamma.budget import draft_budget, prompt_budget
from yggdrasil.policy.gamma.protocol import GammaPolicy, Load, Outcome
from yggdrasil.policy.uncalibrated import UNCALIBRATED
from yggdrasil.serve.elastic import ElasticMemory
from yggdrasil.serve.pages import PagePool, pages_for
from yggdrasil.serve.request import DEFECT, Event, FinishReason, Observer, Request, StepReport, TokenLogProb
from yggdrasil.serve.ticket import Ticket
from yggdrasil.state import DecodeState, Row
from yggdrasil.step.accept import Accepted
from yggdrasil.step.rows import (
    Chain,
    accept_rows,
    catch_up_rows_,
    commit_row_,
    draft_rows,
    prune_rows,
    verify_rows,
)
from yggdrasil.tokenizer import TextStream, Tokenizer
from yggdrasil.trace import DeviceTrace, Trace

__all__ = ["Batcher"]


class Batcher:
    """Rows around one step; used by a single thread.

    Args:
        target: Decides every token; over the pool's page table.
        draft: Guesses; over the same table.
        pool: Pages of both.
        policy: Chooses the speculative length of every step.
        tokenizer: For the text of events and stop texts.
        max_context: Most tokens of prompt and output together.
        gamma_max: Greatest speculative length.
        eos_tokens: Tokens that end a text.
        vocab: V: the token ids of both models go from 0 up to this.
        observer: Told about steps and finished requests.
        elastic: Lends the draft's room to the pool under load; None keeps the draft where it is.
        acceptance: Calibration of the pair by temperature, for policies that verify fewer guesses than were
            made.

    Attributes:
        trace: Milliseconds per stage since construction.
        gamma: Speculative length of the last step that decoded.
    """

    def __init__(
        self,
        target: TokenGraphs,
        draft: TokenGraphs,
        pool: PagePool,
        policy: GammaPolicy,
        *,
        tokenizer: Tokenizer,
        max_context: int,
        gamma_max: int,
        eos_tokens: Collection[int] = (),
        vocab: int = ANY_TOKEN,
        observer: Observer | None = None,
        elastic: ElasticMemory | None = None,
        acceptance: Callable[[float], Acceptance] = lambda temperature: UNCALIBRATED,
    ) -> None:
        self.target = target
        self.draft = draft
        self.pool = pool
        self.policy = policy
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.gamma_max = gamma_max
        self.eos_tokens = frozenset(eos_tokens)
        self.vocab = vocab
        self.observer = observer or Observer()
        self.elastic = elastic
        self.acceptance = acceptance
        self.trace = DeviceTrace() if pool.table_BP.is_cuda else Trace()
        self.gamma = 0
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []  # in the order of admission
        self._stepping: list[Ticket] = []  # those whose tokens the forwards of this step take
        self._free_rows = list(reversed(range(len(pool.table_BP))))
        self._lasting_pages = pool.num_pages  # those that are only lent cannot be promised
        # and the free pages then: nothing to look up again before one more is free
        self._turned_away: tuple[Ticket, int] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def served_context(self) -> int:
        """Most tokens of prompt and output together that the pages hold too, those that are only lent not
        counted.
        """
        return min(self.max_context, self._lasting_pages * PAGE_LEN)

    def ticket(self, request: Request) -> Ticket:
        """Books for a request, checked; it is not queued yet.

        Raises:
            ConfigError: a prompt that is empty, has tokens outside the vocabulary or does not fit the
                context with what is asked for.
            CapacityError: more KV pages than there are.
        """
        limit = check_request(len(request.prompt), request.config, self.max_context)
        check_tokens(request.prompt, self.vocab)
        if request.config.max_new_tokens is None:
            limit = max(1, min(limit, self.served_context - len(request.prompt)))
        needed = pages_for(len(request.prompt) + limit)
        if needed > self._lasting_pages:
            raise CapacityError(
                "KV pages",
                needed,
                self._lasting_pages,
                "ask for fewer tokens or serve with a larger --kv-memory",
            )
        state = DecodeState(list(request.prompt), request.config.sampling)
        speculation = 0 if request.config.plain else request.speculation
        stream = TextStream(self.tokenizer, request.config.stop, request.prompt)
        return Ticket(
            request, state, stream, limit, () if request.config.ignore_eos else self.eos_tokens, speculation
        )

    def submit(self, ticket: Ticket) -> None:
        """Queue a request for the next free row."""
        self._waiting.append(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Let a request go, wherever it is; its pages are free. Nothing happens to one that has ended."""
        if not ticket.is_finished:
            self._finish_(ticket, "cancelled")

    def cancel_all(self) -> None:
        """Let every request go: a server shuts down."""
        for ticket in [*self._running, *self._waiting]:
            self._finish_(ticket, "cancelled")

    def fail(self) -> None:
        """After a step that raised: end the requests of its forwards; what they left is nobody's history.

        A step that did not come to its forwards ends every request: the next one would fail likewise.
        """
        for ticket in self._stepping or [*self._running, *self._waiting]:
            if not ticket.is_finished:
                self._finish_(ticket, "error", DEFECT)
        self._stepping = []

    def check(self) -> None:
        """The books agree: pages, rows and requests."""
        self.pool.check()
        rows = [ticket.running.row for ticket in self._running]
        assert sorted([*rows, *self._free_rows]) == list(range(len(self.pool.table_BP))), (
            "a row twice or never"
        )
        for ticket in self._running:
            row = ticket.running
            assert row.draft_len <= row.state.root_pos >= row.target_len, "KV beyond the root"
            assert self.pool.num_missing(row.row, max(row.target_len, row.draft_len)) == 0, (
                "KV without a page"
            )
        if not self._running:
            assert self.pool.num_free == self.pool.num_pages, "pages that nobody gave back"

    def step(self) -> StepReport | None:
        """Advance the batch: rows that decode emit one or more tokens, prompts go on beside them.

        Returns:
            What was done; None when nothing waits or runs.

        Cost: as the engine's step; drafting and verification are one sequence of graphs for all rows.
        Source: Nightjar section 3.1 over the stages of Yggdrasil section 5.1.
        """
        if self.elastic is not None:
            self.elastic.advance_(gamma=self.gamma, num_waiting=len(self._waiting))
        self._stepping = []
        self._admit_()
        if not self._running:
            if self.elastic is not None:
                self.elastic.settle_()
            return None
        start = time.perf_counter()
        stage = self.trace.stage
        before = dict(self.trace.total_ms)
        decoding = self._reserve_()
        self._stepping = list(decoding)
        load = self._load(decoding)
        with stage("policy"):
            gamma = self.policy.select(load) if decoding else 0
        gammas = [self._row_gamma(ticket, gamma) for ticket in decoding]
        with stage("catch up"):
            catch_up_rows_(
                self.draft,
                [ticket.running for ticket, row_gamma in zip(decoding, gammas, strict=True) if row_gamma],
            )
        with stage("draft"):
            calibrated = [self.acceptance(ticket.state.sampling.temperature) for ticket in decoding]
            chains = draft_rows(
                self.draft,
                [ticket.running for ticket in decoding],
                gammas,
                [each.platt for each in calibrated],
            )
        with stage("prune"):
            values = _values(calibrated, chains) if gamma else []
            prune_rows(chains, self.policy.verified(load, gamma, values) if gamma else 0)
        reaching, prompts = self._prompts(len(decoding) + sum(len(chain.tokens) for chain in chains))
        chains += [Chain() for _ in reaching]
        rows = [ticket.running for ticket in [*decoding, *reaching]]
        self._stepping += [*reaching, *self._tickets_of(prompts)]
        prompt_tokens = sum(row.state.root_pos - row.target_len for row in rows) + sum(
            len(chunk.tokens) for chunk in prompts
        )
        with stage("verify"):
            logits_NV, roots = verify_rows(self.target, rows, chains, prompts)
        with stage("accept"):
            accepted = accept_rows(rows, chains, logits_NV, roots) if rows else []
        with stage("commit"):
            emitting = [*decoding, *reaching]
            emitted, told = self._commit_(emitting, chains, accepted, logits_NV, roots)
            self._commit_prompts_(prompts)
        report = self._report(load, gamma, chains, emitted, told, prompt_tokens, start, before)
        if decoding:
            self._learn_(load, report, values, len(decoding))
        self.observer.on_step(report)
        return report

    def _admit_(self) -> None:
        """Give rows and pages to those that wait, first come first served, while every running row keeps a
        page to grow into.
        """
        while self._waiting and self._free_rows:
            ticket = self._waiting[0]
            row = self._free_rows[-1]
            if self._turned_away == (ticket, self.pool.num_free):
                return
            target_len, draft_len = self.pool.share_(row, ticket.state.tokens)
            if (
                self.pool.num_missing(row, len(ticket.state.tokens)) + len(self._running)
                > self.pool.num_free
            ):
                self.pool.release_(row)
                self._turned_away = ticket, self.pool.num_free
                return
            self.pool.extend_(row, len(ticket.state.tokens))
            ticket.row = Row(row, ticket.state, target_len, draft_len)
            ticket.shared_tokens = max(ticket.shared_tokens, target_len)
            ticket.admitted = ticket.admitted or time.perf_counter()
            self._waiting.popleft()
            self._free_rows.pop()
            self._running.append(ticket)

    def _reserve_(self) -> list[Ticket]:
        """The rows that decode in this step, each with a page for its root; the youngest lose theirs where
        pages run out.
        """
        for ticket in list(self._running):
            while (
                ticket.row is not None
                and self.pool.num_missing(ticket.row.row, len(ticket.state.tokens)) > self.pool.num_free
            ):
                self._preempt_(self._running[-1])
            if ticket.row is not None:
                self.pool.extend_(ticket.row.row, len(ticket.state.tokens))
        return [ticket for ticket in self._running if ticket.running.is_prefilled]

    def _preempt_(self, ticket: Ticket) -> None:
        """Back to the head of the queue without its KV: text and seed say what it is, so it will be
        computed again.
        """
        self._leave_(ticket)
        ticket.preemptions += 1
        self._waiting.appendleft(ticket)

    def _leave_(self, ticket: Ticket) -> None:
        row = ticket.running.row
        self._running.remove(ticket)
        self.pool.release_(row)
        self._free_rows.append(row)
        ticket.row = None

    def _load(self, decoding: Sequence[Ticket]) -> Load:
        """What the policy may choose from: lengths that the free pages hold, and none while the draft is
        away; drafts that the greatest graph holds.
        """
        batch_size = max(1, len(decoding))
        waiting_tokens = min(self.target.prefill_chunk, self._num_prompt_tokens)
        deepest = self.gamma_max if self.elastic is None or self.elastic.is_draft_in else 0
        while (
            deepest
            and sum(
                self.pool.num_missing(ticket.running.row, len(ticket.state.tokens) + deepest)
                for ticket in decoding
            )
            > self.pool.num_free
        ):
            deepest -= 1
        max_lag = max((ticket.running.lag for ticket in decoding if ticket.speculation != 0), default=0)
        return Load(
            batch_size,
            deepest,
            self.gamma,
            max_lag,
            waiting_tokens,
            draft_budget(self.target.sizes, batch_size, waiting_tokens),
        )

    def _row_gamma(self, ticket: Ticket, gamma: int) -> int:
        """What of gamma a row takes: no more than its request allows or has left to emit. Its pages are
        there afterwards.
        """
        most = gamma if ticket.speculation is None else min(gamma, ticket.speculation)
        most = min(most, ticket.num_left - 1)
        self.pool.extend_(ticket.running.row, len(ticket.state.tokens) + most)
        return most

    def _prompts(self, num_tokens: int) -> tuple[list[Ticket], list[Chunk]]:
        """What of prompts runs beside `num_tokens` tokens of decoding rows: the rows whose root is reached,
        and chunks of the others.
        """
        prefilling = [ticket for ticket in self._running if not ticket.running.is_prefilled]
        room = prompt_budget(self.target.sizes, num_tokens, self._num_prompt_tokens)
        reaching = []
        chunks = []
        for ticket in prefilling:
            row = ticket.running
            if room == 0:
                break
            left = ticket.num_lacking
            if left <= room:
                reaching.append(ticket)
            else:
                chunks.append(
                    Chunk(
                        row.row,
                        ticket.state.tokens[row.target_len : row.target_len + room],
                        row.target_len,
                        0,
                    )
                )
            room -= min(left, room)
        return reaching, chunks

    def _tickets_of(self, prompts: Sequence[Chunk]) -> list[Ticket]:
        of_row = {ticket.running.row: ticket for ticket in self._running}
        return [of_row[chunk.row] for chunk in prompts]

    @property
    def _num_prompt_tokens(self) -> int:
        """Of the running rows' prompts, roots included, that the target has not seen."""
        return sum(ticket.num_lacking for ticket in self._running if not ticket.running.is_prefilled)

    def _commit_(
        self,
        emitting: Sequence[Ticket],
        chains: Sequence[Chain],
        accepted: Sequence[Accepted | YggError],
        logits_NV: Tensor,
        roots: Sequence[int],
    ) -> tuple[list[int], int]:
        """Extend texts, tell clients, let finished rows go; returns the tokens that the target gave every
        row, and how many in all a client got.
        """
        emitted = []
        told = 0
        for ticket, chain, outcome, root in zip(emitting, chains, accepted, roots, strict=True):
            if isinstance(outcome, YggError):
                self._finish_(ticket, "error", str(outcome))
                emitted.append(0)
                continue
            text, tokens = ticket.read_(outcome.tokens)
            commit_row_(ticket.running, chain, Accepted(outcome.path[: len(tokens)], tokens))
            self._publish_(ticket.running)
            self._tell_(
                ticket, text, tokens, ticket.log_probs(tokens, logits_NV[root : root + len(tokens)])
            )
            # those after its end too: a policy must not take that for a rejection
            emitted.append(len(outcome.tokens))
            told += len(tokens)
        return emitted, told

    def _tell_(
        self, ticket: Ticket, text: str, tokens: Sequence[int], log_probs: Sequence[TokenLogProb]
    ) -> None:
        ticket.first = ticket.first or time.perf_counter()
        ticket.target_passes += 1
        ticket.emitted_tokens += len(tokens)
        is_stop = ticket.stream.stopped or tokens[-1] in ticket.ends
        if is_stop or ticket.emitted_tokens == ticket.limit:
            self._finish_(
                ticket,
                "stop" if is_stop else "length",
                event=Event(text + ticket.stream.finish(), tokens, log_probs),
            )
        else:
            ticket.request.on_event(Event(text, tokens, log_probs))

    def _commit_prompts_(self, prompts: Sequence[Chunk]) -> None:
        for chunk, ticket in zip(prompts, self._tickets_of(prompts), strict=True):
            row = ticket.running
            row.target_len += len(chunk.tokens)
            self._publish_(row)

    def _publish_(self, row: Row) -> None:
        self.pool.publish_(row.row, row.state.tokens, row.target_len, row.draft_len)

    def _finish_(
        self, ticket: Ticket, reason: FinishReason, error: str = "", event: Event | None = None
    ) -> None:
        """The end of a request: its row and pages are free, its client knows."""
        if ticket.row is not None:
            self._leave_(ticket)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        ticket.is_finished = True
        event = event or Event("", ())
        ticket.request.on_event(Event(event.text, event.tokens, event.log_probs, reason, error))
        self.observer.on_finish(ticket.report(reason))

    def _learn_(
        self, load: Load, report: StepReport, values: Sequence[Sequence[float]], num_decoding: int
    ) -> None:
        """Tell the policy about the rows that decoded; those whose root was reached, the last ones, were
        prompts.
        """
        self.gamma = report.gamma
        drafted = report.drafted[:num_decoding]
        emitted = report.emitted[:num_decoding]
        prompt_tokens = report.prompt_tokens + report.batch_size - num_decoding
        self.policy.observe(
            Outcome(
                load,
                report.gamma,
                drafted,
                emitted,
                report.total_ms / 1e3,
                report.catch_up_ms / 1e3,
                prompt_tokens,
                values,
            )
        )

    def _report(
        self,
        load: Load,
        gamma: int,
        chains: Sequence[Chain],
        emitted: Sequence[int],
        told: int,
        prompt_tokens: int,
        start: float,
        before: dict[str, float],
    ) -> StepReport:
        """A step in figures, when it has ended."""
        total_ms = (time.perf_counter() - start) * 1e3
        draft_ms, catch_up_ms, verify_ms = (
            self.trace.total_ms[name] - before.get(name, 0.0) for name in ("draft", "catch up", "verify")
        )
        return StepReport(
            gamma=gamma,
            prompt_tokens=prompt_tokens,
            drafted=tuple(len(chain.tokens) for chain in chains),
            emitted=tuple(emitted),
            told=told,
            max_lag=load.max_lag,
            catch_up_ms=catch_up_ms,
            draft_ms=draft_ms + catch_up_ms,
            verify_ms=verify_ms,
            total_ms=total_ms,
            running=len(self._running),
            waiting=len(self._waiting),
            free_pages=self.pool.num_free,
            num_pages=self.pool.num_pages,
            is_draft_in=self.elastic is None or self.elastic.is_draft_in,
        )


def _values(calibrated: Sequence[Acceptance], chains: Sequence[Chain]) -> list[list[float]]:
    """What every draft is worth, row by row; neighbours of one calibration in one call."""
    values: list[list[float]] = []
    for _, group in groupby(zip(calibrated, chains, strict=True), key=lambda each: id(each[0])):
        (acceptance, first), *others = group
        of_one = [first, *(chain for _, chain in others)]
        found = iter(
            acceptance.values([log_prob for chain in of_one for log_prob in chain.log_probs]).tolist()
        )
        values += [list(islice(found, len(chain.log_probs))) for chain in of_one]
    return values
