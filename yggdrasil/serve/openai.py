"""What a client asks, in OpenAI's wire format: fields become requests of the batch.

Every field either applies, is neutral (what the server does anyway), only labels the caller, or is refused by name: none
silently does nothing. `null` is the same as leaving a field out.

Beyond OpenAI's: `top_k`, `min_p`, `ignore_eos`, and `speculation`, which is "auto" (the policy decides), "off" (this
request decodes without), or the most draft tokens of a step.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.request import Request
from yggdrasil.tokenizer import Tokenizer

__all__ = ["ApiError", "ChatRequest", "CompletionRequest", "WireRequest"]

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
