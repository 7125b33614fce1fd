"""What an answer must be: OpenAI's `response_format`, vLLM's `structured_outputs`, or a call of a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from yggdrasil.config import GRAMMARS, GrammarConfig
from yggdrasil.errors import ConfigError
from yggdrasil.serve.messages import Tool
from yggdrasil.serve.tools import Format
from yggdrasil.serve.wire import ApiError, Strict
from yggdrasil.text.grammar import WHITESPACE

__all__ = ["ResponseFormat", "forced_call", "possible_calls", "structured"]

ANY_OBJECT = {"type": "object"}
OTHER_TYPES = ("array", "boolean", "integer", "null", "number", "string")  # whose instances are no objects
FORMAT_FIELDS = ("name", "description", "schema", "strict")
COMBINING = frozenset({"allOf", "if", "dependentSchemas", "unevaluatedProperties"})
ADDING = frozenset({"properties", "anyOf", "oneOf", "not", "$ref", "$dynamicRef"})
"""Keys of JSON schemas that say more about an object that has properties."""


class ResponseFormat(Strict):
    """OpenAI's field. A schema is always enforced, whatever `strict` is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = Field({})

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if unknown := sorted(self.json_schema.keys() - set(FORMAT_FIELDS)):
            raise ValueError(f"a json_schema has no field {unknown[0]!r}")
        if (self.type == "json_schema") != (self.json_schema.get("schema") is not None):
            raise ValueError("type json_schema, and no other, has a schema")
        return self

    def grammar(self, field: str) -> GrammarConfig | None:
        """The grammar of the answer; None for any text. Errors name the field."""
        if self.type == "text":
            return None
        schema = ANY_OBJECT if self.type == "json_object" else self.json_schema["schema"]
        return _grammar(field, "json", schema)


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

    The name comes before the arguments, which are an instance of the function's schema and have no
    properties that it does not name: a model that may add some can go on without an end.
    """
    around = ("", "") if form.is_bare else (f"{form.opening}\n", f"\n{form.closing}")
    before, after = (f"{json.dumps(text)} " if text else "" for text in around)
    call = _call([_closed(tool.function.parameters) or ANY_OBJECT for tool in tools], tools, form)
    return _grammar("tools", "grammar", f"start: {before}call {after}\ncall: {_json(call)}")


def possible_calls(
    tools: Sequence[Tool], form: Format, answer: GrammarConfig | None = None
) -> GrammarConfig:
    """The grammar of an answer that may call tools, whose calls `ToolParser` reads.

    Text is free until a call begins: at a marker, or where the format needs none, at the first sign of the
    answer. From there on it is a call; arguments of strict functions are an instance of their schema.

    Args:
        answer: The JSON schema of a text without calls; None for any text. With one, calls are the whole
            text, and the format must not be bare.

    Raises:
        ApiError: calls of this format have no marker.
    """
    if not form.opening:
        reason = "calls of this model have no marker, so an answer in JSON could be one"
        message = f"tools: strict functions need tool_choice 'required' or a named function: {reason}"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    given = (tool.function.parameters if tool.function.strict else {} for tool in tools)
    call = _call([parameters or ANY_OBJECT for parameters in given], tools, form)
    if answer is not None:
        lines = _calls_or_answer(call, form, json.loads(answer.source))
    else:
        lines = _bare_calls(call, form) if form.is_bare else _marked_calls(call, form)
    return _grammar("tools", "grammar", "\n".join([*lines, "GAP: /[ \\t\\r\\n]{1,4}/"]))


def _calls_or_answer(call: dict[str, Any], form: Format, schema: dict[str, Any] | bool) -> list[str]:
    """Calls between markers, or an instance of a schema, and nothing else."""
    return [
        "start: (marked GAP?)+ | answer",
        f"marked: {json.dumps(form.opening)} GAP? call GAP? {json.dumps(form.closing)}",
        f"call: {_json(call)}",
        f"answer: {_json(schema if isinstance(schema, dict) else {'anyOf': [schema]})}",
    ]


def _marked_calls(call: dict[str, Any], form: Format) -> list[str]:
    """Calls between markers, and any text around them."""
    return [
        "start: marked* TEXT",
        "TEXT: /(.|\\n)*/",
        f"marked: head GAP? call GAP? {json.dumps(form.closing)}",
        f"head[lazy]: TEXT {json.dumps(form.opening)}",
        f"call: {_json(call)}",
    ]


def _bare_calls(call: dict[str, Any], form: Format) -> list[str]:
    """A text that is no call from its first sign on, or calls after at most one marker, which end it."""
    signs = re.escape("{" + form.between)
    marker = "" if form.opening_id is None else f"<[{form.opening_id}]> | "
    return [
        "start: BLANKS? (TEXT | begin? calls GAP?)?",  # a blank that could be of two terminals is of one
        "BLANKS: /[ \\t\\r\\n]+/",
        f"TEXT: /[^{signs} \\t\\r\\n](.|\\n)*/",
        f"begin: ({marker}head) GAP?",
        f"head[lazy]: TEXT? {json.dumps(form.opening)}",
        *_calls(call, form),
    ]


def _calls(call: dict[str, Any], form: Format) -> list[str]:
    """Calls of a bare format."""
    if "[" in form.between:
        return ["calls: call", f"call: {_json({'type': 'array', 'items': call, 'minItems': 1})}"]
    more = f" ({json.dumps(form.between)} GAP? call)*" if form.between else ""
    return [f"calls: call{more}", f"call: {_json(call)}"]


def _call(parameters: Sequence[dict[str, Any]], tools: Sequence[Tool], form: Format) -> dict[str, Any]:
    """The schema of a call of one of these tools, whose arguments have these schemas.

    Each has an id, because its references begin at its own root.

    Raises:
        ApiError: a schema has no instance that is an object, which arguments are.
    """
    for tool, schema in zip(tools, parameters, strict=True):
        _check_object(tool.function.name, schema)
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                form.arguments: {"$id": f"json-schema:///{place}", **schema},
            },
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for place, (tool, schema) in enumerate(zip(tools, parameters, strict=True))
    ]
    return {"anyOf": calls}


def _check_object(name: str, schema: dict[str, Any]) -> None:
    """Types that JSON schemas do not have are left to the compiler, which names their place."""
    kinds = schema.get("type", "object")
    if all(kind in OTHER_TYPES for kind in (kinds if isinstance(kinds, list) else [kinds])):
        message = f"tools: the parameters of {name!r} have type {json.dumps(kinds)}; they must be an object"
        raise ApiError(400, message, param="tools")


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """A schema whose instances are those of `parameters` with the named properties alone.

    Objects without properties stay free, and so do those that decide about others themselves. Where a
    schema combines others nothing changes: of two closed objects no instance would be left.
    """
    schemas = list(_objects(parameters))
    if any(schema.keys() & COMBINING or {"properties"} < schema.keys() & ADDING for schema in schemas):
        return parameters
    closed: dict[str, Any] = json.loads(_encoded(parameters))
    for schema in _objects(closed):
        named = schema.get("properties")
        required = schema.get("required", [])
        is_known = isinstance(named, dict) and isinstance(required, list)
        if is_known and named and all(name in list(named) for name in required):
            schema.setdefault("additionalProperties", "patternProperties" in schema)
    return closed


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value, at any depth."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)


def _json(schema: dict[str, Any]) -> str:
    """A schema in a grammar."""
    return f"%json {_encoded({**schema, 'x-guidance': WHITESPACE})}"


def _encoded(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise ApiError(400, "tools: a schema is nested too deeply", param="tools") from None


def _grammar(field: str, kind: str, value: Any) -> GrammarConfig:
    try:
        return GrammarConfig.of(kind, value)
    except ConfigError as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None
