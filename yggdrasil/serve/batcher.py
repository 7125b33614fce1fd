"""Continuous batching: requests join and leave between steps; a step runs the engine's verbs over rows.

Who waits and who runs is in scheduler.py; what a step computes for them, and what they get, is here.

Shapes: P = pages of a row.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from yggdrasil.engine import ANY_TOKEN, check_processors, check_request, check_tokens, grammar_of
from yggdrasil.errors import CapacityError
from yggdrasil.layout import PAGE_LEN
from yggdrasil.models.packing import Chunk
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.gamma.budget import draft_budget, prompt_budget
from yggdrasil.policy.gamma.protocol import BatchPolicy, Load, Outcome
from yggdrasil.policy.uncalibrated import UNCALIBRATED
from yggdrasil.serve.cohorts import Cohorts
from yggdrasil.serve.elastic import ElasticMemory
from yggdrasil.serve.pages import PagePool, pages_for
from yggdrasil.serve.request import (
    DEFECT,
    CohortStep,
    Event,
    FinishReason,
    Observer,
    Request,
    StepReport,
    StepTree,
)
from yggdrasil.serve.scheduler import Scheduler
from yggdrasil.serve.ticket import Ticket, token_log_probs
from yggdrasil.state import DecodeState, Row, StepResult
from yggdrasil.step.choice import VERIFY_ALL, Choice
from yggdrasil.step.growth import run_chunks
from yggdrasil.step.native import NativeStep
from yggdrasil.step.rows import StepOverRows
from yggdrasil.text.grammar import Grammars
from yggdrasil.text.tokenizer import TextStream, Tokenizer
from yggdrasil.trace import DeviceTrace, Trace

__all__ = ["Batcher"]

NOTHING = Choice((), (), VERIFY_ALL)
MOST_NODES = 128  # drafted nodes of a row, the root not counted


class _Ran(NamedTuple):
    """What the forwards of a step did.

    Args:
        results: Of the rows that decode, then of `reaching`.
        reaching: Requests whose prompt ended.
        prompt_tokens: Tokens of prompts, roots not counted.
    """

    results: list[StepResult]
    reaching: Sequence[Ticket] = ()
    prompt_tokens: int = 0


class Batcher:
    """Runs one step after another over all rows; used by a single thread.

    Args:
        target: The target, whose graphs read the pool's page table.
        draft: The draft, whose graphs read the same table.
        pool: Pages of both models.
        policy: Selects the speculative length of every step.
        tokenizer: Gives the text of events and stop texts.
        max_context: Largest number of tokens of prompt and output together.
        eos_tokens: Tokens that end a text.
        vocab: V: the token ids of both models go from 0 to V - 1.
        observer: Receives the reports of steps and finished requests.
        elastic: Lends the draft's memory to the pool under load; None keeps the draft in memory.
        acceptance: Calibration of the pair by temperature, for policies that verify only some drafts.

    Attributes:
        trace: Milliseconds per stage since construction.
        gamma: Depth that was selected for the last step that decoded.
        grammars: Compiles the grammars of requests.
        scheduler: The requests that wait or run, with their rows and pages.
        cohorts: Kinds of requests, those that may not speculate among them.
        speculates: Whether any row may draft; may change between two steps.
        stepper: Runs the step over rows: in C++ where that knows the models.
    """

    def __init__(
        self,
        target: TokenGraphs,
        draft: TokenGraphs,
        pool: PagePool,
        policy: BatchPolicy,
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
        self.grammars = Grammars(tokenizer, target.vocab, eos_tokens)
        self.max_context = max_context
        self.gamma_max = gamma_max
        self.eos_tokens = frozenset(eos_tokens)
        self.vocab = vocab
        self.observer = observer or Observer()
        self.elastic = elastic
        self.acceptance = acceptance
        self.trace = DeviceTrace() if pool.table_BP.is_cuda else Trace()
        self.gamma = 0
        self.cohorts = Cohorts()
        self.speculates = True
        form: type[NativeStep | StepOverRows] = (
            NativeStep if NativeStep.runs(target, draft) else StepOverRows
        )
        self.stepper = form(target, draft, self.trace)
        self.scheduler = Scheduler(pool)
        self._stepping: list[Ticket] = []  # those with tokens in the forwards of this step

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def served_context(self) -> int:
        """Largest number of tokens of prompt and output together that the pages also hold.

        Lent pages do not count.
        """
        return min(self.max_context, self.scheduler.base_pages * PAGE_LEN)

    def ticket(self, request: Request) -> Ticket:
        """Check a request and create its ticket; it is not queued yet.

        Raises:
            ConfigError: the prompt is empty, has tokens outside the vocabulary, or does not fit in the
                context together with the output, or the grammar does not compile.
            CapacityError: the request needs more KV pages than there are.
        """
        limit = check_request(len(request.prompt), request.config, self.max_context)
        check_tokens(request.prompt, self.vocab)
        if request.config.max_new_tokens is None:
            limit = max(1, min(limit, self.served_context - len(request.prompt)))
        needed = pages_for(len(request.prompt) + limit)
        if needed > self.scheduler.base_pages:
            fix = "request fewer tokens or serve with a larger --kv-memory"
            raise CapacityError("KV pages", needed, self.scheduler.base_pages, fix)
        check_processors(request.config.sampling.processors, self.vocab)
        ends = request.config.ends(self.eos_tokens)
        grammar = grammar_of(self.grammars, request.config)
        sampling = request.config.sampling.ending_with(ends, self.target.vocab)
        state = DecodeState(list(request.prompt), sampling, grammar=grammar, inspect=request.config.inspect)
        speculation = 0 if request.config.plain else request.speculation
        stream = TextStream(self.tokenizer, request.config.stop, request.prompt)
        return Ticket(request, state, stream, limit, ends, speculation)

    def submit(self, ticket: Ticket) -> None:
        """Queue a request for the next free row."""
        ticket.cohort = self.cohorts.name_of(ticket.request)
        self.scheduler.waiting.append(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """End a request, running or waiting, and free its pages; does nothing if it has already ended."""
        if not ticket.is_finished:
            self._finish_(ticket, "cancelled")

    def cancel_all(self) -> None:
        """End every request, for shutdown."""
        for ticket in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish_(ticket, "cancelled")

    def fail(self) -> None:
        """After a step that raised, end the requests of its forwards: their state may be inconsistent.

        If the step did not reach its forwards, every request ends, because the next step would fail too.
        """
        for ticket in self._stepping or [*self.scheduler.running, *self.scheduler.waiting]:
            if not ticket.is_finished:
                self._finish_(ticket, "error", DEFECT)
        self._stepping = []

    def step(self) -> StepReport | None:
        """Advance the batch: decoding rows emit one or more tokens; prompts advance in the same forward.

        Returns:
            The report of the step; None if no request waits or runs.

        Cost: that of the engine's step; drafting and verification are one sequence of graphs for all rows.
        Source: Nightjar section 3.1 over the stages of Yggdrasil section 5.1.
        """
        if self.elastic is not None:
            if self.gamma == 0:
                self.scheduler.trim_()
            self.elastic.advance_(gamma=self.gamma, num_waiting=len(self.scheduler.waiting))
        self._stepping = []
        self.scheduler.admit_()
        if not self.scheduler.running:
            if self.elastic is not None:
                self.elastic.settle_()
            return None
        self._score_prompts_()
        start = time.perf_counter()
        before = self._stages_ms()
        decoding = self.scheduler.reserve_()
        self._stepping = list(decoding)
        load = self._load(decoding)
        with self.trace.stage("policy"):
            choice = self.policy.choose(load) if decoding else NOTHING
        for row, shape in zip(load.rows, choice.shapes, strict=True):
            num_nodes = shape.most_nodes(self.draft.max_depth - 1)
            self.pool.extend_(row.row, len(row.state.tokens) + num_nodes - 1)
        ran = self._run_(load, choice, start)
        num_returned = self._publish_results_([*decoding, *ran.reaching], ran.results)
        total_ms = (time.perf_counter() - start) * 1e3
        cohorts = self._observe_cohorts_(load, decoding, ran, total_ms) if decoding else []
        report = self._report(load, choice.gamma, ran, num_returned, total_ms, before, cohorts)
        if decoding:
            self._observe_(load, report, ran.results[: len(decoding)])
        self.observer.on_step(report)
        return report

    def _run_(self, load: Load, choice: Choice, began: float) -> _Ran:
        """Run the step over the rows that decode, in one call unless prompts run along."""
        if not self.scheduler.prefilling:
            return _Ran(self.stepper.run(load.rows, choice, began))
        num_tokens = self.stepper.draft(load.rows, choice)
        reaching, prompts = self._prompts(num_tokens)
        self._stepping += [*reaching, *self._prompt_tickets(prompts)]
        prompt_tokens = sum(ticket.num_unseen - 1 for ticket in reaching)
        prompt_tokens += sum(len(chunk.tokens) for chunk in prompts)
        results = self.stepper.verify([ticket.running for ticket in reaching], prompts)
        self._commit_prompts_(prompts)
        return _Ran(results, reaching, prompt_tokens)

    def _load(self, decoding: Sequence[Ticket]) -> Load:
        """The load of this step: free pages, the draft's absence and the largest graph limit the drafts."""
        batch_size = max(1, len(decoding))
        waiting_tokens = min(self.target.prefill_chunk, self.scheduler.num_prompt_tokens)
        rows = [ticket.running for ticket in decoding]
        limits = tuple(
            ticket.most_drafts if self.cohorts.speculates(ticket.cohort) else 0 for ticket in decoding
        )
        may_draft = self.speculates and any(limits) and (self.elastic is None or self.elastic.is_draft_in)
        nodes_max = MOST_NODES if may_draft else 0
        while nodes_max and not self.scheduler.has_room_(rows, nodes_max):
            nodes_max -= PAGE_LEN if nodes_max > PAGE_LEN else 1
        max_lag = max((row.lag for row, limit in zip(rows, limits, strict=True) if limit), default=0)
        return Load(
            batch_size,
            min(self.gamma_max, nodes_max),
            self.gamma,
            max_lag,
            waiting_tokens,
            draft_budget(self.target.sizes, batch_size, waiting_tokens),
            rows=rows,
            depth_limits=limits,
            calibrations=tuple(self.acceptance(row.state.sampling.temperature).calibration for row in rows),
            nodes_max=nodes_max,
        )

    def _score_prompts_(self) -> None:
        """Run a part of a prompt whose log-probabilities were requested, in a forward of its own.

        Other rows wait for one part only. If every row waits for log-probabilities, one is completed.
        """
        while ticket := next((ticket for ticket in self.scheduler.running if not ticket.is_scored), None):
            self._stepping = [ticket]
            self._score_part_(ticket)
            if any(ticket.is_scored for ticket in self.scheduler.running):
                return

    def _score_part_(self, ticket: Ticket) -> None:
        row = ticket.running
        assert row.target_len == len(ticket.prompt_log_probs)
        assert ticket.request.prompt_top is not None
        end = min(row.target_len + self.target.prefill_chunk, row.state.root_pos)
        part = Chunk(row.row, row.state.tokens[row.target_len : end], row.target_len)
        for _, (logits_NV, _) in run_chunks(self.target, [part], self.target.prefill_chunk):
            followers = row.state.tokens[row.target_len + 1 : end + 1]
            read_NV = logits_NV[: len(followers)]
            ticket.prompt_log_probs += token_log_probs(followers, read_NV, ticket.request.prompt_top)
        row.target_len = end
        self._publish_(row)

    def _prompts(self, num_tokens: int) -> tuple[list[Ticket], list[Chunk]]:
        """The prompts that run together with `num_tokens` tokens of trees.

        Returns:
            The requests whose root is reached, and chunks of the others.
        """
        prefilling = self.scheduler.prefilling
        budget = prompt_budget(self.target.sizes, num_tokens, self.scheduler.num_prompt_tokens)
        reaching = []
        chunks = []
        for ticket in prefilling:
            row = ticket.running
            if budget == 0:
                break
            if ticket.num_unseen <= budget:
                reaching.append(ticket)
            else:
                tokens = ticket.state.tokens[row.target_len : row.target_len + budget]
                chunks.append(Chunk(row.row, tokens, row.target_len, 0))
            budget -= min(ticket.num_unseen, budget)
        return reaching, chunks

    def _prompt_tickets(self, prompts: Sequence[Chunk]) -> list[Ticket]:
        by_row = {ticket.running.row: ticket for ticket in self.scheduler.running}
        return [by_row[chunk.row] for chunk in prompts]

    def _publish_results_(self, emitting: Sequence[Ticket], results: Sequence[StepResult]) -> int:
        """Send events to clients, publish the KV and release finished rows.

        Returns:
            The number of tokens that clients got.
        """
        num_returned = 0
        for place, (ticket, result) in enumerate(zip(emitting, results, strict=True)):
            if result.error:
                self._finish_(ticket, "error", result.error)
                continue
            text, tokens = ticket.read_(result.tokens)
            self._publish_(ticket.running)
            logits = partial(self.stepper.logits, place, result.path[: len(tokens)])
            tree = StepTree.of(result) if ticket.request.trees else None
            self._send_(ticket, Event(text, tokens, ticket.log_probs(tokens, logits), tree=tree))
            num_returned += 0 if ticket.request.is_shadow else len(tokens)
        return num_returned

    def _send_(self, ticket: Ticket, event: Event) -> None:
        """Send an event with the tokens of a step, the last one if they end the text."""
        if not ticket.first:
            ticket.first = time.perf_counter()
            event = replace(event, prompt_log_probs=ticket.prompt_log_probs)
        ticket.target_passes += 1
        ticket.emitted_tokens += len(event.tokens)
        is_stop = ticket.stream.stopped or event.tokens[-1] in ticket.ends
        if is_stop or ticket.emitted_tokens == ticket.limit:
            event = replace(event, text=event.text + ticket.stream.finish())
            self._finish_(ticket, "stop" if is_stop else "length", event=event)
        else:
            ticket.request.on_event(event)

    def _commit_prompts_(self, prompts: Sequence[Chunk]) -> None:
        for chunk, ticket in zip(prompts, self._prompt_tickets(prompts), strict=True):
            row = ticket.running
            row.target_len += len(chunk.tokens)
            self._publish_(row)

    def _publish_(self, row: Row) -> None:
        self.pool.publish_(row.row, row.state.tokens, row.target_len, row.draft_len)

    def _finish_(
        self, ticket: Ticket, reason: FinishReason, error: str = "", event: Event | None = None
    ) -> None:
        """End a request: free its row and pages, and send the last event."""
        self.scheduler.remove_(ticket)
        ticket.is_finished = True
        report = ticket.report(reason)
        event = replace(event or Event("", ()), finish=reason, error=error, report=report)
        ticket.request.on_event(event)
        self.observer.on_finish(report)

    def _observe_(self, load: Load, report: StepReport, results: Sequence[StepResult]) -> None:
        """Give the policy the outcome of the rows that decoded; later rows of the report were prompts."""
        self.gamma = report.gamma
        self.policy.observe(
            Outcome(
                load,
                report.gamma,
                report.drafted[: len(results)],
                report.emitted[: len(results)],
                seconds=report.total_ms / 1e3,
                catch_up_seconds=report.catch_up_ms / 1e3,
                draft_seconds=(report.draft_ms - report.catch_up_ms) / 1e3,
                verify_seconds=report.verify_ms / 1e3,
                prompt_tokens=report.prompt_tokens + report.batch_size - len(results),
                values=[result.values for result in results],
                results=results,
            )
        )

    def _observe_cohorts_(
        self, load: Load, decoding: Sequence[Ticket], ran: _Ran, total_ms: float
    ) -> list[CohortStep]:
        """What the step did for each cohort; its time counts if no prompt ran along."""
        is_timed = not ran.prompt_tokens and not ran.reaching
        return self.cohorts.observe_(
            [ticket.cohort for ticket in decoding],
            ran.results[: len(decoding)],
            ms=total_ms,
            plain_ms=self.policy.plain_ms(load) if is_timed else 0.0,
        )

    def _stages_ms(self) -> list[float]:
        """Milliseconds since construction of drafting, catching up and verification."""
        return [self.trace.total_ms[name] for name in ("draft", "catch up", "verify")]

    def _report(
        self,
        load: Load,
        gamma: int,
        ran: _Ran,
        num_returned: int,
        total_ms: float,
        before: Sequence[float],
        cohorts: Sequence[CohortStep],
    ) -> StepReport:
        """The report of a step that has just ended."""
        draft_ms, catch_up_ms, verify_ms = map(operator.sub, self._stages_ms(), before)
        return StepReport(
            gamma=gamma,
            prompt_tokens=ran.prompt_tokens,
            drafted=tuple(result.verified - 1 for result in ran.results),
            # tokens after the end of a text count: the policy must not see them as rejected
            emitted=tuple(len(result.tokens) for result in ran.results),
            returned_tokens=num_returned,
            max_lag=load.max_lag,
            catch_up_ms=catch_up_ms,
            draft_ms=draft_ms + catch_up_ms,
            verify_ms=verify_ms,
            total_ms=total_ms,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_pages=self.pool.num_free,
            num_pages=self.pool.num_pages,
            is_draft_in=self.elastic is None or self.elastic.is_draft_in,
            depths=[result.depths[1:] for result in ran.results],
            cohorts=cohorts,
        )
