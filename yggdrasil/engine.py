"""The online half: one request at a time, one step at a time."""

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
from yggdrasil.schedule.native import NativeStep
from yggdrasil.schedule.plan import Plan
from yggdrasil.state import PLAIN, DecodeState, Shape, StepResult, truncate
from yggdrasil.step.accept import accept
from yggdrasil.step.commit import commit_, forget_unfinished_
from yggdrasil.step.draft import catch_up_, draft, prefill
from yggdrasil.step.prune import prune
from yggdrasil.step.verify import verify
from yggdrasil.tokenizer import TextStream, Tokenizer
from yggdrasil.trace import Trace

__all__ = ["Engine", "check_request", "check_tokens", "checked_prompt"]

ANY_TOKEN = 2**31  # ids that the metadata of a forward, int32, can hold
# a graph of so many tokens and a tree costs less than two graphs; a longer prompt would take the chunk's
# graph twice
MOST_LEFT = 32


class Engine:
    """A pair of models and a policy.

    Args:
        target: Decides every token.
        draft: Guesses.
        max_context: Most tokens of prompt and output together.
        eos_tokens: Tokens that end a text.
        vocab: V: the token ids of both models go from 0 up to this.
        tokenizer: Reads what was emitted, for stop texts; without one they are refused.
        greedy_plan: How `generate` runs iterations at temperature 0; without a plan, or with one that does
            nothing there, they run in one call where both models can, else by `step`.
        sampled_plan: The same above temperature 0.
        trace: Where the milliseconds of stages go; a new one when not given.

    Example: a target that counts, and a draft that counts too. `load_pair().engine` is one over compiled
    models.
        >>> import torch
        >>> from yggdrasil import GenerateConfig
        >>> from yggdrasil.kernels import load_kernels
        >>> from yggdrasil.kv import KVCache, KVShape
        >>> from yggdrasil.layout import TOKEN
        >>> from yggdrasil.models.packing import empty_meta
        >>> from yggdrasil.policy.uncalibrated import uncalibrated_policy
        >>> from yggdrasil.state import Shape
        >>> class Counting:
        ...     device, max_depth, sizes, prefill_chunk, widest, num_candidates, graph_ms = "cpu", 3, (8,), 8, 8, 1, 0.0
        ...     def __init__(self, guesses):
        ...         self.cache = KVCache(KVShape(num_layers=1, num_kv_heads=1, head_dim=16, capacity=64), dtype=torch.float32, device="cpu")
        ...         self.guesses = guesses
        ...     def meta(self, num_tokens):
        ...         return empty_meta(8, self.max_depth)
        ...     def native(self, meta_NM):
        ...         return None
        ...     def forward(self, meta_NM):
        ...         next_N1 = (meta_NM[:, TOKEN:TOKEN + 1].long() + 1) % 10
        ...         return (next_N1, -0.1 * torch.ones(8, 1)) if self.guesses else (torch.eye(10)[next_N1[:, 0]], torch.zeros(8, 1))
        >>> load_kernels()
        >>> engine = Engine(Counting(guesses=False), Counting(guesses=True), max_context=32)
        >>> three_guesses = uncalibrated_policy(Shape(width=1, depth=3, verify=4))
        >>> [result.tokens for result in engine.generate([7], three_guesses, GenerateConfig(max_new_tokens=6))]
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
        self._native = NativeStep(target, draft, self.trace, self.step_with) if in_one_call else None
        self._greedy = self._executor(greedy_plan, 0.0)
        self._sampled = self._executor(sampled_plan, 1.0)
        # whose text the KV of both models holds, since `generate` began it
        self._generating: DecodeState | None = None

    def step(self, state: DecodeState, policy: ShapePolicy) -> StepResult:
        """Emit one or more tokens: the specification of an iteration.

        Args:
            state: The request; its tokens are extended by what is emitted.
            policy: Chooses the shape.

        Raises:
            YggError: the target's logits are not finite; the text so far is intact.

        Cost: 1 + (D - 1) draft forwards and one target forward; the syncs are named in step/.
        Source: Yggdrasil sections 4 and 5.1, stages one after another.
        """
        began = time.perf_counter()
        with self.trace.stage("policy"):
            shape = policy.choose(state)
        return self.step_with(state, policy, shape, began)

    def step_with(self, state: DecodeState, policy: ShapePolicy, shape: Shape, began: float) -> StepResult:
        """`step` with a shape that was chosen already.

        Args:
            state: The request.
            policy: What chose; it is not asked for a shape again.
            shape: Its choice.
            began: `time.perf_counter` before it chose: choosing is part of the step.
        """
        root_pos = state.root_pos
        stage = self.trace.stage
        forget_unfinished_(self.target, self.draft, root_pos)
        with stage("draft"):
            caught_up = shape.depth > 0 and catch_up_(self.draft, state)
            drafted = draft(self.draft, state, PLAIN if caught_up else shape, policy.platt)
        with stage("prune"):
            pruned = prune(
                drafted.tree, drafted.shape, policy, root_pos, lag=root_pos - self.target.cache.len
            )
        with stage("verify"):
            logits_KV, hidden_KE = verify(self.target, pruned.tree, state.tokens)
        with stage("accept"):
            accepted = accept(pruned.tree, logits_KV, root_pos, state.sampling)
        with stage("commit"):
            commit_(state, self.target, self.draft, pruned, accepted, drafted.num_run, hidden_KE)
        ms = (time.perf_counter() - began) * 1e3
        sizes = len(drafted.tree), len(pruned.tree)
        result = StepResult(
            accepted.tokens,
            drafted.shape,
            *sizes,
            root_pos,
            pruned.expected_emitted,
            lambda: pruned.tree,
            accepted.path,
            ms,
            caught_up,
        )
        policy.observe(result)
        return result

    def _executor(self, plan: Plan | None, temperature: float) -> Executor | None:
        if plan is None or not plan.helps(temperature):
            return None
        return Executor(plan, self.target, self.draft, self.trace)

    def runner(self, temperature: float) -> Executor | NativeStep | Engine:
        """Whose `step` runs the iterations of `generate` at this temperature."""
        planned = self._sampled if temperature > 0 else self._greedy
        return planned or self._native or self

    def fast_step(self, state: DecodeState, policy: ShapePolicy) -> StepResult:
        """`step`, as `generate` runs it; result for result the same."""
        return self.runner(state.sampling.temperature).step(state, policy)

    def generate(
        self, prompt: Sequence[int], policy: ShapePolicy, config: GenerateConfig
    ) -> Iterator[StepResult]:
        """Decode one request, a step at a time, until the end of the text or the limit.

        Args:
            prompt: At least one token.
            policy: Chooses the shape of every step. Not asked where the request says plain: then the draft
                runs neither over the prompt nor after it.
            config: Limits, sampling and stop texts.

        Yields:
            What every step did, with its tokens cut at the end of the text, behind the token that completes
            a stop text, and at the limit.

        Raises:
            ConfigError: at the call: a prompt that is no list of tokens, or one that the context cannot
                hold with the tokens asked for; an id beyond V; stop texts without a tokenizer.
            YggError: another generation has begun on this engine since: its text took the place of this
                one's in the KV of both models.
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
        stream = (
            TextStream(self.tokenizer, config.stop, prompt)
            if config.stop and self.tokenizer is not None
            else None
        )
        self._generating = state = DecodeState(prompt, config.sampling)
        self.target.cache.rollback_(0)
        self.draft.cache.rollback_(0)
        with self.trace.stage("prefill"):
            left = self._left_to_verification(state.root_pos)
            hidden_E = prefill(self.target, state.tokens[: state.root_pos - left])
            state.hidden_of = None if hidden_E is None or left else hidden_E.detach
            if not config.plain:
                prefill(self.draft, state.tokens[:-1])
        while (before := state.num_emitted) < limit:
            self._require_own_text(state)
            result = self.fast_step(state, policy)
            tokens = truncate(result.tokens, room=limit - before, eos_tokens=eos_tokens)
            tokens = tokens if stream is None else stream.take(tokens)
            yield result if tokens == result.tokens else replace(result, tokens=tokens)
            if (
                len(tokens) < len(result.tokens)
                or tokens[-1] in eos_tokens
                or (stream is not None and stream.stopped)
            ):
                return

    def _require_own_text(self, state: DecodeState) -> None:
        if self._generating is not state:
            raise YggError(
                "another generation has begun on this engine, which decodes one text at a time; read each to its end first, or load the pair twice"
            )

    def _left_to_verification(self, root_pos: int) -> int:
        """How many tokens of a prompt's last chunk run beside the first tree: a few cost less there than a
        pass over the weights of their own.
        """
        left = root_pos % self.target.prefill_chunk
        return left if left <= min(MOST_LEFT, self.target.prefill_chunk - self.target.widest) else 0


def checked_prompt(prompt: Sequence[int]) -> list[int]:
    """The tokens of one prompt; raises ConfigError for a text, a batch, and what is no token."""
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
    """The most tokens this request may emit; raises ConfigError when prompt and output do not fit the
    context.
    """
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
    """Raises ConfigError at an id that the models have no embedding for: a forward would read beyond it."""
    unknown = next((token for token in prompt if not 0 <= token < vocab), None)
    if unknown is not None:
        raise ConfigError("prompt", unknown, f"made of token ids from 0 to {vocab - 1}")
