"""OpenAI's wire format: what a client asks becomes requests of the batch, and events become what it reads.

Every field either applies, is neutral (what the server does anyway), only labels the caller, or is refused by name: none
silently does nothing. `null` is the same as leaving a field out.

Beyond OpenAI's: `top_k`, `min_p`, `ignore_eos`, and `speculation`, which is "auto" (the policy decides), "off" (this
request decodes without), or the most draft tokens of a step. Usage counts `target_passes` as well, so that tokens per pass
can be read from every reply.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.request import Event, Request, TokenLogProb
from yggdrasil.tokenizer import Tokenizer

__all__ = ["ApiError", "ChatReply", "ChatRequest", "CompletionReply", "CompletionRequest", "Reply", "WireRequest", "merge"]

LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # who asks, not what
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
LEAST_LOG_PROB = -9999.0  # JSON has no infinity; OpenAI writes this
MAX_SEED = 2**63 - 1


class ApiError(Exception):
    """An HTTP error in OpenAI's shape.

    Args:
        status: HTTP status code.
        message: What is wrong and what would be right.
        param: The field to blame.
        code: For programs.
        headers: Of the response.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that clients know."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        return {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields


class _StreamOptions(_Strict):
    include_usage: bool = False


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_TextPart], Field(fail_fast=True)]

    def rendered(self) -> dict[str, str]:
        """As templates expect it: they know no developer, and a role they do not know can vanish without a word."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class WireRequest(_Strict):
    """The fields that completions and chat completions share; defaults are OpenAI's."""

    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int | None] = None

    model: str = ""
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: str | Annotated[list[str], Field(max_length=4)] = []
    ignore_eos: bool = False
    speculation: Literal["off", "auto"] | Annotated[int, Field(ge=1)] = "auto"
    stream: bool = False
    stream_options: _StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_not_apply(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name, neutral in NEUTRAL.items():
            if fields.get(name) is not None and fields[name] not in neutral:
                allowed = f"; leave it out or send {' or '.join(map(repr, neutral))}" if neutral else "; leave it out"
                raise ApiError(400, f"{name} is not supported{allowed}", param=name, code="unsupported_parameter")
        return {name: value for name, value in fields.items() if name not in NEUTRAL and name not in LABELS}

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> WireRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        """The name and the value of the field that limits the output; None when the client left it out."""
        return "max_tokens", self.max_tokens

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens wanted at every place; None wants no log-probabilities."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def prompts(self, tokenizer: Tokenizer, template: ChatTemplate) -> list[list[int]]:
        """Every prompt as tokens."""
        raise NotImplementedError

    def requests(self, prompts: Sequence[Sequence[int]], *, max_context: int, max_rows: int) -> list[Request]:
        """`n` requests for every prompt, in the order of the choices' indices.

        Raises:
            ApiError: more rows than can ever be queued, or a prompt and an output that the context does not hold.
            ConfigError: a sampling option that is not allowed.
        """
        if len(prompts) * self.n > max_rows:
            raise ApiError(400, f"{len(prompts)} prompts times n = {self.n} choices; at most {max_rows} are served at once", param="n")
        return [self._request(prompt, self._room(len(prompt), max_context), choice) for prompt in prompts for choice in range(self.n)]

    def _request(self, prompt: Sequence[int], max_new_tokens: int, choice: int) -> Request:
        # every prompt of a list gets the seeds it would get alone
        seed = secrets.randbits(63) if self.seed is None else (self.seed + choice) % (MAX_SEED + 1)
        sampling = SamplingConfig(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=seed)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        config = GenerateConfig(max_new_tokens=max_new_tokens, stop=stop, ignore_eos=self.ignore_eos, sampling=sampling)
        speculation = {"auto": None, "off": 0}[self.speculation] if isinstance(self.speculation, str) else self.speculation
        return Request(prompt=prompt, config=config, speculation=speculation, num_top=self.num_top)

    def _room(self, prompt_len: int, max_context: int) -> int:
        if prompt_len == 0:
            raise ApiError(400, f"{self.prompt_field}: at least one token is needed", param=self.prompt_field)
        room, (field, asked) = max_context - prompt_len, self.limit
        if room < 1:
            message = f"the context holds {max_context} tokens and the prompt takes {prompt_len}; shorten it"
            raise ApiError(400, message, param=self.prompt_field, code="context_length_exceeded")
        if asked is None:
            return room if self.default_tokens is None else min(self.default_tokens, room)
        if asked > room:
            message = f"{field} is {asked}; the context holds {max_context} tokens and the prompt takes {prompt_len}, so at most {room} can follow"
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        return asked


class CompletionRequest(WireRequest):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"
    default_tokens: ClassVar[int | None] = 16

    prompt: str | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[int], Field(fail_fast=True)] | Annotated[list[list[int]], Field(fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ApiError(400, f"best_of is not supported; leave it out or send n, {self.n}", param="best_of", code="unsupported_parameter")
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "logprobs with echo is not supported: log-probabilities of the prompt are not computed", param="logprobs")
        return self

    @property
    def num_top(self) -> int | None:
        """As `logprobs` says."""
        return self.logprobs

    def prompts(self, tokenizer: Tokenizer, template: ChatTemplate) -> list[list[int]]:
        """Texts are encoded; token ids are checked against the vocabulary."""
        several: Any = self.prompt if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int) else [self.prompt]
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in several]
        unknown = next((token for prompt in prompts for token in prompt if not 0 <= token < tokenizer.num_tokens), None)
        if unknown is not None:
            raise ApiError(400, f"prompt: {unknown} is no token; ids go from 0 to {tokenizer.num_tokens - 1}", param="prompt")
        return prompts

    def echoed(self, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
        """What precedes the text of every choice."""
        if not self.echo:
            return []
        given = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        return [given[row] if isinstance(given[row], str) else tokenizer.decode(tokens) for row, tokens in enumerate(prompts) for _ in range(self.n)]  # type: ignore[misc]


class ChatRequest(WireRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens say different things; send one of them", param="max_tokens")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        """The newer name wins; both never disagree."""
        return super().limit if self.max_completion_tokens is None else ("max_completion_tokens", self.max_completion_tokens)

    @property
    def num_top(self) -> int | None:
        """As `top_logprobs` says, if `logprobs` is set."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, tokenizer: Tokenizer, template: ChatTemplate) -> list[list[int]]:
        """The conversation through the template; a model's own template writes the special tokens itself."""
        text = template.render([message.rendered() for message in self.messages])
        return [tokenizer.encode(text, special_tokens=not template.is_own)]


def merge(events: Sequence[Event]) -> Event:
    """All events of a row as one."""
    return Event(
        text="".join(event.text for event in events),
        tokens=[token for event in events for token in event.tokens],
        log_probs=[entry for event in events for entry in event.log_probs],
        finish=events[-1].finish,
    )


class Reply:
    """Writes what one HTTP request's rows emit as OpenAI's objects; counts it.

    Args:
        request: What was asked.
        model: Served name.
        tokenizer: Spells tokens.
        prompts: As tokens.
    """

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, request: WireRequest, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> None:
        self._head = {"id": f"{self.id_prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._request = request
        self._tokenizer = tokenizer
        self._prompt_tokens = sum(map(len, prompts))
        self._emitted = 0
        self._passes = 0

    def count(self, event: Event) -> None:
        """Enter an event into the usage."""
        self._emitted += len(event.tokens)
        self._passes += bool(event.tokens)

    def chunk(self, index: int, event: Event) -> dict[str, Any]:
        """What a stream sends for an event of choice `index`."""
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": [self._delta(index, event)], **usage}

    def last_chunk(self) -> dict[str, Any]:
        """What ends a stream that was asked for its usage."""
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": self._usage()}

    def whole(self, choices: Sequence[Event]) -> dict[str, Any]:
        """The answer to a request that did not ask for a stream; one merged event per choice."""
        written = [self._choice(index, event) for index, event in enumerate(choices)]
        return {**self._head, "object": self.kind, "choices": written, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self._emitted
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._emitted, "total_tokens": total, "target_passes": self._passes}

    def _choice(self, index: int, event: Event) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        raise NotImplementedError

    def _spelled(self, token: int) -> str:
        """Text of a token; bytes that are part of a character are escaped, as OpenAI does."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + re.sub(r"^b['\"]|['\"]$", "", repr(data))


class CompletionReply(Reply):
    """Objects of /v1/completions."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(request, model, tokenizer, prompts)
        self._unsent_echo = dict(enumerate(request.echoed(prompts, tokenizer)))
        self._spelled_bytes: dict[int, bytes] = {}

    def _choice(self, index: int, event: Event) -> dict[str, Any]:
        log_probs = self._log_probs(index, event.log_probs) if self._request.num_top is not None else None
        return {"index": index, "text": self._unsent_echo.pop(index, "") + event.text, "logprobs": log_probs, "finish_reason": event.finish}

    _delta = _choice

    def _log_probs(self, index: int, entries: Sequence[TokenLogProb]) -> dict[str, Any]:
        offsets, before = [], self._spelled_bytes.get(index, b"")
        for entry in entries:
            offsets.append(len(before.decode(errors="ignore")))
            before += self._tokenizer.token_bytes(entry.token)
        self._spelled_bytes[index] = before
        tops = [self._top(entry) for entry in entries] if self._request.num_top else None
        return {
            "tokens": [self._spelled(entry.token) for entry in entries],
            "token_logprobs": [max(entry.log_prob, LEAST_LOG_PROB) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogProb) -> dict[str, float]:
        """By spelling; the emitted token is always there, and of two tokens spelled alike the likelier stays."""
        tops: dict[str, float] = {}
        for token, log_prob in (*entry.top, (entry.token, entry.log_prob)):
            tops.setdefault(self._spelled(token), max(log_prob, LEAST_LOG_PROB))
        return tops


class ChatReply(Reply):
    """Objects of /v1/chat/completions."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(request, model, tokenizer, prompts)
        self._begun: set[int] = set()

    def _choice(self, index: int, event: Event) -> dict[str, Any]:
        message = {"role": "assistant", "content": event.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._log_probs(event.log_probs), "finish_reason": event.finish}

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        delta = {} if index in self._begun else {"role": "assistant", "content": ""}
        self._begun.add(index)
        if event.text:
            delta["content"] = event.text
        return {"index": index, "delta": delta, "logprobs": self._log_probs(event.log_probs), "finish_reason": event.finish}

    def _log_probs(self, entries: Sequence[TokenLogProb]) -> dict[str, Any] | None:
        if self._request.num_top is None:
            return None
        content = [
            {**self._entry(entry.token, entry.log_prob), "top_logprobs": [self._entry(token, log_prob) for token, log_prob in entry.top]} for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": self._spelled(token), "logprob": max(log_prob, LEAST_LOG_PROB), "bytes": list(data)}
