"""Calls that must be made: the answer is a call of an offered function, whatever the model would write."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from batches import is_sentence

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.serve.messages import FunctionDefinition, Tool
from yggdrasil.serve.openai import ChatRequest
from yggdrasil.serve.structured import forced_call, possible_calls
from yggdrasil.serve.tools import FORMATS, parsed
from yggdrasil.serve.wire import ApiError
from yggdrasil.state import Shape
from yggdrasil.text.grammar import Grammars

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "maxProperties": 0}},
    },
]
OFFERED = [Tool.model_validate(tool) for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "weather"}}


def written(pair: LoadedPair, tools: list[Tool], form: str, temperature: float, *, plain: bool) -> str:
    """The text of the tiny model under the grammar of a call."""
    grammar = forced_call(tools, FORMATS[form])
    sampling = SamplingConfig.of({"grammar": grammar, "temperature": temperature, "seed": 5})
    config = GenerateConfig(max_new_tokens=150, sampling=sampling, plain=plain)
    shape = Shape(4, 4, 16)
    policy = plain_policy() if plain else pair.policy(temperature=temperature, shape=shape)
    prompt = pair.tokenizer.encode("Once upon a time")
    results = pair.engine.generate(prompt, policy, config)
    return pair.tokenizer.decode([token for result in results for token in result.tokens])


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("form", FORMATS)
def test_the_answer_is_one_call_that_fits_its_schema(
    tiny: LoadedPair, form: str, temperature: float
) -> None:
    text = written(tiny, OFFERED[:1], form, temperature, plain=False)
    assert text == written(tiny, OFFERED[:1], form, temperature, plain=True)
    whole = parsed(text, FORMATS[form], ["weather", "stop"])
    assert whole.content.strip() == ""
    [(name, arguments)] = whole.calls
    call = json.loads(arguments)
    assert name == "weather"
    assert call["city"] in ("Rome", "Oslo")
    assert call["days"] in range(1, 10)


def test_with_several_tools_one_of_them_is_called(tiny: LoadedPair) -> None:
    text = written(tiny, OFFERED, "json", 1.0, plain=False)
    [(name, _)] = parsed(text, FORMATS["json"], ["weather", "stop"]).calls
    assert name in ("weather", "stop")


@pytest.mark.parametrize("kind", ("array", "string", ["array", "null"]))
def test_arguments_that_cannot_be_an_object_are_refused(kind: Any) -> None:
    """No parser of calls would read them."""
    function = {"name": "add", "parameters": {"type": kind}, "strict": True}
    tools = [*OFFERED, Tool.model_validate({"type": "function", "function": function})]
    for grammar in (forced_call, possible_calls):
        with pytest.raises(ApiError, match="parameters of 'add' have type .*; they must be an object"):
            grammar(tools, FORMATS["hermes"])
    function["parameters"] = {"type": ["object", "null"]}
    forced_call([Tool.model_validate({"type": "function", "function": function})], FORMATS["hermes"])


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    parameters: dict[str, Any] = {"type": "object"}
    for _ in range(sys.getrecursionlimit()):
        parameters = {"type": "object", "properties": {"a": parameters}}
    function = FunctionDefinition.model_construct(name="f", parameters=parameters)
    tool = Tool.model_construct(type="function", function=function)
    with pytest.raises(ApiError, match="nested too deeply") as refused:
        forced_call([tool], FORMATS["json"])
    assert refused.value.param == "tools"


CITY = {"city": {"enum": ["Rome"]}}


@pytest.mark.parametrize(
    ("parameters", "text", "is_right"),
    (
        ({"properties": CITY}, '{"city": "Rome"}', True),
        ({"properties": CITY}, '{"city": "Rome", "more": 1}', False),
        ({"properties": {"at": {"type": "object", "properties": CITY}}}, '{"at": {"more": 1}}', False),
        ({"properties": {"at": {"type": "object"}}}, '{"at": {"more": 1}}', True),
        ({"properties": CITY, "additionalProperties": True}, '{"more": 1}', True),
        ({"properties": CITY, "patternProperties": {"^m": {"type": "integer"}}}, '{"more": 1}', True),
        ({"properties": CITY, "required": ["more"]}, '{"more": 1}', True),
        (
            {"allOf": [{"properties": CITY}, {"properties": {"more": {}}}]},
            '{"city": "Rome", "more": 1}',
            True,
        ),
        ({"properties": CITY, "anyOf": [{"properties": {"more": {}}}]}, '{"more": 1}', True),
        ({}, '{"more": 1}', True),
    ),
    ids=str,
)
def test_a_forced_call_has_no_arguments_that_its_function_does_not_name(
    tiny: LoadedPair, parameters: dict[str, Any], text: str, is_right: bool
) -> None:
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    tool = Tool.model_validate({"type": "function", "function": function})
    grammars = Grammars(tiny.tokenizer, tiny.bundle.vocab, tiny.bundle.eos_tokens)
    state = grammars.state(forced_call([tool], FORMATS["json"]))
    assert is_sentence(state, tiny, f'{{"name": "f", "arguments": {text}}}') == is_right


@pytest.mark.parametrize("required", (3, [{}], [["city"]]), ids=str)
def test_a_schema_that_names_no_texts_as_required_is_left_to_the_compiler(required: Any) -> None:
    parameters = {"type": "object", "properties": CITY, "required": required}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    assert json.dumps(parameters)[1:-1] in forced_call([tool], FORMATS["json"]).source


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatRequest.model_validate({"messages": messages, "tools": TOOLS, **fields})


def test_a_choice_forces_the_functions_that_it_names() -> None:
    form = FORMATS["json"]
    assert chat(tool_choice="required").grammar(form) == forced_call(OFFERED, form)
    named = chat(tool_choice=NAMED)
    assert named.grammar(form) == forced_call(OFFERED[:1], form)
    assert named.grammar_field == "tools"
    assert chat(tool_choice="none").grammar(form) is None


@pytest.mark.parametrize(
    "fields",
    (
        {"tool_choice": "required", "tools": []},
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
    ),
)
def test_a_choice_that_cannot_be_enforced_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.param == "tool_choice"


FORMATTED = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}}}


@pytest.mark.parametrize("choice", ("required", NAMED), ids=("required", "named"))
@pytest.mark.parametrize("form", FORMATS)
def test_the_format_of_an_answer_has_nothing_to_do_with_a_forced_call(form: str, choice: Any) -> None:
    request = chat(tool_choice=choice, **FORMATTED)
    assert request.grammar(FORMATS[form]) == chat(tool_choice=choice).grammar(FORMATS[form])
    assert request.may_call(FORMATS[form])
    assert [part for part, _ in request.grammar_parts][:1] == ["tools[0].function.parameters"]
    assert "response_format" not in dict(request.grammar_parts)


@pytest.mark.parametrize("grammar", ({"regex": "a+"}, {"choice": ["a"]}, {"json": WEATHER}), ids=list)
def test_a_forced_call_and_a_grammar_of_the_whole_output_exclude_each_other(
    grammar: dict[str, Any],
) -> None:
    request = chat(tool_choice="required", structured_outputs=grammar)
    with pytest.raises(ApiError, match="tool_choice and structured_outputs are two grammars") as refused:
        request.grammar(FORMATS["json"])
    assert refused.value.param == "tool_choice"


def test_references_of_a_function_begin_at_its_own_schema(tiny: LoadedPair) -> None:
    """As pydantic writes nested models; two functions may define the same name."""
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
        for name, parameters in (("a", referring("integer")), ("b", referring("null")))
    ]
    grammars = Grammars(tiny.tokenizer, tiny.bundle.vocab, tiny.bundle.eos_tokens)
    state = grammars.state(forced_call(tools, FORMATS["json"]))
    for text, is_right in (
        ('{"name": "a", "arguments": {"x": 3}}', True),
        ('{"name": "b", "arguments": {"x": null}}', True),
        ('{"name": "b", "arguments": {"x": 3}}', False),
    ):
        assert is_sentence(state, tiny, text) == is_right, text


def referring(kind: str) -> dict[str, Any]:
    item = {"type": kind}
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/item"}}, "$defs": {"item": item}}
