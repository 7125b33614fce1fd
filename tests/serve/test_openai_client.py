"""OpenAI's own client, unmodified, with this server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from test_api import CONTEXT, STORY, Running, eventually, server

from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.messages import Tool
from yggdrasil.serve.structured import forced_call, possible_calls
from yggdrasil.serve.tools import FORMATS

KEY = "a key"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(api_key=KEY) as running:
        yield running


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0, timeout=10) as client:
        yield client


def test_completions_have_all_choices_and_the_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["Once", "Twice"], n=2, max_tokens=100, temperature=0.7, seed=1, user="me"
    )
    assert [choice.text for choice in answer.choices] == [STORY] * 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_returns_a_message_of_the_assistant(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert STORY.startswith(str(answer.choices[0].message.content))


def test_a_stream_of_completions_has_the_text_and_the_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="tiny", prompt="Once", max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == STORY
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_a_stream_of_chat_has_the_text_and_the_role(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == STORY
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_stream_helper_of_chat_joins_the_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HI, logprobs=True) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == STORY
    assert answer.choices[0].logprobs is not None


def test_log_probabilities_of_completions_and_chat_agree(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="tiny", prompt="Once", max_tokens=3, logprobs=2)
    scores = completion.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs == [-0.5] * 3
    assert scores.top_logprobs is not None
    assert scores.text_offset is not None
    chat = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=3, logprobs=True, top_logprobs=2
    )
    chat_scores = chat.choices[0].logprobs
    assert chat_scores is not None
    assert chat_scores.content is not None
    assert [entry.token for entry in chat_scores.content] == scores.tokens
    assert [len(entry.top_logprobs) for entry in chat_scores.content] == [2, 2, 2]


def test_extra_fields_reach_the_batch(client: openai.OpenAI, running: Running) -> None:
    client.completions.create(
        model="tiny",
        prompt="Once",
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "speculation": "off"},
    )
    request = running.service.submitted[-1]
    assert request.config.sampling.top_k == 5
    assert request.config.sampling.min_p == 0.1
    assert request.config.ignore_eos
    assert request.speculation == 0


def test_processors_reach_the_batch(client: openai.OpenAI, running: Running) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=HI,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        logit_bias={"7": -100, "3": 2.5},
        extra_body={
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "bad_words": ["Once"],
        },
    )
    config = running.service.submitted[-1].config
    processors = config.sampling.processors
    assert processors is not None
    assert (processors.frequency_penalty, processors.presence_penalty) == (0.5, -0.25)
    assert (processors.repetition_penalty, processors.min_tokens) == (1.2, 2)
    assert processors.logit_bias == ((3, 2.5), (7, -100.0))
    assert config.stop_tokens == (9,)
    spelled = {running.serving.tokenizer.decode(sequence).strip() for sequence in processors.banned}
    assert spelled == {"Once"}


def test_the_model_is_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "yggdrasil"


def test_errors_are_raised_as_the_client_s_own_classes(client: openai.OpenAI, running: Running) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt=[5] * CONTEXT)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        client.completions.create(model="tiny", prompt="Once", suffix="the end")
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        client.chat.completions.create(model="gpt-4", messages=HI)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        client.with_options(api_key="another").models.list()
    running.service.is_full = True
    try:
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model="tiny", prompt="Once")
    finally:
        running.service.is_full = False
    assert full.value.response.headers["retry-after"] == "3"


def test_an_error_within_a_stream_is_raised(client: openai.OpenAI, running: Running) -> None:
    running.service.fails_after = 4
    try:
        with pytest.raises(openai.APIError, match="the grammar was lost"):
            for _ in client.completions.create(model="tiny", prompt="Once", max_tokens=100, stream=True):
                pass
    finally:
        running.service.fails_after = None


def test_a_stream_that_is_closed_cancels_its_rows(client: openai.OpenAI, running: Running) -> None:
    before = running.service.cancelled
    with client.completions.create(model="tiny", prompt="Once", n=2, max_tokens=100, stream=True) as stream:
        next(iter(stream))
        running.service.is_stuck = True
    eventually(lambda: running.service.cancelled == before + 2)
    running.service.is_stuck = False


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_weather", "sum")
]
TEMPLATE = (
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    "{% endfor %}{% endfor %}"
)
CALLS = {
    "hermes": 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sum", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Köln"}}; {"name": "sum", "parameters": {}}',
    "mistral": '[{"name": "get_weather", "arguments": {"city": "Köln"}}, {"name": "sum", "arguments": {}}]',
    "json": '[{"name": "get_weather", "arguments": {"city": "Köln"}}, {"name": "sum"}]',
}


@pytest.fixture(params=CALLS)
def calling(request: pytest.FixtureRequest) -> Iterator[tuple[openai.OpenAI, Running, str]]:
    """A client of a server whose model writes calls in one format."""
    form = request.param
    template = ChatTemplate(TEMPLATE)
    with (
        server(template=template, tool_parser=form, max_context=512) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0, timeout=10) as client,
    ):
        running.service.story = CALLS[form]
        yield client, running, form


def test_calls_of_tools_are_returned_and_streamed_alike(
    calling: tuple[openai.OpenAI, Running, str],
) -> None:
    client, _, form = calling
    answer = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == ("I look." if form == "hermes" else None)
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("get_weather", '{"city": "Köln"}'), ("sum", "{}")]
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert {len(number) for number in ids} == {9 if form == "mistral" else 24}
    with client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.content == choice.message.content
    assert [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls] == calls


def test_a_streamed_call_begins_with_its_id_and_name_and_goes_on_with_its_arguments(
    calling: tuple[openai.OpenAI, Running, str],
) -> None:
    client, _, _ = calling
    chunks = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True)
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    for index, name in enumerate(("get_weather", "sum")):
        first, *rest = [call for call in calls if call.index == index]
        assert (first.function.name, first.function.arguments, first.type) == (name, "", "function")
        assert first.id
        assert rest
        assert all(call.id is None and call.function.name is None for call in rest)
        assert isinstance(json.loads("".join(call.function.arguments for call in rest)), dict)


def test_an_answer_with_a_schema_is_no_call_where_a_call_needs_no_marker(
    calling: tuple[openai.OpenAI, Running, str],
) -> None:
    client, running, form = calling
    running.service.story = '{"name": "sum", "age": 3}'
    form_of_answer: Any = {"type": "json_object"}
    answer = client.chat.completions.create(
        model="tiny", messages=HI, tools=TOOLS, response_format=form_of_answer
    )
    [choice] = answer.choices
    assert (choice.message.content, choice.message.tool_calls) == ('{"name": "sum", "age": 3}', None), form


@pytest.mark.parametrize("kind", ("regex", "choice", "grammar"))
@pytest.mark.parametrize("stream", (False, True))
def test_a_text_under_a_grammar_is_content_even_if_it_looks_like_a_call(
    calling: tuple[openai.OpenAI, Running, str], kind: str, stream: bool
) -> None:
    client, _, form = calling
    text = CALLS[form]
    lark = f"start: {json.dumps(text, ensure_ascii=False)}"
    grammars: dict[str, Any] = {"regex": re.escape(text), "choice": [text], "grammar": lark}
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=TOOLS,
        stream=stream,
        extra_body={"structured_outputs": {kind: grammars[kind]}},
    )
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        assert "".join(delta.content or "" for delta in deltas) == text
        assert not any(delta.tool_calls for delta in deltas)
    else:
        [choice] = answer.choices
        assert (choice.message.content, choice.message.tool_calls) == (text, None)
        assert choice.finish_reason == "stop"


def test_a_call_is_forced_whatever_the_format_of_an_answer_is(
    calling: tuple[openai.OpenAI, Running, str],
) -> None:
    """As in a loop that asks for a call first, and sends the same fields for the answer after it."""
    client, running, form = calling
    form_of_answer: Any = {"type": "json_object"}
    fields: Any = {"model": "tiny", "messages": HI, "tools": TOOLS, "response_format": form_of_answer}
    for choice in ("required", {"type": "function", "function": {"name": "sum"}}):
        answer = client.chat.completions.create(**fields, tool_choice=choice)
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == [
            "get_weather",
            "sum",
        ]
        processors = running.service.submitted[-1].config.sampling.processors
        assert processors is not None
        offered = [Tool.model_validate(tool) for tool in (TOOLS if choice == "required" else TOOLS[1:])]
        assert processors.grammar == forced_call(offered, FORMATS[form])


def test_an_agent_sends_calls_and_results_back(calling: tuple[openai.OpenAI, Running, str]) -> None:
    client, running, _ = calling
    answer = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    message = answer.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 °C"} for call in message.tool_calls]
    running.service.story = STORY
    for sent in (message, message.model_dump(), message.to_dict()):
        again = client.chat.completions.create(model="tiny", messages=[*HI, sent, *results], tools=TOOLS)
        assert (again.choices[0].message.content, again.choices[0].finish_reason) == (STORY, "stop")
        prompt = running.service.tokenizer.decode(running.service.submitted[-1].prompt)
        assert prompt.startswith("(get_weather)(sum)<user>Hi<assistant>")
        assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in prompt
        assert prompt.endswith("<tool>12 °C<tool>12 °C")


def test_without_a_choice_of_tools_the_text_is_left_alone_and_one_call_can_be_asked_for(
    calling: tuple[openai.OpenAI, Running, str],
) -> None:
    client, running, form = calling
    unforced = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="none")
    assert unforced.choices[0].message.content == CALLS[form]
    assert unforced.choices[0].finish_reason == "stop"
    prompt = running.service.tokenizer.decode(running.service.submitted[-1].prompt)
    assert prompt == "<user>Hi"
    one = client.chat.completions.create(
        model="tiny", messages=HI, tools=TOOLS, tool_choice="auto", parallel_tool_calls=False
    )
    assert [call.function.name for call in one.choices[0].message.tool_calls] == ["get_weather"]
    cut = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, max_tokens=12)
    assert cut.choices[0].finish_reason == "length"
    client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="required")
    processors = running.service.submitted[-1].config.sampling.processors
    assert processors is not None
    assert processors.grammar in running.service.prepared


def test_strict_functions_that_may_be_called_are_a_grammar_and_their_calls_are_streamed(
    calling: tuple[openai.OpenAI, Running, str],
) -> None:
    client, running, form = calling
    tools: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    if not FORMATS[form].opening:
        with pytest.raises(openai.BadRequestError, match="no marker"):
            client.chat.completions.create(model="tiny", messages=HI, tools=tools)
        return
    answer = client.chat.completions.create(model="tiny", messages=HI, tools=tools)
    with client.chat.completions.stream(model="tiny", messages=HI, tools=tools) as stream:
        streamed = stream.get_final_completion()
    whole, final = (each.choices[0].message.tool_calls for each in (answer, streamed))
    assert [(call.function.name, call.function.arguments) for call in whole] == [
        (call.function.name, call.function.arguments) for call in final
    ]
    processors = running.service.submitted[-1].config.sampling.processors
    assert processors is not None
    offered = [Tool.model_validate(tool) for tool in tools]
    assert processors.grammar == possible_calls(offered, FORMATS[form])
