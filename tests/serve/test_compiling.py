"""Grammars of requests: one compiles at a time, known ones wait for none, and the error has its field."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from test_api import Running, eventually, server

from yggdrasil.config import GrammarConfig
from yggdrasil.errors import ConfigError, UsageError, YggError
from yggdrasil.serve import api
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.messages import Tool
from yggdrasil.serve.structured import forced_call


class Gate:
    """A service's `prepare` that does not end before the gate is open, and a `knows` that is counted."""

    def __init__(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.known: list[GrammarConfig] = []
        self.asked: list[str] = []
        self.prepared: list[str] = []
        self.inside = 0
        self.most_inside = 0
        monkeypatch.setattr(running.service, "knows", self.knows)
        monkeypatch.setattr(running.service, "prepare", self.prepare)

    def knows(self, grammar: GrammarConfig) -> bool:
        self.asked.append(grammar.source)
        return grammar in self.known

    def prepare(self, grammar: GrammarConfig) -> None:
        self.prepared.append(grammar.source)
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        assert self.opened.wait(10)
        self.inside -= 1


def ask_under(running: Running, expression: str) -> int:
    """The status of a completion under a regular expression."""
    return running.post(prompt="Once", structured_outputs={"regex": expression}).status_code


def test_unknown_grammars_compile_one_at_a_time_and_a_known_one_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with server() as running, ThreadPoolExecutor(3) as pool:
        gate = Gate(running, monkeypatch)
        gate.known.append(GrammarConfig.of("regex", "known"))
        answers = [pool.submit(ask_under, running, letter) for letter in "abc"]
        eventually(lambda: len(gate.asked) == 3 and len(gate.prepared) >= 1)
        assert ask_under(running, "known") == 200
        assert gate.inside == 1
        gate.opened.set()
        assert [answer.result() for answer in answers] == [200] * 3
        assert gate.most_inside == 1
        assert sorted(gate.prepared) == ["a", "b", "c"]


def test_a_client_that_leaves_while_it_waits_has_no_grammar_compiled_and_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with server() as running, ThreadPoolExecutor(2) as pool:
        gate = Gate(running, monkeypatch)
        first = pool.submit(ask_under, running, "a")
        eventually(lambda: gate.prepared == ["a"])
        leaving = left_at(running, "b")
        eventually(lambda: "b" in gate.asked)
        connections = running.web.server_state.connections
        eventually(lambda: len(connections) == 2)
        leaving.close()
        eventually(lambda: len(connections) == 1)
        last: Future[int] = pool.submit(ask_under, running, "c")
        eventually(lambda: "c" in gate.asked)
        gate.opened.set()
        assert (first.result(), last.result()) == (200, 200)
        assert gate.prepared == ["a", "c"]
        assert len(running.service.submitted) == 2


def left_at(running: Running, expression: str) -> socket.socket:
    """A connection over which a request was sent."""
    body = json.dumps({"prompt": "Once", "structured_outputs": {"regex": expression}}).encode()
    place = urlsplit(running.url)
    connection = socket.create_connection((place.hostname or "", place.port or 0))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return connection


# ---- errors ----


def functions(*kinds: str) -> list[dict[str, Any]]:
    """Functions whose parameters are of these types."""
    return [{"name": f"f{place}", "parameters": {"type": kind}} for place, kind in enumerate(kinds)]


def tools_of(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in given]


class Faulty:
    """A service for which grammars with a word are wrong; a schema alone has the place."""

    def __init__(self, running: Running, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
        self.word = word
        self.checked: list[str] = []
        monkeypatch.setattr(running.service, "prepare", self.prepare)
        monkeypatch.setattr(running.service, "check", self.check)
        monkeypatch.setattr(running.serving, "template", ChatTemplate("{{ tools is defined }}"))
        monkeypatch.setattr(running.serving, "tool_parser", "hermes")

    def prepare(self, grammar: GrammarConfig) -> None:
        if self.word in grammar.source:
            raise ConfigError(grammar.kind, grammar.source, "known")

    def check(self, grammar: GrammarConfig) -> None:
        self.checked.append(grammar.source)
        if self.word in grammar.source:
            raise ConfigError(grammar.kind, grammar.source, "known (at /a)")


def test_the_error_of_a_function_s_schema_names_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar of all calls has a place that the client never wrote."""
    with server() as running:
        Faulty(running, monkeypatch, "objectt")
        given = functions("object", "objectt")
        refused = running.chat(tools=tools_of(given), tool_choice="required")
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, "tools", "invalid_grammar")
        assert error["message"].startswith("tools[1].function.parameters: ")
        assert "(at /a)" in error["message"]
        flat = [{"type": "function", **function} for function in given]
        fields = {"input": "Hi", "tools": flat, "tool_choice": "required"}
        answer = running.post("/v1/responses", **fields).json()
        assert answer["error"]["message"].startswith("tools[1].parameters: ")


def test_a_function_that_the_grammar_leaves_out_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its schema is wrong, too, but only strict functions, or that which is named, bind a call."""
    with server() as running:
        faulty = Faulty(running, monkeypatch, "wrong")
        unbound = functions("wrong")
        for given, choice in (
            ([*unbound, {"name": "a", "parameters": {"type": "wrong"}, "strict": True}], "auto"),
            (
                [*unbound, {"name": "a", "parameters": {"type": "wrong"}}],
                {"type": "function", "function": {"name": "a"}},
            ),
        ):
            message = running.chat(tools=tools_of(given), tool_choice=choice).json()["error"]["message"]
            assert message.startswith("tools[1].function.parameters: ")
        assert len(faulty.checked) == 2


def test_a_format_of_a_response_is_named_as_its_client_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as running:
        Faulty(running, monkeypatch, "objectt")
        form = {"type": "json_schema", "name": "a", "schema": {"type": "objectt"}}
        error = running.post("/v1/responses", input="Hi", text={"format": form}).json()["error"]
        assert error["param"] == "text.format"


@pytest.mark.parametrize("strict", (True, False))
def test_a_schema_of_an_answer_is_blamed_next_to_tools(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    with server() as running:
        Faulty(running, monkeypatch, "objectt")
        [tool] = functions("object")
        tools = tools_of([{**tool, "strict": strict}])
        schema = {"type": "objectt"}
        for field, value in (
            ("structured_outputs", {"json": schema}),
            ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}),
        ):
            error = running.chat(tools=tools, **{field: value}).json()["error"]
            assert error["param"] == field
            assert error["message"].startswith(f"{field}: json: ")
            assert "(at /a)" in error["message"]


def test_functions_are_tried_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only all functions together are too complex, trying each of them finds nothing."""
    clock = [0.0]
    checked = []

    def check(grammar: GrammarConfig) -> None:
        checked.append(grammar)
        clock[0] += 1.0

    with server() as running:
        given = functions(*["object"] * 16)
        whole = forced_call([Tool.model_validate(tool) for tool in tools_of(given)], running.serving.form)
        Faulty(running, monkeypatch, whole.source)
        monkeypatch.setattr(running.serving, "tool_parser", "json")
        monkeypatch.setattr(running.service, "check", check)
        monkeypatch.setattr(api, "monotonic", lambda: clock[0])
        error = running.chat(tools=tools_of(given), tool_choice="required").json()["error"]
        assert error["message"].startswith("tools: ")
        assert 1 <= len(checked) <= api.MOST_PARTS_S + 1


@pytest.mark.parametrize(
    ("fault", "status"),
    [(YggError("grammars cannot be tried"), 500), (UsageError("grammars cannot be tried", "pip"), 400)],
    ids=("failed", "not installed"),
)
def test_a_failed_trial_is_a_500_and_a_server_without_grammars_refuses_them(
    fault: YggError, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(grammar: GrammarConfig) -> None:
        raise fault

    with server() as running:
        monkeypatch.setattr(running.service, "prepare", prepare)
        refused = running.post(prompt="Once", structured_outputs={"regex": "a"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (status, None)
        assert "cannot be tried" in error["message"]
