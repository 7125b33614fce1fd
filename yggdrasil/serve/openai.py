"""Requests in OpenAI's wire format: fields become requests to the batch.

A field is applied, has a neutral value (what the server does anyway), labels the caller, or is refused by
name; no field is silently ignored. `null` is the same as leaving a field out.

In addition to OpenAI's fields there are those of vLLM's clients that change the distribution or end the
text (`top_k`, `min_p`, `repetition_penalty`, `bad_words`, `min_tokens`, `stop_token_ids`, `ignore_eos`),
its `structured_outputs`, `no_repeat_ngram_size`, and `speculation`: "auto" (the policy decides), "off"
(decode without speculation), or the largest number of draft tokens in a step. What a request leaves out has
the model's own default, from its generation_config.json, before OpenAI's."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from yggdrasil.config import GenerateConfig, GrammarConfig, SamplingConfig
from yggdrasil.serve.cohorts import workload_of
from yggdrasil.serve.messages import Message, Tool, ToolChoice
from yggdrasil.serve.neutral import without_neutral
from yggdrasil.serve.request import Event, Request
from yggdrasil.serve.structured import ResponseFormat, forced_call, possible_calls, structured
from yggdrasil.serve.tools import Format
from yggdrasil.serve.wire import ApiError, Strict
from yggdrasil.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from yggdrasil.serve.chat import ChatTemplate
    from yggdrasil.serve.prompts import PromptEncoder

__all__ = ["ChatRequest", "CompletionRequest", "WireRequest"]

NAMED_SPECULATION = {"auto": None, "off": 0}
MAX_SEED = 2**63 - 1
MOST_BIASED = 1024  # tokens of a request's logit_bias
MOST_BANNED = 128
MOST_CHARS = 1000  # of a banned text or a stop text: each token is compared with all of them
MOST_METADATA = 16  # OpenAI's limit
OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "logit_bias", "no_repeat_ngram_size", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields of a request that are fields of a sampling, under their own names."""


class _StreamOptions(Strict):
    include_usage: bool = False
    include_trees: bool = False


