"""`POST /v1/responses`: OpenAI's newer interface, for texts and function tools.

A request is rewritten as one of chat completions, and the chunks of a chat's stream become events:

```
response.created  response.in_progress
  response.output_item.added                                         a message, reasoning or a call
    response.content_part.added    response.output_text.delta ...    of a message
    response.reasoning_text.delta ...                                of reasoning
    response.function_call_arguments.delta ...                       of a call
    ..._text.done, ..._arguments.done    response.content_part.done
  response.output_item.done
response.completed, or response.incomplete after max_output_tokens
```

An answer without `stream` is the response in the last event. Nothing is stored: `store: true` and
`previous_response_id` are refused, and a client sends the conversation.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from yggdrasil.errors import ConfigError
from yggdrasil.serve.messages import CalledFunction
from yggdrasil.serve.neutral import neutral_only
from yggdrasil.serve.openai import ChatRequest
from yggdrasil.serve.prompts import PromptEncoder
from yggdrasil.serve.replies import ChatReply
from yggdrasil.serve.request import Event
from yggdrasil.serve.wire import ApiError, Strict

__all__ = ["RENAMED", "Answer", "ResponsesRequest"]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "max_tool_calls": (),
    "prompt": (),
    "conversation": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
LABELS = ("user", "safety_identifier", "prompt_cache_key")
SAME = (
    *("model", "temperature", "top_p", "seed", "speculation", "parallel_tool_calls", "stream", "metadata"),
    "stop",
)
"""Fields that chat completions have, too, under the same names."""
RENAMED = {"messages": "input", "response_format": "text.format"}
"""Fields of chat completions that errors name, and what they are called here."""
NO_SCORES: dict[str, list[Any]] = {"logprobs": []}  # clients require the field


class InputPart(Strict):
    """A part of a content; what an answer has next to its text comes back and means nothing here."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field([])
    logprobs: list[Any] = Field([])


class InputMessage(Strict):
    """A message of a conversation, or an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(fail_fast=True)]
    id: str = ""
    status: str = ""
    phase: str = ""


class InputCall(CalledFunction):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    id: str = ""
    status: str = ""


class InputResult(Strict):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | Annotated[list[InputPart], Field(fail_fast=True)]
    id: str = ""
    status: str = ""


class InputReasoning(Strict):
    """Reasoning of an earlier answer, which no template shows again."""

    type: Literal["reasoning"]
    id: str = ""
    summary: list[Any] = Field([])
    content: list[Any] = Field([])
    encrypted_content: str = ""
    status: str = ""


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: dict[str, Any] = Field({})
    strict: bool = False


class NamedFunction(Strict):
    """A function that the model must call."""

    type: Literal["function"]
    name: str


class TextOptions(Strict):
    """The form of the text."""

    format: dict[str, Any] = Field({"type": "text"})
    verbosity: Literal["medium"] = "medium"


class _Chat(ChatRequest):
    """A request of this route as one of chat completions; its errors name this route's fields."""

    prompt_field: ClassVar[str] = RENAMED["messages"]
    format_field: ClassVar[str] = RENAMED["response_format"]
    schema_field: ClassVar[str] = "parameters"

    @property
    def limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_completion_tokens

    def prompts(self, encoder: PromptEncoder) -> list[list[int]]:
        try:
            return super().prompts(encoder)
        except ConfigError as error:  # the template refuses the conversation
            raise error.renamed(RENAMED.get(error.field, error.field)) from None


