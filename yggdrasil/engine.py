"""The online half: decode one request, step by step.

A step (`Engine.step`) emits one or more tokens:
    choose      the policy chooses the shape of the tree: W nodes per growth step, D steps
    run         step/rows.py drafts, prunes, verifies, accepts and commits; on a CPU kernels/step.cpp does
    observe     the policy sees the result

The first step of a request also ends its prompt. An end that leaves no room for a tree emits the first
token without a draft.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from yggdrasil.config import DEFAULT_NEW_TOKENS, GenerateConfig, ProcessorConfig, SamplingConfig
from yggdrasil.errors import CapacityError, ConfigError, YggError
from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.policy.uncalibrated import UNCALIBRATED, plain_policy
from yggdrasil.state import PLAIN, DecodeState, Row, Shape, StepResult, truncate
from yggdrasil.step.choice import VERIFY_ALL, Calibration, Choice
from yggdrasil.step.decoding_tree import DecodingTree
from yggdrasil.step.growth import prefill
from yggdrasil.step.native import NativeStep
from yggdrasil.step.plan import SEQUENTIAL, Plan
from yggdrasil.step.rows import StepOverRows
from yggdrasil.text.grammar import Grammars, GrammarState
from yggdrasil.text.tokenizer import TextStream, Tokenizer
from yggdrasil.trace import Trace

__all__ = ["Engine", "check_processors", "check_request", "check_tokens", "checked_prompt", "grammar_of"]

ANY_TOKEN = 2**31  # the metadata of a forward is int32
# One graph for up to 32 prompt tokens and a tree costs less than two graphs.
MAX_MERGED_TOKENS = 32
# A row without a draft verifies its root alone.
WITHOUT_DRAFT = Choice((PLAIN,), (UNCALIBRATED.calibration,), VERIFY_ALL)


class Engine:
    """Decodes text with a pair of models.

    Args:
        target: Decides every token.
        draft: Proposes tokens.
        max_context: Maximum tokens of prompt and output together.
        eos_tokens: Tokens that end a text.
        vocab: V: token ids of both models are below V.
        tokenizer: Decodes emitted tokens to find stop texts; without one, stop texts are refused.
        greedy_plan: Order of the stages at temperature 0. A plan that runs nothing ahead of time there is
            one call of C++ where both models support it.
        sampled_plan: The same above temperature 0.
        trace: Collects the milliseconds of the stages; a new one when not given.
        stepper: Runs every step, instead of C++ or a plan.

    Attributes:
        kept_len: Tokens at the beginning of the present text that were in the target's KV before it.

    Example: both models count. `load_pair().engine` is an engine over compiled models.
        >>> import torch
        >>> from yggdrasil import GenerateConfig
        >>> from yggdrasil.kernels import load_kernels
        >>> from yggdrasil.kv import KVCache, KVShape
        >>> from yggdrasil.layout import TOKEN
        >>> from yggdrasil.models.packing import empty_meta
        >>> from yggdrasil.policy.uncalibrated import uncalibrated_policy
        >>> from yggdrasil.state import Shape
        >>> class Counting:
        ...     device, max_depth, sizes, prefill_chunk, vocab = "cpu", 3, (8,), 8, 10
        ...     widest, num_candidates, graph_ms = 8, 1, 0.0
        ...     def __init__(self, is_draft):
        ...         shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=16, capacity=64)
        ...         self.cache = KVCache(shape, dtype=torch.float32, device="cpu")
        ...         self.is_draft = is_draft
        ...     def meta(self, num_tokens):
        ...         return empty_meta(8, self.max_depth)
        ...     def graph_object(self, meta_NM):
        ...         return None
        ...     def forward(self, meta_NM):
        ...         next_N1 = (meta_NM[:, TOKEN:TOKEN + 1].long() + 1) % 10
        ...         if self.is_draft:
        ...             return next_N1, -0.1 * torch.ones(8, 1)
        ...         return torch.eye(10)[next_N1[:, 0]], torch.zeros(8, 1)
        >>> load_kernels()
        >>> engine = Engine(Counting(is_draft=False), Counting(is_draft=True), max_context=32)
        >>> policy = uncalibrated_policy(Shape(width=1, depth=3, verify=4))
        >>> [result.tokens for result in engine.generate([7], policy, GenerateConfig(max_new_tokens=6))]
        [[8, 9, 0, 1], [2, 3]]
    """

    def __init__(
        self,
        target: TokenModel,
        draft: TokenModel,
        *,
        max_context: int,
        eos_tokens: Sequence[int] = (),
        vocab: int = ANY_TOKEN,
        tokenizer: Tokenizer | None = None,
        greedy_plan: Plan = SEQUENTIAL,
        sampled_plan: Plan = SEQUENTIAL,
        trace: Trace | None = None,
        stepper: StepOverRows | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.max_context = max_context
        self.eos_tokens = frozenset(eos_tokens)
        self.vocab = vocab
        self.tokenizer = tokenizer
        self._grammars = None if tokenizer is None else Grammars(tokenizer, target.vocab, eos_tokens)
        self.trace = Trace() if trace is None else trace
        self._greedy = stepper or StepOverRows(target, draft, self.trace, greedy_plan)
        self._sampled = stepper or StepOverRows(target, draft, self.trace, sampled_plan)
        in_one_call = stepper is None and NativeStep.runs(target, draft)
        self._native = NativeStep(target, draft, self.trace) if in_one_call else None
        self.kept_len = 0
        self._one_thread = threading.RLock()  # a step within `generate` has it already
        # the request whose text is in the KV of both models, and how many of its tokens each has; None
        # during a step, and after one that was interrupted
        self._generating: DecodeState | None = None
        self._held: tuple[int, int] | None = (0, 0)

    def __repr__(self) -> str:
        steps = "stages of Python" if self._native is None else "C++"
        return f"Engine(context {self.max_context}, token ids below {self.vocab}, steps in {steps})"

    def step(self, state: DecodeState, policy: ShapePolicy) -> StepResult:
        """Emit one or more tokens. Steps of several threads run one after the other.

        Text that the KV lacks runs first; another request may have replaced it there. If its last chunk
        leaves no room for a tree, that chunk's forward emits one token, and the policy chooses nothing.

        Args:
            state: The request; the emitted tokens are added to its tokens.

        Raises:
            YggError: the target's logits are not finite; the text so far is intact.
            CapacityError: the caches cannot hold both the text and the tree.

        Cost: 1 + (D - 1) draft forwards and one target forward, in addition to those of text that the KV
            lacks; each sync is marked in step/.
        Source: Yggdrasil sections 4 and 5.1. The stages are in step/rows.py.
        """
        with self._one_thread:
            row = self._row(state)
            self._held = None
            if self._prefill_(row):
                return self._run(row, WITHOUT_DRAFT, time.perf_counter(), caught_up=True)
            began = time.perf_counter()
            choice = policy.choose([row])
            self.trace.note(("policy",), (began * 1e3, time.perf_counter() * 1e3))
            drafts = choice.shapes[0].depth > 0
            if drafts and self._prefill_draft_(row):
                # the step's time, which the guard compares with a plain step's, is without the prompt's
                began = time.perf_counter()
            catches_up = drafts and self._catch_up_(row)
            result = self._run(row, WITHOUT_DRAFT if catches_up else choice, began, caught_up=catches_up)
            result.__dict__["is_guarded"] = policy.is_guard
            policy.observe(result)
            return result

    def _run(self, row: Row, choice: Choice, began: float, *, caught_up: bool) -> StepResult:
        """The step of a row, after which both caches and the text have its tokens."""
        self._reserve(row, choice.shapes[0])
        [result] = self._stepper(row, choice).run([row], choice, began)
        if result.error:
            raise YggError(result.error)
        self.target.cache.kept_(row.target_len)
        self.draft.cache.kept_(row.draft_len)
        self._generating = row.state
        self._note_lengths()
        # nobody else has the result yet; `replace` would take a hundredth of a small pair's step
        result.__dict__["caught_up"] = caught_up
        return result

    def _row(self, state: DecodeState) -> Row:
        """The only row of both caches, without KV of another text or beyond this one.

        KV that something else wrote after the last step counts as this text's: measurements prefill both
        caches themselves.
        """
        if self._generating is not state and self._holds_text:
            self._begin_(state, keep=True)
        self._roll_back_(state.root_pos)
        return Row(0, state, self.target.cache.len, self.draft.cache.len)

    def _begin_(self, state: DecodeState, *, keep: bool) -> None:
        """From here on the caches hold a part of this text and nothing else.

        Args:
            keep: Leave what this text has in common with the last one.
        """
        self._roll_back_(self._num_common(state) if keep else 0)
        self._generating = state
        self._note_lengths()
        # its last step may have left them, and another text has used the models since
        state.hidden_of = None
        state.head = None

    def _roll_back_(self, length: int) -> None:
        """Drop the KV of both models from `length` on."""
        for model in (self.target, self.draft):
            model.cache.rollback_(min(model.cache.len, length))

    def _num_common(self, state: DecodeState) -> int:
        """How many tokens of a text, before its root, begin the last one, too, and may be in the KV."""
        last = self._generating
        if last is None or not self._holds_text:
            return 0
        return _num_equal(last.tokens[: last.root_pos], state.tokens[: state.root_pos])

    @property
    def _holds_text(self) -> bool:
        """Whether the KV before its root is that of the last text.

        If the caches have another length than after the last step, something else wrote into them. An
        interrupted step writes only from the root on.
        """
        return self._held in (None, (self.target.cache.len, self.draft.cache.len))

    def _note_lengths(self) -> None:
        self._held = (self.target.cache.len, self.draft.cache.len)

    def _prefill_(self, row: Row) -> bool:
        """Run the text that the target's KV lacks; its last chunk is left to the step.

        Returns:
            Whether that chunk has no room for a tree.
        """
        state = row.state
        num_lacking = state.root_pos - row.target_len
        if num_lacking:
            last_chunk = num_lacking % self.target.prefill_chunk
            with self.trace.stage("prefill"):
                prefill(self.target, state.tokens[: state.root_pos - last_chunk])
            row.target_len = self.target.cache.len
            return last_chunk > min(MAX_MERGED_TOKENS, self.target.prefill_chunk - self.target.widest)
        return False

    def _prefill_draft_(self, row: Row) -> bool:
        """Run the prompt that the draft's KV lacks, if the text has just begun; whether it lacked any.

        Only a step that drafts does so. Plain decoding does not wait for the draft, nor does the first
        token after a long end of the prompt.
        """
        state = row.state
        if state.num_emitted > 1 or row.draft_len >= state.prompt_len - 1:
            return False
        with self.trace.stage("prefill"):
            prefill(self.draft, state.tokens[: min(state.prompt_len, state.root_pos)])
        row.draft_len = self.draft.cache.len
        return True

    def _catch_up_(self, row: Row) -> bool:
        """Run one chunk of the text that the draft's KV lacks, if it lacks that much; whether it ran.

        A draft lags that far after many steps of plain decoding. It catches up over several steps, which
        decode without speculation, so no single step stalls.
        """
        if row.lag < self.draft.prefill_chunk:
            return False
        with self.trace.stage("catch up"):
            prefill(self.draft, row.state.tokens[: row.draft_len + self.draft.prefill_chunk])
        row.draft_len = self.draft.cache.len
        return True

    def _reserve(self, row: Row, shape: Shape) -> None:
        """Raises CapacityError unless both caches can hold the text and the tree."""
        num_nodes = shape.most_nodes(self.draft.max_depth - 1)
        for model in (self.target, self.draft)[: 2 if shape.depth else 1]:
            model.cache.reserve(row.state.root_pos - model.cache.len + num_nodes)

    def _stepper(self, row: Row, choice: Choice) -> NativeStep | StepOverRows:
        """C++ where it knows the stop rule and no stage runs ahead of time."""
        temperature = row.state.sampling.temperature
        by_stages = self._sampled if temperature > 0 else self._greedy
        if self._native is None or by_stages.plan.helps(temperature) or not NativeStep.supports(choice):
            return by_stages
        return self._native

    def plan(self, temperature: float) -> Plan:
        """The order of the stages at this temperature."""
        return self._sampled.plan if temperature > 0 else self._greedy.plan

    def generate(
        self, prompt: Sequence[int], policy: ShapePolicy, config: GenerateConfig, *, keep: bool = False
    ) -> Iterator[StepResult]:
        """Decode one request, a step at a time, until the end of the text or the limit.

        Args:
            prompt: At least one token.
            policy: Chooses the shape of every step. Not used with `config.plain`: the draft never runs.
            keep: Compute the prompt only from where it differs from the last text, whose KV is still there.
                With graphs of equal bits KV has the same bits however it was computed, so the text is the
                same; the first token comes sooner, which a measurement may not want.
            config: Limits, sampling and stop texts.

        Yields:
            The result of every step. Its tokens end at the end of the text, after the token that completes
            a stop text, or at the limit.

        Raises:
            ConfigError: at the call: a prompt that is not a list of tokens, or that does not fit the
                context together with the requested tokens; an id beyond V; stop texts or a grammar without
                a tokenizer; a grammar that does not compile.
            YggError: another generation has begun on this engine and has replaced this text in the KV of
                both models.
        """
        tokens = self._checked(prompt, config.sampling)
        limit = check_request(len(tokens), config, self.max_context)
        if config.stop and self.tokenizer is None:
            raise ConfigError(
                "stop",
                config.stop,
                "left out for an engine without a tokenizer",
                "Engine(..., tokenizer=pair.tokenizer)",
            )
        grammar = grammar_of(self._grammars, config)
        policy = plain_policy() if config.plain else policy
        return self._alone(self._generate(tokens, policy, config, limit, grammar, keep))

    def tree(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        calibration: Calibration = UNCALIBRATED.calibration,
    ) -> DecodingTree:
        """The root of a tree over a prompt, for a loop of one's own; the caller ends the text.

        Args:
            prompt: At least one token.
            sampling: How tokens are taken; without a grammar.
            calibration: From the draft's probabilities to acceptance.

        Raises:
            ConfigError: as `generate`, and for a grammar.

        Cost: the prompt's forwards.
        """
        tokens = self._checked(prompt, sampling)
        config = GenerateConfig(sampling=sampling)
        check_request(len(tokens), config, self.max_context)
        if config.grammar is not None:
            raise ConfigError("grammar", config.grammar.source, "left out for a tree; `generate` takes it")
        state = DecodeState(tokens, sampling.ending_with(self.eos_tokens, self.target.vocab))
        with self._one_thread:
            self._begin_(state, keep=False)
            prefill(self.target, tokens[:-1])
            self._note_lengths()
        return DecodingTree(
            state,
            self.target,
            self.draft,
            calibration,
            capacity=self.draft.cache.shape.capacity - self.max_context,
            alone=partial(self._turn_of, state),
        )

    @contextmanager
    def _turn_of(self, state: DecodeState) -> Iterator[None]:
        """A block in which this text alone uses the KV of both models, and has room for a token."""
        with self._one_thread:
            self._require_own_text(state)
            self._held = None
            if len(state.tokens) >= self.max_context:
                fix = "shorten the prompt or compile with a larger --max-context"
                raise CapacityError("context is full", 1, 0, fix)
            yield

    def _checked(self, prompt: Sequence[int], sampling: SamplingConfig) -> list[int]:
        """The tokens of a prompt, of which and of whose processors every id has an embedding."""
        tokens = checked_prompt(prompt)
        check_tokens(tokens, self.vocab)
        check_processors(sampling.processors, self.vocab)
        return tokens

    def _alone(self, steps: Iterator[StepResult]) -> Iterator[StepResult]:
        """The same steps; no other thread is in a prefill or a step of this engine meanwhile."""
        while True:
            with self._one_thread:
                result = next(steps, None)
            if result is None:
                return
            yield result

    def _generate(
        self,
        prompt: list[int],
        policy: ShapePolicy,
        config: GenerateConfig,
        limit: int,
        grammar: GrammarState | None,
        keep: bool,
    ) -> Iterator[StepResult]:
        ends = config.ends(self.eos_tokens)
        sampling = config.sampling.ending_with(ends, self.target.vocab)
        stream = None
        if config.stop and self.tokenizer is not None:
            stream = TextStream(self.tokenizer, config.stop, prompt)
        state = DecodeState(prompt, sampling, grammar=grammar, inspect=config.inspect)
        self._begin_(state, keep=keep)
        self.kept_len = self.target.cache.len
        while (before := state.num_emitted) < limit:
            self._require_own_text(state)
            result = self.step(state, policy)
            tokens = truncate(result.tokens, room=limit - before, eos_tokens=ends)
            tokens = tokens if stream is None else stream.take(tokens)
            yield result if tokens == result.tokens else replace(result, tokens=tokens)
            is_cut = len(tokens) < len(result.tokens)
            if is_cut or tokens[-1] in ends or (stream is not None and stream.stopped):
                return

    def _require_own_text(self, state: DecodeState) -> None:
        if self._generating is not state:
            raise YggError(
                "another generation has begun on this engine, which decodes one text at a time; "
                "read each to its end first, or load the pair twice"
            )


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the longest beginning that two texts share."""
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((place for place, (one, other) in pairs if one != other), shorter)


