"""Tool calls in texts: what each format reads, and that the cuts of a stream do not matter."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.config import TOOL_PARSERS
from yggdrasil.serve.tools import FORMATS, CallDelta, Parsed, ToolParser, format_of, parsed

NAMES = ("sum", "get_weather")
SUM = '{"name": "sum", "arguments": {"a": 1, "b": [2, "}"]}}'
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'
WEATHER = '{"name": "get_weather", "parameters": {"city": "Zürich \\"ZH\\" \\\\"}}'
CITY = '{"city": "Zürich \\"ZH\\" \\\\"}'


def read(text: str, form: str, **options: int) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a whole text."""
    whole = parsed(text, FORMATS[form], NAMES, **options)
    return whole.content, [(name, arguments) for name, arguments in whole.calls]


BOTH = [("sum", ARGUMENTS), ("get_weather", CITY)]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{SUM}\n</tool_call>", "", BOTH[:1]),
        ("hermes", f"I look.\n<tool_call>{SUM}</tool_call>\n<tool_call>{WEATHER}", "I look.", BOTH),
        ("hermes", f"A<tool_call>{SUM}</tool_call> B", "A B", BOTH[:1]),
        ("hermes", SUM, SUM, []),
        ("llama3", WEATHER, "", BOTH[1:]),
        ("llama3", f"<|python_tag|>{SUM}; {WEATHER}\n", "", BOTH),
        ("llama3", f"I think: {SUM}", f"I think: {SUM}", []),
        ("mistral", f"[TOOL_CALLS] [{SUM}, {WEATHER}]", "", BOTH),
        ("mistral", f"[{SUM}]", "", BOTH[:1]),  # the marker is a special token, which is not in the text
        ("mistral", f"Well. [TOOL_CALLS][{SUM}]", "Well.", BOTH[:1]),
        ("json", f" {SUM}", "", BOTH[:1]),
        ("json", f"[{SUM},\n{WEATHER}]", "", BOTH),
        ("json", f"{SUM} Done.", " Done.", BOTH[:1]),
    ],
    ids=str,
)
def test_every_format_reads_the_calls_of_its_models(
    form: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(text, form) == (content, calls)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "Hello, {world} [1, 2] <b>. ",
        '{"name": "Ann", "age": 3}',
        '{"age": 3}',
        '{"name": ["sum"]}',
        '{"name": "su',
        "[1, 2]",
        "<tool_call>oops</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call",
        "[TOOL_CALLS] none",
        "<|python_tag|>print(1)",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        "{",
        "{}",
        '{"a": tru}',
        '{"arguments": 5, "name": "sum"}',
        '{"name" "sum"}',
    ],
)
def test_a_text_without_a_call_of_an_offered_function_is_content(form: str, text: str) -> None:
    assert read(text, form) == (text, [])


def test_arguments_may_come_first_or_as_a_text_or_be_absent() -> None:
    assert read('{"arguments": {"a": 1}, "name": "sum"}', "json") == ("", [("sum", '{"a": 1}')])
    assert read('{"name": "sum", "arguments": "{\\"a\\": 1}"}', "json") == ("", [("sum", '{"a": 1}')])
    for absent in ('{"name": "sum"}', '{"name": "sum", "arguments": null}', '{"id": 7, "name": "sum"}'):
        assert read(absent, "json") == ("", [("sum", "{}")])
    both = '{"name": "sum", "parameters": {"a": 1}, "arguments": {"b": 2}}'
    assert read(both, "json") == ("", [("sum", '{"a": 1}')])


def test_a_call_that_ends_early_keeps_its_arguments_and_what_follows_is_content() -> None:
    assert read(SUM[:40], "json") == ("", [("sum", ARGUMENTS[:11])])
    assert read('{"name": "sum", "arguments": {"a": 1]} x', "json") == ("]} x", [("sum", '{"a": 1')])


def test_a_marker_is_found_after_text_that_only_begins_like_one() -> None:
    call = f"<tool_call>{SUM}</tool_call>"
    for before in (
        "<tool<",
        "<tool_call>oops",
        "<tool_call><tool_call",
        '<tool_call>{"a":',
        "</tool_call>",
    ):
        assert read(before + call, "hermes") == (before, BOTH[:1])


def test_only_as_many_calls_as_allowed_are_returned() -> None:
    for form, text in (("json", f"[{SUM}, {WEATHER}]"), ("llama3", f"{SUM}; {WEATHER}")):
        assert read(text, form, most_calls=1) == ("", BOTH[:1])


def test_a_name_comes_before_the_arguments_which_come_as_they_are_written() -> None:
    parser = ToolParser(FORMATS["json"], NAMES)
    deltas = [delta for char in SUM for delta in parser.push(char)] + parser.finish()
    assert deltas[0] == CallDelta(0, "sum")
    assert deltas[1:] == [CallDelta(0, "", char) for char in ARGUMENTS]


FRAGMENTS = st.sampled_from(
    [
        SUM,
        WEATHER,
        SUM[:25],
        '{"name": "sum"}',
        '{"name": "other", "arguments": {}}',
        '{"arguments": "{}", "name": "sum"}',
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "{", "}", "[", "]"),
        *(", ", ";", " ", "\n", '"', "\\", "text", "é", "1"),
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=8).map("".join)


@settings(max_examples=1000, deadline=None)
@given(
    TEXTS, st.sampled_from(sorted(FORMATS)), st.lists(st.integers(0, 400)), st.sampled_from([None, 0, 1])
)
def test_the_deltas_of_a_stream_are_those_of_the_whole(
    text: str, form: str, cuts: list[int], most_calls: int | None
) -> None:
    whole = parsed(text, FORMATS[form], NAMES, most_calls=most_calls)
    parser = ToolParser(FORMATS[form], NAMES, most_calls=most_calls)
    streamed = Parsed()
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    for start, end in zip([0, *ends], ends, strict=False):
        streamed.add(parser.push(text[start:end]))
    streamed.add(parser.finish())
    assert streamed == whole
    if parser.num_calls == 0:
        assert whole == Parsed(text)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=9), st.lists, max_leaves=5
        ),
    ),
    st.sampled_from(NAMES),
    st.booleans(),
)
def test_every_json_object_comes_through_as_arguments(
    arguments: dict[str, object], name: str, is_ascii: bool
) -> None:
    written = json.dumps(arguments, ensure_ascii=is_ascii)
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=is_ascii)
    texts = {
        "hermes": f"<tool_call>{call}</tool_call>",
        "llama3": call.replace('"arguments"', '"parameters"', 1),
        "mistral": f"[TOOL_CALLS][{call}]",
        "json": call,
    }
    for form, text in texts.items():
        assert read(text, form) == ("", [(name, written)])


def test_the_command_line_knows_every_format() -> None:
    assert tuple(FORMATS) == TOOL_PARSERS


def test_a_format_is_chosen_by_the_markers_of_the_template() -> None:
    assert format_of("... <tool_call>\n{{ tool_call }}") == "hermes"
    assert format_of("[TOOL_CALLS] {{ tools }}") == "mistral"
    assert format_of('<|start_header_id|> {{ \'Respond with {"name": x, "parameters": y}\' }}') == "llama3"
    assert format_of("{{ tools | tojson }}") == "json"


@pytest.mark.parametrize("form", FORMATS)
def test_a_value_that_is_nested_too_deeply_is_text(form: str) -> None:
    text = f'{{"x": {"[" * 5000}{"]" * 5000}, "name": "sum"}}'
    assert read(text, form) == (text, [])