def _kind(item: Any) -> str:
    """The type of an item; a message may leave it out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", "")
    return str(kind or "message")


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(  # an error is that of the item's own type
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="Input should be a message, function_call, function_call_output or reasoning",
    ),
]


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str = ""
    model: str = ""
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] = Field([])
    speculation: Literal["off", "auto"] | Annotated[int, Field(ge=1)] = "auto"
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] = Field([])
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions.model_construct)
    stream: bool = False
    metadata: dict[str, Any] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if fields.get("previous_response_id") is not None:
            message = "previous_response_id: responses are not stored; send the whole conversation as input"
            raise ApiError(400, message, param="previous_response_id", code="unsupported_parameter")
        return neutral_only(fields, cls.model_fields, NEUTRAL, LABELS)

    @model_validator(mode="after")
    def _can_be_repeated(self) -> ResponsesRequest:
        repeated = {
            "metadata": self.metadata,
            "text.format": self.text.format,
            "tools": [tool.parameters for tool in self.tools],
        }
        for name, value in repeated.items():
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:
                message = f"{name}: a number is not finite; JSON has neither NaN nor infinity"
                raise ApiError(400, message, param=name) from None
        return self

    def chat(self) -> ChatRequest:
        """This request as one of chat completions; raises its errors."""
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in SAME if name in self.model_fields_set
        }
        if self.text.format.get("type") == "json_schema":
            schema = {name: value for name, value in self.text.format.items() if name != "type"}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        else:
            fields["response_format"] = self.text.format
        choice = self.tool_choice
        if not isinstance(choice, str):
            choice = {"type": "function", "function": {"name": choice.name}}  # type: ignore[assignment]
        tools = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in self.tools]
        fields |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "tool_choice": choice,
        }
        return _Chat.model_validate(fields)

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation; calls that follow each other are one message of the assistant."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            match item:
                case InputMessage():
                    messages.append({"role": item.role, "content": _text(item.content)})
                case InputCall():
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "tool_calls": []})
                    function = {"name": item.name, "arguments": item.arguments}
                    messages[-1].setdefault("tool_calls", []).append(
                        {"id": item.call_id, "type": "function", "function": function}
                    )
                case InputResult():
                    result = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                    messages.append(result)
        return messages


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Answer:
    """Turns the chunks of a chat's stream into the events of a response, one item after another.

    Args:
        request: As the client sent it.
        reply: Turns the events of the row into chunks.
        defaults: The model's own options of requests.
    """

    def __init__(
        self, request: ResponsesRequest, reply: ChatReply, model: str, defaults: Mapping[str, Any]
    ) -> None:
        used = request.model_dump(include={"temperature", "top_p"})
        used |= {
            name: defaults[name] for name in used.keys() - request.model_fields_set if name in defaults
        }
        self._reply = reply
        self._num_sent = 0
        self._finish: str | None = None
        self._items: list[dict[str, Any]] = []
        self._response = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions or None,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": used["temperature"],
            "text": {"format": request.text.format},
            "tool_choice": request.model_dump()["tool_choice"],
            "tools": [_listed(tool) for tool in request.tools],
            "top_p": used["top_p"],
            "truncation": "disabled",
            "usage": None,
        }

    @property
    def response(self) -> dict[str, Any]:
        """The response as far as it is known."""
        return {**self._response, "output": [dict(item) for item in self._items]}

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before the first token."""
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def push(self, event: Event) -> Iterator[dict[str, Any]]:
        """The events of a step."""
        self._reply.count(event)
        for chunk in self._reply.chunks(0, event):
            choice = chunk["choices"][0]
            self._finish = choice["finish_reason"] or self._finish
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                yield from self._add_text("reasoning", delta["reasoning_content"])
            if delta.get("content"):
                yield from self._add_text("message", delta["content"])
            for call in delta.get("tool_calls", ()):
                yield from self._add_call(call)

    def end(self) -> Iterator[dict[str, Any]]:
        """The events after the last token."""
        if not self._items:
            yield from self._add_text("message", "")
        is_cut = self._finish == "length"
        yield from self._close("incomplete" if is_cut else "completed")
        counts = self._reply.last_chunk()
        self._response["status"] = "incomplete" if is_cut else "completed"
        self._response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self._response["usage"] = _usage(
            counts, has_reasoning=any(item["type"] == "reasoning" for item in self._items)
        )
        self._response["timings"] = counts["timings"]
        yield self._event(f"response.{self._response['status']}", response=self.response)

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The response to a request without `stream`."""
        for event in events:
            for _ in self.push(event):
                pass
        for _ in self.end():
            pass
        return self.response

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_sent += 1
        return {"type": kind, "sequence_number": self._num_sent - 1, **fields}

    def _place(self) -> dict[str, Any]:
        """Names the last item in an event."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _open(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._items:
            yield from self._close("completed")
        self._items.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)
        if "content" in item:
            place = {**self._place(), "content_index": 0}
            yield self._event("response.content_part.added", **place, part=dict(item["content"][0]))

    def _add_text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._items or self._items[-1]["type"] != kind:
            yield from self._open(_new_item(kind))
        part = self._items[-1]["content"][0]
        part["text"] += text
        if text:
            scores = NO_SCORES if kind == "message" else {}
            place = {**self._place(), "content_index": 0}
            yield self._event(f"response.{part['type']}.delta", **place, delta=text, **scores)

    def _add_call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        function = call["function"]
        if "id" in call:
            named = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._open({**_new_item("function_call"), **named})
        if function["arguments"]:
            self._items[-1]["arguments"] += function["arguments"]
            yield self._event(
                "response.function_call_arguments.delta", **self._place(), delta=function["arguments"]
            )

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """The events that end the last item."""
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **done)
        else:
            part = item["content"][0]
            scores = NO_SCORES if item["type"] == "message" else {}
            place = {**self._place(), "content_index": 0}
            yield self._event(f"response.{part['type']}.done", **place, text=part["text"], **scores)
            yield self._event("response.content_part.done", **place, part=dict(part))
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))


def _new_item(kind: str) -> dict[str, Any]:
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
    item = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
    match kind:
        case "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            return {**item, "role": "assistant", "content": [part]}
        case "reasoning":
            return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
    return item


def _listed(tool: FunctionTool) -> dict[str, Any]:
    """A tool in the response, which repeats the request's."""
    return {**tool.model_dump(), "description": tool.description or None}


def _usage(counts: dict[str, Any], *, has_reasoning: bool) -> dict[str, Any]:
    """The usage of a chat under this route's names; the tokens of reasoning alone are not counted."""
    usage = counts["usage"]
    cached = counts["timings"]["shared_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        **({} if has_reasoning else {"output_tokens_details": {"reasoning_tokens": 0}}),
        "total_tokens": usage["total_tokens"],
        "target_passes": usage["target_passes"],
    }
