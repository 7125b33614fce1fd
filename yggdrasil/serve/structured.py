"""What an answer must be: OpenAI's `response_format`, vLLM's `structured_outputs`, or a call of a tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from yggdrasil.config import GRAMMARS, GrammarConfig
from yggdrasil.errors import ConfigError
from yggdrasil.grammar import WHITESPACE
from yggdrasil.serve.messages import Tool
from yggdrasil.serve.tools import Format
from yggdrasil.serve.wire import ApiError, Strict

__all__ = ["ResponseFormat", "forced_call", "structured"]

ANY_OBJECT = {"type": "object"}
FORMAT_FIELDS = ("name", "description", "schema", "strict")


class ResponseFormat(Strict):
    """OpenAI's field. A schema is always enforced, whatever `strict` is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = Field({})

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if unknown := sorted(self.json_schema.keys() - set(FORMAT_FIELDS)):
            raise ValueError(f"json_schema.{unknown[0]} is not known")
        if (self.type == "json_schema") != (self.json_schema.get("schema") is not None):
            raise ValueError("type json_schema, and no other, has json_schema.schema")
        return self

    @property
    def grammar(self) -> GrammarConfig | None:
        """The grammar of the answer; None for any text."""
        if self.type == "text":
            return None
        schema = ANY_OBJECT if self.type == "json_object" else self.json_schema["schema"]
        return _grammar("response_format", "json", schema)


def structured(fields: dict[str, Any]) -> GrammarConfig | None:
    """The grammar of `structured_outputs`: one of json, regex, choice and grammar, or json_object: true.

    Raises:
        ApiError: another field, several of them, or a value that is no grammar.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    if unknown := sorted(given.keys() - {*GRAMMARS, "json_object"}):
        name = f"structured_outputs.{unknown[0]}"
        raise ApiError(400, f"{name} is not known", param=name, code="unknown_parameter")
    if len(given) > 1:
        message = f"structured_outputs: {', '.join(given)} are several grammars; send one of them"
        raise ApiError(400, message, param="structured_outputs")
    for name, value in given.items():
        if name == "json_object":
            return _grammar("structured_outputs", "json", ANY_OBJECT)
        return _grammar("structured_outputs", name, value)
    return None


def forced_call(tools: Sequence[Tool], form: Format) -> GrammarConfig:
    """The grammar of an answer that is a call of one of these tools, in a format that `ToolParser` reads.

    The name comes before the arguments, which are an instance of the function's schema.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                form.arguments: tool.function.parameters or ANY_OBJECT,
            },
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    call = json.dumps({"anyOf": calls, "x-guidance": WHITESPACE})
    around = ("", "") if form.is_bare else (f"{form.opening}\n", f"\n{form.closing}")
    before, after = (f"{json.dumps(text)} " if text else "" for text in around)
    return _grammar("tools", "grammar", f"start: {before}call {after}\ncall: %json {call}")


def _grammar(field: str, kind: str, value: Any) -> GrammarConfig:
    try:
        return GrammarConfig.of(kind, value)
    except ConfigError as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None
