"""The online half: decode one request, step by step.

A step (`Engine.step`) emits one or more tokens:
    choose      the policy chooses the shape of the tree: W nodes per growth step, D steps
    roll back   KV of an interrupted step is dropped
    draft       the draft model grows a tree of candidate tokens under the last token
    prune       the subtree with the most expected tokens per millisecond is kept
    verify      the target runs all its nodes in one forward
    accept      the path on which the tree has the target's own tokens is accepted, plus one bonus token
    commit      the path's KV is kept in both caches and its tokens are added to the text
    observe     the policy sees the result
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from yggdrasil.config import DEFAULT_NEW_TOKENS, GenerateConfig
from yggdrasil.errors import ConfigError, YggError
from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.schedule.executor import Executor
from yggdrasil.schedule.plan import Plan
from yggdrasil.state import PLAIN, DecodeState, Row, StepResult, truncate
from yggdrasil.step.accept import accept
from yggdrasil.step.choice import Choice
from yggdrasil.step.commit import commit_, roll_back_unfinished_
from yggdrasil.step.draft import catch_up_, draft, prefill, row_of
from yggdrasil.step.native import NativeStep
from yggdrasil.step.prune import prune
from yggdrasil.step.verify import verify
from yggdrasil.tokenizer import TextStream, Tokenizer
from yggdrasil.trace import Trace

__all__ = ["Engine", "check_request", "check_tokens", "checked_prompt"]

ANY_TOKEN = 2**31  # the metadata of a forward is int32
# One graph for up to 32 prompt tokens and a tree costs less than two graphs.
MAX_MERGED_TOKENS = 32


class Engine:
    """Decodes text with a pair of models.

    Args:
        target: Decides every token.
        draft: Proposes tokens.
        max_context: Maximum tokens of prompt and output together.
        eos_tokens: Tokens that end a text.
        vocab: V: token ids of both models are below V.
        tokenizer: Decodes emitted tokens to find stop texts; without one, stop texts are refused.
        greedy_plan: How `generate` runs iterations at temperature 0. Without a plan, or with one without
            effect there, an iteration is one native call where both models support it, else `step`.
        sampled_plan: The same above temperature 0.
        trace: Collects the milliseconds of the stages; a new one when not given.

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
        ...     device, max_depth, sizes, prefill_chunk = "cpu", 3, (8,), 8
        ...     widest, num_candidates, graph_ms = 8, 1, 0.0
        ...     def __init__(self, is_draft):
        ...         shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=16, capacity=64)
        ...         self.cache = KVCache(shape, dtype=torch.float32, device="cpu")
        ...         self.is_draft = is_draft
        ...     def meta(self, num_tokens):
        ...         return empty_meta(8, self.max_depth)
        ...     def native(self, meta_NM):
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
        greedy_plan: Plan | None = None,
        sampled_plan: Plan | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.max_context = max_context
        self.eos_tokens = frozenset(eos_tokens)
        self.vocab = vocab
        self.tokenizer = tokenizer
        self.trace = Trace() if trace is None else trace
        in_one_call = NativeStep.runs(target, draft)
        self._native = NativeStep(target, draft, self.trace) if in_one_call else None
        self._greedy = self._executor(greedy_plan, 0.0)
        self._sampled = self._executor(sampled_plan, 1.0)
        # the request whose text is in the KV of both models
        self._generating: DecodeState | None = None

    def step(self, state: DecodeState, policy: ShapePolicy) -> StepResult:
        """Emit one or more tokens: the specification of an iteration, see the top of this module.

        Args:
            state: The request; the emitted tokens are added to its tokens.
            policy: Chooses the shape.

        Raises:
            YggError: the target's logits are not finite; the text so far is intact.

        Cost: 1 + (D - 1) draft forwards and one target forward; each sync is marked in step/.
        Source: Yggdrasil sections 4 and 5.1, stages one after another.
        """
        began = time.perf_counter()
        with self.trace.stage("policy"):
            choice = policy.choose([row_of(state, self.target, self.draft)])
        result = self._run(state, choice, began)
        policy.observe(result)
        return result

    def _run(self, state: DecodeState, choice: Choice, began: float) -> StepResult:
        """The stages of `step` after the choice."""
        root_pos = state.root_pos
        shape = choice.shapes[0]
        stage = self.trace.stage
        roll_back_unfinished_(self.target, self.draft, root_pos)
        with stage("draft"):
            caught_up = shape.depth > 0 and catch_up_(self.draft, state)
            platt = choice.calibrations[0].platt
            drafted = draft(self.draft, state, PLAIN if caught_up else shape, platt)
        with stage("prune"):
            pruned = prune(drafted.tree, drafted.shape, choice)
        with stage("verify"):
            logits_KV, hidden_KE = verify(self.target, pruned.tree, state.tokens)
        with stage("accept"):
            accepted = accept(pruned.tree, logits_KV, root_pos, state.sampling)
        with stage("commit"):
            commit_(state, self.target, self.draft, pruned, accepted, drafted.num_run, hidden_KE)
        return StepResult(
            tokens=accepted.tokens,
            shape=drafted.shape,
            drafted=len(drafted.tree),
            verified=len(pruned.tree),
            context_len=root_pos,
            predicted_emitted=pruned.expected_emitted,
            tree_of=lambda: pruned.tree,
            path=accepted.path,
            ms=(time.perf_counter() - began) * 1e3,
            caught_up=caught_up,
        )

    def planned(self, temperature: float) -> Executor | None:
        """The executor of `generate` at this temperature, if a plan gains there."""
        return self._sampled if temperature > 0 else self._greedy

    def fast_step(self, state: DecodeState, policy: ShapePolicy) -> StepResult:
        """`step` as `generate` runs it: the same results, faster."""
        planned = self.planned(state.sampling.temperature)
        if planned is not None:
            return planned.step(state, policy)
        if self._native is None:
            return self.step(state, policy)
        return self._native_step(self._native, state, policy)

    def _native_step(self, native: NativeStep, state: DecodeState, policy: ShapePolicy) -> StepResult:
        """`step` in one call of C++, if that runs the shape together with the text that the caches lack."""
        began = time.perf_counter()
        roll_back_unfinished_(self.target, self.draft, state.root_pos)
        row = row_of(state, self.target, self.draft)
        choice = policy.choose([row])
        self.trace.note(("policy",), (began * 1e3, time.perf_counter() * 1e3))
        if self._fits(row, choice):
            [result] = native.run([row], choice, began)
            self.draft.cache.kept_(row.draft_len)
            if result.error:
                raise YggError(result.error)
            self.target.cache.kept_(row.target_len)
        else:
            result = self._run(state, choice, began)
        policy.observe(result)
        return result

    def _fits(self, row: Row, choice: Choice) -> bool:
        """Whether C++ knows the stop rule, the draft's lag is one chunk, and the tree fits both caches."""
        [shape] = choice.shapes
        root_pos = row.state.root_pos
        capacity = min(self.target.cache.shape.capacity, self.draft.cache.shape.capacity)
        return (
            NativeStep.supports(choice)
            and (shape.depth == 0 or row.lag < self.draft.prefill_chunk)
            and root_pos + shape.num_nodes <= capacity
            and root_pos - row.target_len + shape.num_nodes <= self.target.prefill_chunk
        )

    def _executor(self, plan: Plan | None, temperature: float) -> Executor | None:
        if plan is None or not plan.helps(temperature):
            return None
        return Executor(plan, self.target, self.draft, self.trace)

    def generate(
        self, prompt: Sequence[int], policy: ShapePolicy, config: GenerateConfig
    ) -> Iterator[StepResult]:
        """Decode one request, a step at a time, until the end of the text or the limit.

        Args:
            prompt: At least one token.
            policy: Chooses the shape of every step. Not used with `config.plain`: the draft never runs.
            config: Limits, sampling and stop texts.

        Yields:
            The result of every step. Its tokens end at the end of the text, after the token that completes
            a stop text, or at the limit.

        Raises:
            ConfigError: at the call: a prompt that is not a list of tokens, or that does not fit the
                context together with the requested tokens; an id beyond V; stop texts without a tokenizer.
            YggError: another generation has begun on this engine and has replaced this text in the KV of
                both models.
        """
        tokens = checked_prompt(prompt)
        check_tokens(tokens, self.vocab)
        limit = check_request(len(tokens), config, self.max_context)
        if config.stop and self.tokenizer is None:
            raise ConfigError(
                "stop",
                config.stop,
                "left out for an engine without a tokenizer",
                "Engine(..., tokenizer=pair.tokenizer)",
            )
        return self._generate(tokens, plain_policy() if config.plain else policy, config, limit)

    def _generate(
        self, prompt: list[int], policy: ShapePolicy, config: GenerateConfig, limit: int
    ) -> Iterator[StepResult]:
        eos_tokens = frozenset[int]() if config.ignore_eos else self.eos_tokens
        stream = None
        if config.stop and self.tokenizer is not None:
            stream = TextStream(self.tokenizer, config.stop, prompt)
        self._generating = state = DecodeState(prompt, config.sampling)
        self.target.cache.rollback_(0)
        self.draft.cache.rollback_(0)
        with self.trace.stage("prefill"):
            num_merged = self._num_merged_with_verify(state.root_pos)
            hidden_E = prefill(self.target, state.tokens[: state.root_pos - num_merged])
            state.hidden_of = None if hidden_E is None or num_merged else hidden_E.detach
            if not config.plain:
                prefill(self.draft, state.tokens[:-1])
        while (before := state.num_emitted) < limit:
            self._require_own_text(state)
            result = self.fast_step(state, policy)
            tokens = truncate(result.tokens, room=limit - before, eos_tokens=eos_tokens)
            tokens = tokens if stream is None else stream.take(tokens)
            yield result if tokens == result.tokens else replace(result, tokens=tokens)
            is_cut = len(tokens) < len(result.tokens)
            if is_cut or tokens[-1] in eos_tokens or (stream is not None and stream.stopped):
                return

    def _require_own_text(self, state: DecodeState) -> None:
        if self._generating is not state:
            raise YggError(
                "another generation has begun on this engine, which decodes one text at a time; "
                "read each to its end first, or load the pair twice"
            )

    def _num_merged_with_verify(self, root_pos: int) -> int:
        """How many last prompt tokens run in the first verification: a few cost less there than alone."""
        last_chunk = root_pos % self.target.prefill_chunk
        room = min(MAX_MERGED_TOKENS, self.target.prefill_chunk - self.target.widest)
        return last_chunk if last_chunk <= room else 0


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


def check_tokens(prompt: Sequence[int], vocab: int) -> None:
    """Raises ConfigError for an id without an embedding: a forward would read out of bounds."""
    unknown = next((token for token in prompt if not 0 <= token < vocab), None)
    if unknown is not None:
        raise ConfigError("prompt", unknown, f"made of token ids from 0 to {vocab - 1}")
