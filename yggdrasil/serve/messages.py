"""Messages of a conversation, and the tools that it offers, as a chat template takes them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from yggdrasil.serve.body import check_counts
from yggdrasil.serve.wire import Strict

__all__ = ["Message", "Tool", "ToolChoice"]


class TextPart(Strict):
    """A part of a content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """A function and its arguments, an object of JSON as text."""

    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments; an empty text is an empty object.

        Raises:
            ValueError: they are not an object.
        """
        check_counts(self.arguments.encode("utf-8", "replace"))
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError("the arguments must be a JSON object, written as a text")
        return arguments

    @model_validator(mode="after")
    def _is_object(self) -> CalledFunction:
        _ = self.parsed
        return self


class ToolCall(Strict):
    """A call that the assistant made; `index` is its place in a stream and means nothing here."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def rendered(self) -> dict[str, Any]:
        """The call for a template, which takes the arguments as an object."""
        function = {"name": self.function.name, "arguments": self.function.parsed}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Strict):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str = ""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field([])
    tool_call_id: str = ""
    reasoning_content: str = ""

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without tool_calls needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the assistant has tool_calls")
        if bool(self.tool_call_id) != (self.role == "tool"):
            raise ValueError("a message of a tool, and no other, has a tool_call_id")
        return self

    def rendered(self) -> dict[str, Any]:
        """The message for a template, in transformers' form.

        A template may silently drop roles that it does not know, so `developer` becomes `system`. It may
        also ask whether a field is there, so fields without a value are not.
        """
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = content
        optional = {
            "name": self.name,
            "tool_calls": [call.rendered() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        return message | {name: value for name, value in optional.items() if value}


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: dict[str, Any] = Field({})
    strict: bool = False


class Tool(Strict):
    """A tool that a request offers."""

    type: Literal["function"]
    function: FunctionDefinition

    def rendered(self) -> dict[str, Any]:
        """The tool for a template, with the fields that the client sent."""
        return self.model_dump(exclude_unset=True)


class FunctionName(Strict):
    """The name of a function."""

    name: str


class ToolChoice(Strict):
    """A function that the model must call."""

    type: Literal["function"]
    function: FunctionName