class WireRequest(Strict):
    """The fields that completions and chat completions share; defaults are OpenAI's."""

    prompt_field: ClassVar[str]
    format_field: ClassVar[str] = "response_format"
    default_tokens: ClassVar[int | None] = None

    model: str = ""
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)  # vLLM's clients send -1 for no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASED)] = Field({})
    no_repeat_ngram_size: int = 0
    bad_words: Annotated[list[str], Field(max_length=MOST_BANNED, fail_fast=True)] = Field([])
    min_tokens: int = 0
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_BANNED, fail_fast=True)] = Field([])
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: str | Annotated[list[str], Field(max_length=4, fail_fast=True)] = Field([])
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] = Field({})
    speculation: Literal["off", "auto"] | Annotated[int, Field(ge=1)] = "auto"
    stream: bool = False
    stream_options: _StreamOptions | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=MOST_METADATA)] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return without_neutral(fields, cls.model_fields)

    @model_validator(mode="after")
    def _returns_all_choices(self) -> WireRequest:
        if self.best_of not in (None, self.n):
            message = f"best_of is not supported; leave it out or send n, {self.n}"
            raise ApiError(400, message, param="best_of", code="unsupported_parameter")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> WireRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return self

    @property
    def grammar_field(self) -> str:
        """The field that the grammar comes from."""
        return self.format_field if structured(self.structured_outputs) is None else "structured_outputs"

    @property
    def grammar_parts(self) -> list[tuple[str, GrammarConfig]]:
        """Names and grammars of the parts of the grammar that can be wrong."""
        return []

    def grammar(self, form: Format) -> GrammarConfig | None:
        """What the output must be; None for any text."""
        return self.answer

    @property
    def answer(self) -> GrammarConfig | None:
        """What an answer without calls must be; None for any text."""
        formed = None if self.response_format is None else self.response_format.grammar(self.format_field)
        chosen = structured(self.structured_outputs)
        if formed is not None and chosen is not None:
            message = "response_format and structured_outputs are two grammars; send one of them"
            raise ApiError(400, message, param="structured_outputs")
        return formed or chosen

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output; the value is None if it was left out."""
        return "max_tokens", self.max_tokens

    @property
    def num_top(self) -> int | None:
        """Number of likeliest tokens to report at every place; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def prompt_top(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None

    def returned(self, event: Event) -> Event:
        """The part of an event that the client gets."""
        return event

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_trees(self) -> bool:
        """Whether a stream has the tree of every step."""
        return self.stream_options is not None and self.stream_options.include_trees

    @property
    def num_prompts(self) -> int:
        """Number of prompts, each of which gets `n` choices."""
        return 1

    def check_rows(self, max_rows: int) -> None:
        """Raise ApiError for more rows than can ever be queued."""
        if self.num_prompts * self.n > max_rows:
            requested = f"{self.num_prompts} prompts times n = {self.n} choices"
            message = f"{requested}; at most {max_rows} are served at once"
            raise ApiError(400, message, param="n")

    def prompts(self, encoder: PromptEncoder) -> list[list[int]]:
        """Every prompt as tokens; raises the errors of the encoder."""
        raise NotImplementedError

    def stops(self, template: ChatTemplate) -> tuple[str, ...]:
        """Texts that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_context: int,
        template: ChatTemplate,
        spellings: Callable[[Sequence[str]], list[list[int]]],
        defaults: Mapping[str, Any],
        grammar: GrammarConfig | None = None,
    ) -> list[Request]:
        """`n` requests for every prompt, in the order of the choices' indices.

        Args:
            spellings: `Tokenizer.spellings`.
            defaults: `Bundle.defaults`.
            grammar: What `grammar` returns.

        Raises:
            ApiError: the context does not hold prompt and output, or a stop text is invalid.
            ConfigError: a sampling option is not allowed.
        """
        sampling = self._sampling(spellings, defaults, grammar)
        stops = self.stops(template)
        for text in stops:
            _check_short(text, "stop")
        return [
            self._request(prompt, self._max_new_tokens(len(prompt), max_context), choice, sampling, stops)
            for prompt in prompts
            for choice in range(self.n)
        ]

    def _sampling(
        self,
        spellings: Callable[[Sequence[str]], list[list[int]]],
        defaults: Mapping[str, Any],
        grammar: GrammarConfig | None,
    ) -> SamplingConfig:
        """How tokens are taken, without the seed."""
        for text in self.bad_words:
            if not text:
                raise ApiError(400, "bad_words: a text is empty", param="bad_words")
            _check_short(text, "bad_words")
        options = {name: getattr(self, name) for name in OPTIONS}
        options["logit_bias"] = {_token_of(key): value for key, value in self.logit_bias.items()}
        options |= {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        options["grammar"] = grammar
        options["top_k"] = max(0, options["top_k"])
        options["banned"] = [*defaults.get("banned", ()), *spellings(self.bad_words)]
        return SamplingConfig.of(options)

    def _request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        choice: int,
        sampling: SamplingConfig,
        stops: tuple[str, ...],
    ) -> Request:
        # every prompt of a list gets the seeds that it would get alone
        seed = secrets.randbits(63) if self.seed is None else (self.seed + choice) % (MAX_SEED + 1)
        config = GenerateConfig(
            max_new_tokens=max_new_tokens,
            stop=stops,
            stop_tokens=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            sampling=replace(sampling, seed=seed),
        )
        given = self.speculation
        speculation = NAMED_SPECULATION[given] if isinstance(given, str) else given
        return Request(
            prompt=prompt,
            config=config,
            speculation=speculation,
            num_top=self.num_top,
            prompt_top=self.prompt_top,
            workload=workload_of(self.metadata),
            trees=self.include_trees,
        )

    def _max_new_tokens(self, prompt_len: int, max_context: int) -> int:
        if prompt_len == 0:
            message = f"{self.prompt_field}: at least one token is needed"
            raise ApiError(400, message, param=self.prompt_field)
        most = max_context - prompt_len
        field, requested = self.limit
        sizes = f"the context holds {max_context} tokens and the prompt takes {prompt_len}"
        if most < 1:
            message = f"{sizes}; shorten it"
            raise ApiError(400, message, param=self.prompt_field, code="context_length_exceeded")
        if requested is None:
            return most if self.default_tokens is None else min(self.default_tokens, most)
        if requested == 0:  # a token is decoded, and `returned` leaves it out
            return 1
        if requested > most:
            message = f"{field} is {requested}; {sizes}, so at most {most} can follow"
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        return requested


def _check_short(text: str, field: str) -> None:
    if len(text) > MOST_CHARS:
        message = f"{field}: a text of {len(text)} characters; at most {MOST_CHARS} are allowed"
        raise ApiError(400, message, param=field)


def _token_of(key: str) -> int:
    """The token id that a key of `logit_bias` names."""
    if not key.isascii() or not key.isdecimal():
        raise ApiError(400, f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
    return int(key[:20])


class CompletionRequest(WireRequest):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"
    default_tokens: ClassVar[int | None] = 16

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[list[int]], Field(fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def num_top(self) -> int | None:
        """The value of `logprobs`."""
        return self.logprobs

    @property
    def prompt_top(self) -> int | None:
        """The value of `prompt_logprobs`, or with `echo` of `logprobs`; the larger one of both."""
        wanted = [self.logprobs if self.echo else None, self.prompt_logprobs]
        return max((count for count in wanted if count is not None), default=None)

    def returned(self, event: Event) -> Event:
        """Nothing of the output if `max_tokens` is 0."""
        if self.max_tokens != 0:
            return event
        finish = "length" if event.finish == "stop" else event.finish
        return replace(event, text="", tokens=(), log_probs=(), finish=finish)

    @property
    def num_prompts(self) -> int:
        """1, or the length of a list of prompts."""
        return len(self._prompt_list)

    @property
    def _prompt_list(self) -> Sequence[Any]:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt

    def prompts(self, encoder: PromptEncoder) -> list[list[int]]:
        """Encode texts, and check token ids against the vocabulary."""
        return [encoder.tokens(prompt, "prompt") for prompt in self._prompt_list]

    def echoed(self, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
        """The text that precedes every choice."""
        if not self.echo:
            return []
        pairs = zip(self._prompt_list, prompts, strict=True)
        texts = [given if isinstance(given, str) else tokenizer.decode(tokens) for given, tokens in pairs]
        return [text for text in texts for _ in range(self.n)]


class ChatRequest(WireRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"
    schema_field: ClassVar[str] = "function.parameters"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([])
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _forces_what_it_offers(self) -> ChatRequest:
        if self.tool_choice not in ("none", "auto") and not self.forced:
            names = ", ".join(tool.function.name for tool in self.tools) or "none"
            message = f"tool_choice names a function that tools does not offer (offered: {names})"
            raise ApiError(400, message, param="tool_choice")
        return self

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            message = "max_tokens and max_completion_tokens differ; send one of them"
            raise ApiError(400, message, param="max_tokens")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        """As in the base class; if both names are given, the newer one is used."""
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model sees and may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced(self) -> list[Tool]:
        """The tools one of which the answer must call."""
        if isinstance(self.tool_choice, ToolChoice):
            wanted = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == wanted]
        return self.tools if self.tool_choice == "required" else []

    @property
    def _is_strict(self) -> bool:
        """Whether an offered function binds the arguments of its calls."""
        return any(tool.function.strict for tool in self.offered)

    @property
    def grammar_field(self) -> str:
        """As in the base class, or the tools."""
        return "tools" if self.forced or self._is_strict else super().grammar_field

    @property
    def grammar_parts(self) -> list[tuple[str, GrammarConfig]]:
        """The schemas that bind calls, of forced functions or of strict ones, and that of an answer."""
        bound = self.forced or [tool for tool in self.offered if tool.function.strict]
        answer = None if self.forced else self.answer
        return [
            (f"tools[{place}].{self.schema_field}", GrammarConfig.of("json", tool.function.parameters))
            for place, tool in enumerate(self.tools)
            if tool in bound and tool.function.parameters
        ] + ([(super().grammar_field, answer)] if answer is not None else [])

    def grammar(self, form: Format) -> GrammarConfig | None:
        """As in the base class, or that of calls: one that must be made, or those that may be made.

        `response_format` is that of an answer, so a call that must be made has nothing to do with it. An
        answer in JSON may be a call instead, if a call always has a marker.
        """
        answer = self.answer
        if self.forced:
            if structured(self.structured_outputs) is None:
                return forced_call(self.forced, form)
            message = "tool_choice and structured_outputs are two grammars; send one of them"
            raise ApiError(400, message, param="tool_choice")
        if not self._is_strict and not (answer is not None and self.may_call(form)):
            return answer
        is_json = answer is not None and answer.kind == "json"
        if answer is not None and (not is_json or form.is_bare):
            message = f"tools and {super().grammar_field} are two grammars; send one of them"
            reason = ": calls of this model need no marker, so an answer in JSON could be one"
            raise ApiError(400, f"{message}{reason if is_json else ''}", param="tools")
        calls = possible_calls(self.offered, form, answer)
        if answer is None and self.include_reasoning is not None and form.is_bare:
            reason = "this model's calls begin an answer, so none is bound after reasoning"
            message = f"include_reasoning and strict functions: {reason}; send one of them"
            raise ApiError(400, message, param="include_reasoning")
        return calls

    def may_call(self, form: Format) -> bool:
        """Whether the answer may have calls.

        Under a grammar of the answer it has none, except instead of JSON where a call always has a marker.
        """
        answer = self.answer
        if self.forced or answer is None:
            return bool(self.offered)
        return bool(self.offered) and answer.kind == "json" and not form.is_bare

    def has_free_text(self, form: Format) -> bool:
        """Whether the answer may be any text before a call, so it may begin with reasoning.

        Under another grammar the whole text is the answer, also if the template has opened the reasoning.
        """
        if self.grammar(form) is None:
            return True
        return self.answer is None and not self.forced and not form.is_bare

    @property
    def num_top(self) -> int | None:
        """The value of `top_logprobs`, if `logprobs` is set."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, encoder: PromptEncoder) -> list[list[int]]:
        """Render and encode the conversation; a model's own template writes the special tokens itself."""
        messages = [message.rendered() for message in self.messages]
        text = encoder.template.render(messages, [tool.rendered() for tool in self.offered])
        return [encoder.encode(text, self.prompt_field, special_tokens=not encoder.template.is_own)]

    def stops(self, template: ChatTemplate) -> tuple[str, ...]:
        """As in the base class, and what begins a user's turn if the model has no template of its own."""
        return (*super().stops(template), *template.stops)
