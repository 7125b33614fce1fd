"""Frameworks for agents with this server: LangChain and LiteLLM, where they are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from test_api import STORY, Running, server
from test_openai_client import CALLS, TEMPLATE, TOOLS

from yggdrasil.serve.chat import ChatTemplate

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the frameworks
KEY = "a key"
HI = [{"role": "user", "content": "Hi"}]
CALLED = [("get_weather", {"city": "Köln"}), ("sum", {})]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it reads a list from the network
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    template = ChatTemplate(TEMPLATE)
    with server(api_key=KEY, template=template, tool_parser="hermes", max_context=512) as running:
        yield running


@pytest.fixture(params=(False, True), ids=("chat", "responses"))
def model(request: pytest.FixtureRequest, running: Running) -> Any:
    """LangChain's model over chat completions or over responses."""
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    options = {"use_responses_api": True, "store": False} if request.param else {}
    return chat(base_url=f"{running.url}/v1", api_key=KEY, model="tiny", max_retries=0, **options)


def test_langchain_invokes_and_streams(running: Running, model: Any) -> None:
    answer = model.invoke("Hi")
    assert answer.text == STORY
    assert answer.usage_metadata["output_tokens"] == len(running.service.tokenizer.encode(STORY))
    chunks = list(model.stream([("system", "Be brief."), ("user", "Hi")]))
    assert "".join(chunk.text for chunk in chunks) == STORY
    assert len(chunks) > 3
    prompt = running.service.tokenizer.decode(list(running.service.submitted[-1].prompt))
    assert prompt == "<system>Be brief.<user>Hi"


def test_langchain_options_reach_the_batch(running: Running, model: Any) -> None:
    model.bind(temperature=0.25, top_p=0.5, extra_body={"seed": 3}).invoke("Hi")
    sampling = running.service.submitted[-1].config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.25, 0.5, 3)


@pytest.mark.parametrize("stream", (False, True))
def test_langchain_binds_tools_and_sends_their_results(running: Running, model: Any, stream: bool) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    running.service.story = CALLS["hermes"]
    bound = model.bind_tools(TOOLS)
    asked = messages.HumanMessage("Hi")
    if stream:
        first, *rest = bound.stream([asked])
        answer = sum(rest, first)
    else:
        answer = bound.invoke([asked])
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == CALLED
    assert answer.text == "I look."
    running.service.story = STORY
    results = [messages.ToolMessage("12 °C", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert bound.invoke([asked, answer, *results]).text == STORY
    prompt = running.service.tokenizer.decode(list(running.service.submitted[-1].prompt))
    assert prompt.startswith("(get_weather)(sum)<user>Hi<assistant>I look.")
    assert prompt.endswith("<tool>12 °C<tool>12 °C")


class City(pydantic.BaseModel):
    name: str


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: City


def test_langchain_binds_strict_tools_and_asks_for_structured_output(running: Running, model: Any) -> None:
    answer = '{"city": {"name": "Oslo"}}'
    running.service.story = f'<tool_call>{{"name": "Weather", "arguments": {answer}}}</tool_call>'
    [call] = model.bind_tools([Weather], strict=True).invoke("Hi").tool_calls
    assert call["args"] == json.loads(answer)
    processors = running.service.submitted[-1].config.sampling.processors
    assert processors is not None
    assert "head[lazy]" in processors.grammar.source  # text is free until a call begins
    for method, story in (("function_calling", running.service.story), ("json_schema", answer)):
        running.service.story = story
        found = model.with_structured_output(Weather, method=method, strict=True).invoke("Hi")
        assert found == Weather(city=City(name="Oslo"))


@pytest.fixture
def complete(running: Running) -> Any:
    """LiteLLM's function for chats."""
    litellm = pytest.importorskip("litellm")

    def complete(**fields: Any) -> Any:
        return litellm.completion(
            model="openai/tiny", api_base=f"{running.url}/v1", api_key=KEY, num_retries=0, **fields
        )

    return complete


def test_litellm_answers_and_streams(running: Running, complete: Any) -> None:
    answer = complete(messages=HI, temperature=0.25)
    assert answer.choices[0].message.content == STORY
    assert answer.usage.completion_tokens == len(running.service.tokenizer.encode(STORY))
    assert running.service.submitted[-1].config.sampling.temperature == 0.25
    chunks = list(complete(messages=HI, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == STORY


def test_litellm_calls_tools(running: Running, complete: Any) -> None:
    running.service.story = CALLS["hermes"]
    message = complete(messages=HI, tools=TOOLS).choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == CALLED
    running.service.story = STORY
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 °C"} for call in message.tool_calls]
    again = complete(messages=[*HI, message.model_dump(), *results], tools=TOOLS)
    assert again.choices[0].message.content == STORY


def test_litellm_shows_reasoning(running: Running, complete: Any) -> None:
    running.serving.reasoning_parser = "think"
    running.service.story = "<think>The fox is red.</think>A red fox."
    message = complete(messages=HI).choices[0].message
    assert (message.reasoning_content, message.content) == ("The fox is red.", "A red fox.")


def test_litellm_asks_for_a_response(running: Running) -> None:
    litellm = pytest.importorskip("litellm")
    answer = litellm.responses(
        model="openai/tiny", api_base=f"{running.url}/v1", api_key=KEY, num_retries=0, input="Hi"
    )
    assert answer.output[0].content[0].text == STORY
