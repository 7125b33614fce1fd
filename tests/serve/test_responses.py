"""`/v1/responses`: as OpenAI's own client reads it, and events as they are sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from test_api import STORY, Running, eventually, server
from test_openai_client import CALLS, TEMPLATE
from test_openai_client import TOOLS as CHAT_TOOLS

from yggdrasil.config import GrammarConfig
from yggdrasil.serve.chat import ChatTemplate

CALLED = {"type": "function_call", "call_id": "a", "name": "sum", "arguments": "{}"}
IMAGE = {"type": "input_image", "image_url": "data:"}
REFUSING = "{% if messages[0].content == 'refuse' %}{{ raise_exception('never') }}{% endif %}"
TOOLS = [{"type": "function", "strict": None, **tool["function"]} for tool in CHAT_TOOLS]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    template = ChatTemplate(REFUSING + TEMPLATE)
    with server(template=template, tool_parser="hermes", max_context=512) as running:
        yield running


@pytest.fixture(autouse=True)
def story(running: Running) -> Iterator[None]:
    running.service.story = STORY
    yield


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    url = f"{running.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
        yield client


def prompt(running: Running) -> str:
    """The prompt of the last request."""
    return running.service.tokenizer.decode(list(running.service.submitted[-1].prompt))


def test_a_text_is_answered_with_usage_and_timings(running: Running, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", instructions="Be brief.", input="Hi", temperature=0.5)
    assert (answer.output_text, answer.status, answer.error) == (STORY, "completed", None)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens == len(running.service.tokenizer.encode(STORY))
    assert answer.timings["total_ms"] == 120
    assert (answer.temperature, answer.store, answer.previous_response_id) == (0.5, False, None)
    assert prompt(running) == "<system>Be brief.<user>Hi"
    assert running.service.submitted[-1].config.sampling.temperature == 0.5


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="Hi", max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert STORY.startswith(answer.output_text)


def test_the_stream_helper_joins_the_answer(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="Hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (final.output_text, final.status) == (STORY, "completed")
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def without_ids(response: Any) -> dict[str, Any]:
    """A response in JSON values without what differs between two requests."""
    fields = response if isinstance(response, dict) else response.to_dict()
    fields = {name: value for name, value in fields.items() if name not in ("id", "created_at")}
    items = [{name: each for name, each in item.items() if "id" not in name} for item in fields["output"]]
    return {**fields, "output": items}


@pytest.mark.parametrize("text", (STORY, CALLS["hermes"], "", "<tool_call>"))
def test_events_are_numbered_and_make_up_the_whole_answer(
    running: Running, client: openai.OpenAI, text: str
) -> None:
    running.service.story = text or STORY
    fields: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": TOOLS}
    stop = {} if text else {"stop": STORY[:4]}
    whole = client.responses.create(**fields, extra_body=stop)
    response = running.post("/v1/responses", **fields, **stop, stream=True)
    lines = [line for line in response.text.splitlines() if line]
    sent = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in sent]
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    assert without_ids(sent[-1]["response"]) == without_ids(whole)
    texts = [event["delta"] for event in sent if event["type"] == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert done == sent[-1]["response"]["output"]


def test_the_response_shows_the_options_that_were_used(running: Running, client: openai.OpenAI) -> None:
    running.serving.defaults = {"temperature": 0.6, "top_p": 0.9}
    for sent, used in (({}, (0.6, 0.9)), ({"temperature": 0.1}, (0.1, 0.9)), ({"top_p": None}, (0.6, 0.9))):
        answer = client.responses.create(model="tiny", input="Hi", **sent)
        sampling = running.service.submitted[-1].config.sampling
        assert (answer.temperature, answer.top_p) == used == (sampling.temperature, sampling.top_p)
    running.serving.defaults = {}
    answer = client.responses.create(model="tiny", input="Hi")
    assert (answer.temperature, answer.top_p) == (1.0, 1.0)


@pytest.mark.parametrize("stream", (False, True))
def test_calls_are_items_with_their_arguments(
    running: Running, client: openai.OpenAI, stream: bool
) -> None:
    running.service.story = CALLS["hermes"]
    if stream:
        with client.responses.stream(model="tiny", input="Hi", tools=TOOLS) as events:
            answer = events.get_final_response()
    else:
        answer = client.responses.create(model="tiny", input="Hi", tools=TOOLS)
    message, *calls = answer.output
    assert message.content[0].text == "I look."
    assert [call.type for call in calls] == ["function_call"] * 2
    found = [(call.name, call.arguments) for call in calls]
    assert found == [("get_weather", '{"city": "Köln"}'), ("sum", "{}")]
    assert len({call.call_id for call in calls}) == 2


def test_an_agent_sends_calls_and_results_back(running: Running, client: openai.OpenAI) -> None:
    running.service.story = CALLS["hermes"]
    first = client.responses.create(model="tiny", input="Hi", tools=TOOLS)
    running.service.story = STORY
    calls = [item for item in first.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "12 °C"} for call in calls
    ]
    asked = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    second = client.responses.create(model="tiny", input=[asked, *first.output, *results], tools=TOOLS)
    assert second.output_text == STORY
    assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in prompt(running)
    assert prompt(running).startswith("(get_weather)(sum)<user>Hi<assistant>I look.")
    assert prompt(running).endswith("<tool>12 °C<tool>12 °C")


@pytest.mark.parametrize("stream", (False, True))
def test_reasoning_is_an_item_of_its_own_and_may_come_back(
    running: Running, client: openai.OpenAI, stream: bool
) -> None:
    running.service.story = "<think>The fox is red.</think>A red fox."
    running.serving.reasoning_parser = "think"
    try:
        if stream:
            with client.responses.stream(model="tiny", input="Hi") as events:
                answer = events.get_final_response()
        else:
            answer = client.responses.create(model="tiny", input="Hi")
        again = client.responses.create(
            model="tiny", input=[*answer.output, {"role": "user", "content": "?"}]
        )
    finally:
        running.serving.reasoning_parser = None
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "The fox is red."
    assert answer.output_text == again.output_text == "A red fox."
    assert prompt(running) == "<assistant>A red fox.<user>?"


def test_null_in_a_field_is_the_same_as_leaving_it_out(running: Running) -> None:
    unset = {"reasoning": {"effort": None, "summary": None}, "text": {"format": None, "verbosity": None}}
    tool = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    response = running.post("/v1/responses", input="Hi", tools=[tool], tool_choice="none", **unset)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    (
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
        ({"store": True}, "store", "send False"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_text"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "function_call"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"max_output_tokens": 1000}, "max_output_tokens", "at most"),
        ({"input": "a " * 3000}, "input", "context"),
        ({"temperature": -1.0}, "temperature", "temperature"),
        ({"model": "other"}, "model", "there is no model"),
        ({"frequency": 1}, "frequency", "not a field"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "text", "size": 3}}}, "text.format", "text.format.size"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "has a schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "a": 1}}}, "text.format", "field 'a'"),
        ({"text": {"format": {"type": "json_schema", "schema": 4}}}, "text.format", "text.format: json"),
        ({"input": "a " * 30_000}, "input", "context"),
        ({"input": [CALLED | {"arguments": "[1]"}]}, "input", "0.function_call: the arg"),
        ({"input": [CALLED | {"arguments": '{"a"'}]}, "input", "JSON object"),
        ({"input": [{"type": "function_call_output", "call_id": "", "output": ""}]}, "input", "call_id: "),
        ({"input": [{"role": "tool", "content": "4"}]}, "input", "input.0.message.role: Input should be"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input", "content.0.image_url is not a field"),
        ({"input": [{"role": "assistant", "content": "refuse"}]}, "input", "never"),
        ({"tools": [TOOLS[0] | {"name": ""}]}, "tools", "tools.0.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "b"}}, "tool_choice", "offer"),
        ({"seed": -1}, "seed", "greater than"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"metadata": {str(place): "" for place in range(17)}}, "metadata", "at most 16"),
    ),
)
def test_what_is_not_supported_is_a_400_that_names_it(
    running: Running, fields: dict[str, Any], param: str, message: str
) -> None:
    response = running.post("/v1/responses", **{"input": "Hi", **fields})
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param, error
    assert message in error["message"]
    foreign = ("messages", "response_format", "max_tokens", "max_completion_tokens", "tool_calls")
    assert not any(name in error["message"] for name in foreign), error


def test_a_schema_of_the_text_reaches_the_batch(running: Running, client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    client.responses.create(model="tiny", input="Hi", text={"format": form})
    processors = running.service.submitted[-1].config.sampling.processors
    assert processors is not None
    assert processors.grammar == GrammarConfig.of("json", {"type": "object"})


def test_an_error_within_a_stream_is_raised(running: Running, client: openai.OpenAI) -> None:
    running.service.fails_after = 4
    try:
        with pytest.raises(openai.APIError, match="the grammar was lost"):
            list(client.responses.create(model="tiny", input="Hi", stream=True))
    finally:
        running.service.fails_after = None


def test_a_stream_that_is_closed_cancels_its_row(running: Running, client: openai.OpenAI) -> None:
    before = running.service.cancelled
    running.service.is_stuck = True
    try:
        stream = client.responses.create(model="tiny", input="Hi", stream=True)
        assert next(iter(stream)).type == "response.created"
        stream.close()
        eventually(lambda: running.service.cancelled == before + 1)
    finally:
        running.service.is_stuck = False
