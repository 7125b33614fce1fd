"""Reasoning is separated from the answer, wherever a text is cut."""

from __future__ import annotations

import re
from itertools import pairwise

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_api import Running, events, server

from yggdrasil.bundle import bundled_models
from yggdrasil.config import ServeConfig
from yggdrasil.errors import ConfigError
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.reasoning import ReasoningParser, separated
from yggdrasil.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]
THOUGHT = "<think>\nThe fox is red.\n</think>\n\nA red fox."
WORDS = ("<think>", "</think>", "<", "</", "think>", "a", "b c", " ", "\n", "é")
TEXTS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


def separated_reference(text: str, *, is_open: bool) -> tuple[str, str]:
    """The parts of a whole text by regular expressions."""
    opening = "" if is_open else r"\s*<think>"
    closed = re.fullmatch(rf"{opening}\s*(.*?)\s*</think>\s*(.*)", text, re.DOTALL)
    if closed is not None:
        return closed[1], closed[2]
    unclosed = re.fullmatch(rf"{opening}\s*(.*)", text, re.DOTALL)
    return ("", text) if unclosed is None else (unclosed[1], "")


@given(TEXTS, st.booleans())
def test_parts_are_those_of_the_reference(text: str, is_open: bool) -> None:
    assert separated(text, is_open=is_open) == separated_reference(text, is_open=is_open)


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 60)))
def test_chunks_are_the_whole_wherever_a_text_is_cut(text: str, is_open: bool, cuts: list[int]) -> None:
    parser = ReasoningParser(is_open=is_open)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [part for start, end in pairwise(places) for part in parser.push(text[start:end])]
    parts += parser.finish()
    joined = ["".join(part.text for part in parts if part.is_reasoning == kind) for kind in (True, False)]
    assert tuple(joined) == separated(text, is_open=is_open)
    assert all(part.text for part in parts)
    kinds = [part.is_reasoning for part in parts]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"


def ask(running: Running, *, stream: bool, **fields: object) -> tuple[str, str | None]:
    """The answer, and the reasoning or None if the reply has no field for it."""
    response = running.chat(stream=stream, **fields)
    assert response.status_code == 200, response.text
    if not stream:
        message = response.json()["choices"][0]["message"]
        return message["content"], message.get("reasoning_content")
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response)[:-1]]
    assert deltas[0]["role"] == "assistant"
    reasoning = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    return "".join(delta.get("content") or "" for delta in deltas), "".join(
        reasoning
    ) if reasoning else None


@pytest.mark.parametrize("stream", (False, True))
def test_reasoning_is_separated_if_the_server_or_the_request_asks_for_it(stream: bool) -> None:
    with server() as running:
        running.service.story = THOUGHT
        assert ask(running, stream=stream) == (THOUGHT, None)
        assert ask(running, stream=stream, include_reasoning=True) == ("A red fox.", "The fox is red.")
        assert ask(running, stream=stream, include_reasoning=False) == ("A red fox.", None)
        running.serving.reasoning_parser = "think"
        assert ask(running, stream=stream) == ("A red fox.", "The fox is red.")
        assert ask(running, stream=stream, include_reasoning=False) == ("A red fox.", None)
        running.service.story = "A red fox."
        content, reasoning = ask(running, stream=stream)
        assert (content, reasoning or "") == ("A red fox.", "")


@pytest.mark.parametrize("stream", (False, True))
def test_reasoning_that_the_template_opens_needs_no_marker(stream: bool) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n")
    with server(template=template, reasoning_parser="think") as running:
        running.service.story = THOUGHT.removeprefix("<think>")
        assert ask(running, stream=stream) == ("A red fox.", "The fox is red.")


@pytest.mark.parametrize("stream", (False, True))
def test_calls_of_tools_are_read_from_the_answer_only(stream: bool) -> None:
    call = '<tool_call>{"name": "sum", "arguments": {}}</tool_call>'
    template = ChatTemplate("{{ tools }}{{ messages[0].content }}")
    tools = [{"type": "function", "function": {"name": "sum"}}]
    with server(template=template, reasoning_parser="think", tool_parser="hermes") as running:
        running.service.story = f"<think>{call}</think>{call}"
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            if stream:
                with client.chat.completions.stream(model="tiny", messages=HI, tools=tools) as stream_:
                    message = stream_.get_final_completion().choices[0].message
            else:
                answer = client.chat.completions.create(model="tiny", messages=HI, tools=tools)
                message = answer.choices[0].message
        assert [each.function.arguments for each in message.tool_calls] == ["{}"]
        assert message.reasoning_content == call


@pytest.mark.parametrize("stream", (False, True))
def test_under_a_grammar_the_whole_text_is_the_answer(stream: bool) -> None:
    """The grammar leaves no room for a closing marker, so nothing would ever be the answer."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<think>")
    with server(template=template, reasoning_parser="think") as running:
        content, reasoning = ask(running, stream=stream, response_format={"type": "json_object"})
    assert content
    assert not reasoning


def test_reasoning_of_an_earlier_answer_reaches_the_template() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}")
    with server(template=template) as running:
        messages = [*HI, {"role": "assistant", "content": "A", "reasoning_content": "B"}, *HI]
        assert running.chat(messages=messages).status_code == 200
        prompt = running.service.submitted[-1].prompt
        assert Tokenizer(bundled_models()[0] / "tokenizer.json", "").decode(list(prompt)) == "[]Hi[B]A[]Hi"


def test_a_parser_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="think"):
        ServeConfig(reasoning_parser="deepthought")
