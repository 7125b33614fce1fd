"""Texts as tokens and tokens as text: vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool

from yggdrasil.serve.body import read_body
from yggdrasil.serve.describe import body_of
from yggdrasil.serve.messages import Message, Tool
from yggdrasil.serve.serving import Serving, serving_of
from yggdrasil.serve.wire import ApiError, Strict, check_text

__all__ = ["router"]

MAX_CHARS = 1 << 20  # seconds of a thread; while a million ids become JSON, other clients wait 0.1 s

router = APIRouter()


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation, which the chat template renders."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([])
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False

    @model_validator(mode="after")
    def _has_one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")
        return self

    def tokens(self, serving: Serving) -> list[int]:
        """The tokens that a completion of the same text, or the same conversation, has as its prompt."""
        template = serving.template
        adds_special_tokens = self.messages is None or not template.is_own
        if self.add_special_tokens is not None:
            adds_special_tokens = self.add_special_tokens
        field = "prompt" if self.messages is None else "messages"
        text = self.prompt or ""
        if self.messages is not None:
            messages = [message.rendered() for message in self.messages]
            text = template.render(messages, [tool.rendered() for tool in self.tools])
        check_text(text, field)
        if len(text) > MAX_CHARS:
            message = f"{field}: {len(text)} characters; at most {MAX_CHARS} are tokenized at once"
            raise ApiError(400, message, param=field)
        return serving.tokenizer.encode(text, special_tokens=adds_special_tokens)


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str = ""
    tokens: Annotated[list[int], Field(fail_fast=True)]


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
async def tokenize(
    http: HttpRequest, body: Annotated[TokenizeRequest, Depends(read_body(TokenizeRequest))]
) -> Response:
    """The tokens of a text or a conversation, which may be longer than the context."""
    serving = serving_of(http)
    serving.check_model(body.model or serving.model)
    return await run_in_threadpool(_tokenized, body, serving)


def _tokenized(body: TokenizeRequest, serving: Serving) -> Response:
    tokens = body.tokens(serving)
    pieces = serving.tokenizer.pieces(tokens) if body.return_token_strs else None
    return _json(
        {"count": len(tokens), "max_model_len": serving.max_context, "tokens": tokens, "token_strs": pieces}
    )


@router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
async def detokenize(
    http: HttpRequest, body: Annotated[DetokenizeRequest, Depends(read_body(DetokenizeRequest))]
) -> Response:
    """The text of tokens, special tokens included."""
    serving = serving_of(http)
    serving.check_model(body.model or serving.model)
    return await run_in_threadpool(_detokenized, body, serving)


def _detokenized(body: DetokenizeRequest, serving: Serving) -> Response:
    tokens = serving.encoder.tokens(body.tokens, "tokens")
    return _json({"prompt": serving.tokenizer.decode(tokens, special_tokens=True)})


def _json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content, ensure_ascii=False), media_type="application/json")
