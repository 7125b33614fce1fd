"""What the routes share: the service, and what they know of the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fastapi import Request as HttpRequest

from yggdrasil.config import GrammarConfig
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.hosts import HostNames
from yggdrasil.serve.metrics import Metrics
from yggdrasil.serve.prompts import PromptEncoder
from yggdrasil.serve.request import Request
from yggdrasil.serve.tools import FORMATS, Format
from yggdrasil.serve.wire import ApiError
from yggdrasil.text.tokenizer import Tokenizer

__all__ = ["BatchService", "Serving", "serving_of"]


class BatchService(Protocol):
    """The part of a service that this module uses."""

    def knows(self, grammar: GrammarConfig) -> bool:
        """Whether a grammar is compiled."""
        ...

    def prepare(self, grammar: GrammarConfig) -> None:
        """Compile a grammar, which may take seconds."""
        ...

    def check(self, grammar: GrammarConfig) -> None:
        """Raise the error of `prepare` if a grammar does not compile."""
        ...

    def submit(self, request: Request) -> Any:
        """Queue a request; returns its ticket."""
        ...

    def cancel(self, ticket: Any) -> None:
        """End a request early."""
        ...

    def set_speculation(self, enabled: bool) -> None:
        """Let all requests speculate, or none; may wait for a step."""
        ...

    def info(self) -> dict[str, Any]:
        """State in JSON values; may wait for a step."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether the service runs."""
        ...


@dataclass(kw_only=True)
class Serving:
    """What the routes share.

    Args:
        metrics: Also the service's observer.
        model: Name of the model for clients.
        max_context: Largest number of tokens of prompt and output together.
        vocab: V: the token ids of both models go from 0 to V - 1.
        max_rows: Largest number of choices of one HTTP request.
        api_key: Required of clients; empty requires none.
        tool_parser: Name of the format in which the model calls tools; see tools.py.
        reasoning_parser: Separates reasoning in every chat; None in those that ask for it.
        defaults: The model's own options of requests, for `SamplingConfig.of`.
        hosts: Host names that clients without a key may use.
        allow_origins: Origins of the web pages that may read answers; `*` is all.
        page: Whether there is a page at `/`.
        log: Gets a line for every response; None logs none.

    Attributes:
        is_draining: Set while new requests are refused.
        compiling: Held while a grammar is compiled, so slow ones take one thread and not all of the pool.
    """

    service: BatchService
    tokenizer: Tokenizer
    template: ChatTemplate
    metrics: Metrics
    model: str
    max_context: int
    vocab: int
    max_rows: int
    api_key: str = ""
    tool_parser: str = "json"
    reasoning_parser: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    hosts: HostNames = field(default_factory=HostNames)
    allow_origins: Sequence[str] = ()
    page: bool = True
    log: Callable[[str], None] | None = None
    is_draining: bool = False
    compiling: asyncio.Lock = field(default_factory=asyncio.Lock)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def form(self) -> Format:
        """How this model calls tools."""
        form = FORMATS[self.tool_parser]
        tokens = self.tokenizer.encode(form.opening, special_tokens=False) if form.opening else []
        is_special = len(tokens) == 1 and self.tokenizer.is_special(tokens[0])
        return replace(form, opening_id=tokens[0]) if is_special else form

    @property
    def encoder(self) -> PromptEncoder:
        """Turns prompts into tokens."""
        return PromptEncoder(self.tokenizer, self.template, self.max_context, self.vocab)

    def check_model(self, name: str) -> None:
        """Raise ApiError if a client names another model."""
        if name != self.model:
            message = f"there is no model {name!r}; this server has {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


def serving_of(http: HttpRequest) -> Serving:
    """The parts of the application that received a request."""
    serving: Serving = http.app.state.serving
    return serving
