"""Strict functions that may be called: free text until a call begins, then arguments of its schema."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from batches import is_sentence

from yggdrasil.config import GenerateConfig, GrammarConfig, SamplingConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.serve.messages import Tool
from yggdrasil.serve.openai import ChatRequest
from yggdrasil.serve.structured import possible_calls
from yggdrasil.serve.tools import FORMATS, CallDelta, Format, ToolParser, parsed
from yggdrasil.serve.wire import ApiError
from yggdrasil.state import Shape
from yggdrasil.text.grammar import Grammars

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTIONS = ({"name": "add", "parameters": ADD, "strict": True}, {"name": "free", "parameters": ADD})
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": function} for function in FUNCTIONS]
OFFERED = [Tool.model_validate(tool) for tool in TOOLS]
MARKED = [name for name, form in FORMATS.items() if form.opening]
HI = [{"role": "user", "content": "Hi"}]


def written(form: Format, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as a model of this format writes them."""
    objects = [json.dumps({"name": name, form.arguments: arguments}) for name, arguments in calls]
    if form.closing:
        return "\n".join(f"{form.opening}\n{each}\n{form.closing}" for each in objects)
    return f"{form.opening} [{', '.join(objects)}]" if "[" in form.between else "; ".join(objects)


@pytest.fixture(scope="module")
def grammars(tiny: LoadedPair) -> Grammars:
    return Grammars(tiny.tokenizer, tiny.bundle.vocab, tiny.bundle.eos_tokens)


@pytest.mark.parametrize("name", MARKED)
def test_a_text_is_free_and_a_call_is_not(grammars: Grammars, tiny: LoadedPair, name: str) -> None:
    form = FORMATS[name]
    state = grammars.state(possible_calls(OFFERED, form))
    right = ("add", {"a": 3})
    for text, is_right in (
        ("", True),
        ("Hello [x] {y}; <z>", True),
        (form.opening[:-2], form.opening[0] not in form.between),
        (written(form, right), True),
        (written(form, right, ("add", {"a": 4})), True),
        (written(form, ("free", {"any": [1]})), True),
        (f"I add. {form.opening}{written(form, right).removeprefix(form.opening)}", True),
        (written(form, ("add", {"a": 100})), False),
        (written(form, ("add", {"b": 3})), False),
        (written(form, right, ("add", {"a": "x"})), False),
        (written(form, ("other", {})), False),
        (f"I add. {form.opening} then", False),
    ):
        assert is_sentence(state, tiny, text) == is_right, text
        if is_right:
            calls = parsed(text, form, ["add", "free"]).calls
            assert all(fits_add(arguments) for function, arguments in calls if function == "add")


def fits_add(arguments: str) -> bool:
    """Whether arguments are an instance of the strict schema."""
    value = json.loads(arguments)
    return list(value) == ["a"] and type(value["a"]) is int and 1 <= value["a"] <= 99


@pytest.mark.parametrize("name", [name for name in MARKED if FORMATS[name].is_bare])
def test_without_a_marker_the_first_sign_decides(grammars: Grammars, tiny: LoadedPair, name: str) -> None:
    form = FORMATS[name]
    state = grammars.state(possible_calls(OFFERED, form))
    bare = written(form, ("add", {"a": 3})).removeprefix(form.opening)
    assert is_sentence(state, tiny, bare)
    assert not is_sentence(state, tiny, bare.replace("3", "300"))
    assert not is_sentence(state, tiny, '{"answer": 3}')


def test_an_opening_that_is_a_special_token_begins_a_call(grammars: Grammars, tiny: LoadedPair) -> None:
    mark = 7
    form = replace(FORMATS["llama3"], opening_id=mark)
    state = grammars.state(possible_calls(OFFERED, form))
    assert state.allowed_V(())[mark]
    assert is_sentence(state, tiny, written(form, ("add", {"a": 3})), after=(mark,))
    assert not is_sentence(state, tiny, "print", after=(mark,))


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("name", ("hermes", "mistral", "llama3"))
def test_calls_within_a_text_fit_the_schema_and_are_those_of_plain_decoding(
    tiny: LoadedPair, name: str, temperature: float
) -> None:
    """The markers are letters that the tiny model soon writes; a streamed answer has the same calls."""
    form = replace(FORMATS[name], opening="e", closing="</e>" if FORMATS[name].closing else "")
    texts = [text_of(tiny, form, temperature, plain=plain) for plain in (False, True)]
    assert texts[0] == texts[1]
    whole = parsed(texts[0], form, ["add", "free"])
    assert whole.calls, "the text must have a call"
    *complete, last = whole.calls
    assert all(fits_add(arguments) for function, arguments in complete if function == "add")
    assert last[0] in ("add", "free")
    parser = ToolParser(form, ["add", "free"])
    deltas = [delta for char in texts[0] for delta in parser.push(char)] + parser.finish()
    names = [delta.name for delta in deltas if isinstance(delta, CallDelta) and delta.name]
    assert names == [function for function, _ in whole.calls]


