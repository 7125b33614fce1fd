"""What a client asks, in OpenAI's wire format: fields become requests of the batch.

Every field either applies, is neutral (what the server does anyway), only labels the caller, or is refused
by name: none silently does nothing. `null` is the same as leaving a field out.

Beyond OpenAI's: `top_k`, `min_p`, `ignore_eos`, and `speculation`, which is "auto" (the policy decides),
"off" (this request decodes without), or the most draft tokens of a step."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.serve.request import Request
from yggdrasil.tokenizer import Tokenizer

if TYPE_CHECKING:
    from yggdrasil.serve.prompts import PromptEncoder

__all__ = ["UNKNOWN_FIELD", "ApiError", "ChatRequest", "CompletionRequest", "WireRequest", "check_text"]

UNKNOWN_FIELD = "unknown_field"
MOST_MESSAGE = 600  # characters of an error; what a client sent is part of it
MOST_PARAM = 100

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


def _one_line(text: str, most: int) -> str:
    """Its beginning, as UTF-8 can write it: a client may have sent megabytes, and half of a character."""
    shown = " ".join(text[: most + 1].encode("utf-8", "backslashreplace").decode().split())
    return shown if len(text) <= most else f"{shown[:most]}..."


class ApiError(Exception):
    """An HTTP error in OpenAI's shape.

    Args:
        message: What is wrong and what would be right; a long one is cut.
        code: For programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _one_line(message, MOST_MESSAGE)
        self.param = None if param is None else _one_line(param, MOST_PARAM)
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that clients know."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def check_text(text: str, field: str) -> None:
    """Raises ApiError at half of a surrogate pair, which JSON can escape and UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        message = f"{field}: {half} at character {error.start} is half of a surrogate pair, no text"
        raise ApiError(400, message, param=field) from None


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None}
        unknown = next((name for name in given if name not in cls.model_fields), None)
        if unknown is not None:  # the first one: pydantic would collect all of them
            shown = _one_line(unknown, MOST_PARAM)
            raise PydanticCustomError(UNKNOWN_FIELD, "is not known", {"field": shown})
        return given


class _StreamOptions(_Strict):
    include_usage: bool = False


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_TextPart], Field(fail_fast=True)]

    def rendered(self) -> dict[str, str]:
        """As templates expect it: they know no developer, and a role they do not know can vanish without a
        word.
        """
        content = (
            self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        )
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
    stop: str | Annotated[list[str], Field(max_length=4, fail_fast=True)] = []
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
                allowed = (
                    f"; leave it out or send {' or '.join(map(repr, neutral))}"
                    if neutral
                    else "; leave it out"
                )
                raise ApiError(
                    400, f"{name} is not supported{allowed}", param=name, code="unsupported_parameter"
                )
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

    @property
    def num_prompts(self) -> int:
        """Prompts, each of which gets `n` choices."""
        return 1

    def check_rows(self, max_rows: int) -> None:
        """Raises ApiError where more rows are asked for than can ever be queued."""
        if self.num_prompts * self.n > max_rows:
            asked = f"{self.num_prompts} prompts times n = {self.n} choices"
            message = f"{asked}; at most {max_rows} are served at once"
            raise ApiError(400, message, param="n")

    def prompts(self, encoder: PromptEncoder) -> list[list[int]]:
        """Every prompt as tokens; raises ApiError as the encoder does."""
        raise NotImplementedError

    def requests(self, prompts: Sequence[Sequence[int]], *, max_context: int) -> list[Request]:
        """`n` requests for every prompt, in the order of the choices' indices.

        Raises:
            ApiError: a prompt and an output that the context does not hold, or a stop text that is none.
            ConfigError: a sampling option that is not allowed.
        """
        return [
            self._request(prompt, self._room(len(prompt), max_context), choice)
            for prompt in prompts
            for choice in range(self.n)
        ]

    def _request(self, prompt: Sequence[int], max_new_tokens: int, choice: int) -> Request:
        # every prompt of a list gets the seeds it would get alone
        seed = secrets.randbits(63) if self.seed is None else (self.seed + choice) % (MAX_SEED + 1)
        sampling = SamplingConfig(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=seed
        )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            check_text(text, "stop")
        config = GenerateConfig(
            max_new_tokens=max_new_tokens, stop=stop, ignore_eos=self.ignore_eos, sampling=sampling
        )
        speculation = (
            {"auto": None, "off": 0}[self.speculation]
            if isinstance(self.speculation, str)
            else self.speculation
        )
        return Request(prompt=prompt, config=config, speculation=speculation, num_top=self.num_top)

    def _room(self, prompt_len: int, max_context: int) -> int:
        if prompt_len == 0:
            raise ApiError(
                400, f"{self.prompt_field}: at least one token is needed", param=self.prompt_field
            )
        room = max_context - prompt_len
        (field, asked) = self.limit
        if room < 1:
            message = (
                f"the context holds {max_context} tokens and the prompt takes {prompt_len}; shorten it"
            )
            raise ApiError(400, message, param=self.prompt_field, code="context_length_exceeded")
        if asked is None:
            return room if self.default_tokens is None else min(self.default_tokens, room)
        if asked > room:
            message = (
                f"{field} is {asked}; the context holds {max_context} tokens and the prompt takes "
                f"{prompt_len}, so at most {room} can follow"
            )
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        return asked


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
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ApiError(
                400,
                f"best_of is not supported; leave it out or send n, {self.n}",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400,
                "logprobs with echo is not supported: log-probabilities of the prompt are not computed",
                param="logprobs",
            )
        return self

    @property
    def num_top(self) -> int | None:
        """As `logprobs` asks."""
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        """One, or as many as the list has."""
        return len(self._several)

    @property
    def _several(self) -> Sequence[Any]:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt

    def prompts(self, encoder: PromptEncoder) -> list[list[int]]:
        """Texts are encoded; token ids are checked against the vocabulary."""
        return [encoder.tokens(prompt, "prompt") for prompt in self._several]

    def echoed(self, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
        """What precedes the text of every choice."""
        if not self.echo:
            return []
        pairs = zip(self._several, prompts, strict=True)
        texts = [given if isinstance(given, str) else tokenizer.decode(tokens) for given, tokens in pairs]
        return [text for text in texts for _ in range(self.n)]


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
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens"
            )
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        """The newer name wins; both never disagree."""
        return (
            super().limit
            if self.max_completion_tokens is None
            else ("max_completion_tokens", self.max_completion_tokens)
        )

    @property
    def num_top(self) -> int | None:
        """As `top_logprobs` asks, if `logprobs` is set."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, encoder: PromptEncoder) -> list[list[int]]:
        """The conversation through the template, which writes the special tokens itself."""
        text = encoder.template.render([message.rendered() for message in self.messages])
        return [encoder.encode(text, "messages", special_tokens=not encoder.template.is_own)]