def checked_prompt(prompt: Sequence[int]) -> list[int]:
    """The tokens of one prompt. Raises ConfigError for a text, a batch, or entries that are not tokens."""
    if isinstance(prompt, str | bytes):
        raise ConfigError(
            "prompt", prompt[:40], "a list of tokens", "pair.tokenizer.encode(text) makes one"
        )
    try:
        entries = list(prompt)
    except TypeError:
        raise ConfigError("prompt", prompt, "a list of tokens") from None
    tokens = []
    for entry in entries:
        try:
            token = operator.index(entry)
        except TypeError:
            is_batch = isinstance(entry, Sequence) or getattr(entry, "ndim", 0) > 0
            fix = "an engine decodes one prompt at a time; call it for each" if is_batch else ""
            raise ConfigError("prompt", entry, "a list of tokens, which are whole numbers", fix) from None
        tokens.append(token)
    return tokens


def check_request(prompt_len: int, config: GenerateConfig, max_context: int) -> int:
    """The maximum tokens of a request. Raises ConfigError if prompt and output do not fit the context."""
    if prompt_len == 0:
        raise ConfigError("prompt", "", "at least one token")
    room = max_context - prompt_len
    if room < 1:
        raise ConfigError(
            "prompt",
            f"{prompt_len} tokens",
            f"shorter than the context of {max_context} tokens",
            "shorten it or compile with a larger --max-context",
        )
    if config.max_new_tokens is None:
        return min(DEFAULT_NEW_TOKENS, room)
    if config.max_new_tokens > room:
        fix = "ask for fewer or compile with a larger --max-context"
        raise ConfigError(
            "max_new_tokens",
            config.max_new_tokens,
            f"at most {room}: the context holds {max_context} tokens and the prompt takes {prompt_len}",
            fix,
        )
    return config.max_new_tokens


def grammar_of(grammars: Grammars | None, config: GenerateConfig) -> GrammarState | None:
    """The state of a request's grammar at the beginning of its text; None without a grammar.

    Raises:
        ConfigError: it does not compile, or the engine has no tokenizer.
    """
    if config.grammar is None:
        return None
    if grammars is None:
        allowed = "left out for an engine without a tokenizer"
        raise ConfigError("grammar", config.grammar.source, allowed)
    return grammars.state(config.grammar)


def check_tokens(prompt: Sequence[int], vocab: int) -> None:
    """Raises ConfigError for an id without an embedding: a forward would read out of bounds."""
    unknown = next((token for token in prompt if not 0 <= token < vocab), None)
    if unknown is not None:
        raise ConfigError("prompt", unknown, f"made of token ids from 0 to {vocab - 1}")


def check_processors(processors: ProcessorConfig | None, vocab: int) -> None:
    """Raises ConfigError for processors that name an id without a logit."""
    if processors is not None and processors.largest_token >= vocab:
        allowed = f"token ids from 0 to {vocab - 1} in bias and banned sequences"
        raise ConfigError("token", processors.largest_token, allowed)