def text_of(pair: LoadedPair, form: Format, temperature: float, *, plain: bool) -> str:
    grammar = possible_calls(OFFERED, form)
    sampling = SamplingConfig.of({"grammar": grammar, "temperature": temperature, "seed": 5})
    config = GenerateConfig(max_new_tokens=150, sampling=sampling, plain=plain)
    policy = plain_policy() if plain else pair.policy(temperature=temperature, shape=Shape(4, 4, 16))
    results = pair.engine.generate(pair.tokenizer.encode("Once upon a time"), policy, config)
    return pair.tokenizer.decode([token for result in results for token in result.tokens])


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HI, "tools": TOOLS, **fields})


def test_strict_functions_that_may_be_called_are_a_grammar_and_others_are_none() -> None:
    form = FORMATS["hermes"]
    assert chat().grammar(form) == possible_calls(OFFERED, form)
    assert chat().grammar_field == "tools"
    assert chat(tools=TOOLS[1:]).grammar(form) is None
    assert chat(tool_choice="none").grammar(form) is None


def test_a_format_without_a_marker_is_refused_with_the_reason() -> None:
    with pytest.raises(ApiError, match="no marker") as refused:
        chat().grammar(FORMATS["json"])
    assert refused.value.param == "tools"


ANSWER = {
    "type": "object",
    "properties": {"sum": {"$ref": "#/$defs/n"}},
    "$defs": {"n": {"type": "integer"}},
}
ANSWER |= {"required": ["sum"], "additionalProperties": False}
AS_ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.mark.parametrize("tools", (TOOLS, TOOLS[1:]), ids=("strict", "free"))
def test_an_answer_with_a_schema_may_be_a_call_instead(
    grammars: Grammars, tiny: LoadedPair, tools: list[dict[str, Any]]
) -> None:
    form = FORMATS["hermes"]
    grammar = chat(tools=tools, response_format=AS_ANSWER).grammar(form)
    assert grammar is not None
    state = grammars.state(grammar)
    marked = written(form, ("free", {"any": [1]}))
    for text, is_right in (
        ('{"sum": 3}', True),
        (marked, True),
        (f"{marked}\n{marked}", True),
        (written(form, ("add", {"a": 300})), False),
        ('{"sum": "x"}', False),
        ("", False),
        (f"I call. {marked}", False),
        (marked + '{"sum": 3}', False),
    ):
        assert is_sentence(state, tiny, text) == is_right, text
    request = chat(tools=tools, response_format=AS_ANSWER)
    assert not request.has_free_text(form)
    assert request.may_call(form)


BARE = [name for name, form in FORMATS.items() if form.is_bare]


@pytest.mark.parametrize("name", BARE)
def test_where_a_call_needs_no_marker_the_schema_of_an_answer_is_all_there_is(name: str) -> None:
    """The answer {"name": "free", ...} is no call, whatever its schema is."""
    request = chat(tools=TOOLS[1:], response_format=AS_ANSWER)
    assert request.grammar(FORMATS[name]) == GrammarConfig.of("json", ANSWER)
    assert not request.may_call(FORMATS[name])
    assert chat(tools=TOOLS[1:]).may_call(FORMATS[name])


@pytest.mark.parametrize("name", BARE)
def test_where_a_call_needs_no_marker_strict_functions_and_a_schema_are_refused(name: str) -> None:
    with pytest.raises(
        ApiError, match=r"tools and response_format .* an answer in JSON could be one"
    ) as refused:
        chat(response_format=AS_ANSWER).grammar(FORMATS[name])
    assert (refused.value.status, refused.value.param) == (400, "tools")


OTHERS: dict[str, Any] = {"regex": "a+", "choice": ["a"], "grammar": 'start: "a"'}


@pytest.mark.parametrize("kind", OTHERS)
def test_strict_functions_and_another_grammar_are_two_grammars(kind: str) -> None:
    with pytest.raises(ApiError, match="two grammars"):
        chat(structured_outputs={kind: OTHERS[kind]}).grammar(FORMATS["hermes"])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", OTHERS)
def test_a_text_under_another_grammar_is_no_call(kind: str, name: str) -> None:
    """Next to functions that bind nothing; a text of the grammar may look like a call."""
    request = chat(tools=TOOLS[1:], structured_outputs={kind: OTHERS[kind]})
    assert request.grammar(FORMATS[name]) == GrammarConfig.of(kind, OTHERS[kind])
    assert not request.may_call(FORMATS[name])


@pytest.mark.parametrize("name", ("llama3", "mistral"))
@pytest.mark.parametrize("wanted", (True, False))
def test_reasoning_that_cannot_be_separated_is_refused(name: str, wanted: bool) -> None:
    with pytest.raises(ApiError, match="reasoning") as refused:
        chat(include_reasoning=wanted).grammar(FORMATS[name])
    assert (refused.value.status, refused.value.param) == (400, "include_reasoning")
    chat(include_reasoning=wanted).grammar(FORMATS["hermes"])
    assert chat(include_reasoning=wanted, tools=TOOLS[1:]).grammar(FORMATS[name]) is None


def test_a_text_that_is_free_may_begin_with_reasoning() -> None:
    assert chat(tools=[]).has_free_text(FORMATS["json"])
    assert chat().has_free_text(FORMATS["hermes"])
    assert not chat().has_free_text(FORMATS["llama3"])  # a call after it would not be the first sign
    assert not chat(tool_choice="required").has_free_text(FORMATS["hermes"])
