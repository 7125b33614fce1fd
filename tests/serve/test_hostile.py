"""Requests and connections that could harm other clients: each one is refused or closed."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from test_api import CONTEXT, VOCAB, Running, eventually, server

from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.serve import connections, middleware
from yggdrasil.serve.body import MAX_BODY_BYTES, MAX_VALUES
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.connections import limited, log_errors_rarely, raise_descriptor_limit
from yggdrasil.serve.hosts import HostNames
from yggdrasil.serve.prompts import PREFIX_CHARS, PromptEncoder
from yggdrasil.serve.wire import ApiError

JSON = {"Content-Type": "application/json"}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def head(content_length: int) -> bytes:
    """The headers of a completion."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % content_length
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with server() as running:
        yield running


def raw(running: Running, body: bytes, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    return httpx.post(running.url + path, content=body, headers={**JSON, **headers}, timeout=30)


def refused(response: httpx.Response, status: int = 400) -> str:
    """Assert that a request was refused; returns the message, which is one short line."""
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 2000
    message: str = response.json()["error"]["message"]
    assert "\n" not in message
    assert "Traceback" not in message
    return message


# ---- bodies


MANY = 360_000


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"prompt": [' + b"[]," * MANY + b"[]]}", "lists"),
        (b'{"prompt": [' + b"{}," * MANY + b"{}]}", "objects"),
        (b'{"prompt": [' + b"1," * MANY + b"1]}", "values"),
        (b'{"prompt": [' + b'"",' * MANY + b'""]}', "strings|values"),
        (b'{"prompt": [' + b'"\\"[{",' * MANY + b'""]}', "strings|values"),
        (b"{" + b",".join(b'"%d":1' % index for index in range(MANY)) + b"}", "strings|fields"),
    ],
    ids=["lists", "objects", "integers", "strings", "strings with quotes", "fields"],
)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(
    shared: Running, body: bytes, complaint: str
) -> None:
    assert len(body) <= MAX_BODY_BYTES
    start = time.perf_counter()
    message = refused(raw(shared, body))
    assert time.perf_counter() - start < 5  # parsing some of these takes longer
    assert "more than" in message
    assert any(kind in message for kind in complaint.split("|"))


def test_the_arguments_of_a_call_are_counted_before_they_are_parsed(shared: Running) -> None:
    for arguments in ('{"a": [' + "[]," * MANY + "[]]}", '{"a": ' + "[" * 5000):
        function = {"name": "sum", "arguments": arguments}
        calls = [{"id": "a", "type": "function", "function": function}]
        body = json.dumps({"messages": [{"role": "assistant", "tool_calls": calls}]}).encode()
        assert len(body) <= MAX_BODY_BYTES
        message = refused(raw(shared, body, "/v1/chat/completions"))
        assert "more than 8192 lists" in message or "must be a JSON object" in message


@pytest.mark.parametrize("depth", (100, 900))
def test_deeply_nested_tools_are_answered_or_refused(depth: int) -> None:
    parameters = "[" * depth + "]" * depth
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"a": {parameters}}}}}}}]'
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "tools": {tools}}}'.encode()
    with server(template=ChatTemplate("{{ tools | tojson | length }}")) as running:
        response = raw(running, body, "/v1/chat/completions")
        assert response.status_code in (200, 400), response.text


def repeating(value: str) -> dict[str, bytes]:
    """Bodies of responses, by the field that is or has this value in JSON, which the answer repeats."""
    form = {"type": "json_schema", "name": "VALUE", "schema": {"type": "object"}}
    fields: dict[str, Any] = {
        "metadata": {"a": "VALUE"},
        "text.format": {"format": form},
        "tools": [{"type": "function", "name": "f", "parameters": {"a": "VALUE"}}],
    }
    return {
        name: json.dumps({"input": "Hi", "tool_choice": "none", name.partition(".")[0]: field})
        .replace('"VALUE"', value)
        .encode()
        for name, field in fields.items()
    }


@pytest.mark.parametrize("blanks", (0, 70_000), ids=["small", "large"])  # large ones are parsed in a thread
def test_what_an_answer_repeats_is_not_nested_too_deeply(shared: Running, blanks: int) -> None:
    for depth in (100, *range(900, 1000, 10)):
        for body in repeating("[" * depth + "]" * depth).values():
            response = raw(shared, body + b" " * blanks, "/v1/responses")
            assert response.status_code == 200 if depth == 100 else refused(response), response.text


@pytest.mark.parametrize("number", ("NaN", "-Infinity", "1e400"))
def test_a_number_that_json_lacks_is_not_repeated(shared: Running, number: str) -> None:
    for name, body in repeating(number).items():
        for sent in (body, body.replace(b"{", b'{"stream": true, ', 1)):
            assert refused(raw(shared, sent, "/v1/responses")).startswith(f"{name}: a number is not finite")


def test_brackets_and_commas_in_a_text_do_not_count_as_values(shared: Running) -> None:
    for text in ("[{,:" * 40_000 + "end", '\\"[,' * 100_000, "\\" * 50_001, '"' * 300_000, ',"' * 300_000):
        assert "take more" in refused(raw(shared, json.dumps({"prompt": text}).encode()))
    assert MAX_VALUES[b","] < 300_000


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"prompt": "a\xff"}', "not UTF-8"),
        (b'\xff\xfe{\x00"\x00', "not UTF-8"),
        (b'{"prompt": 1' + b"0" * 5000 + b"}", "too many digits"),
        (b'{"metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"prompt": "a"} {}', "Extra data at character"),
        (b"", "not JSON"),
        (b'"prompt"', "must be a JSON object"),
    ],
    ids=["bytes", "UTF-16", "digits", "deep", "two", "empty", "a text"],
)
def test_the_error_of_an_invalid_body_gives_the_reason(
    shared: Running, body: bytes, complaint: str
) -> None:
    assert complaint in refused(raw(shared, body))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 10**400},
        {"max_tokens": 10**400},
        {"top_k": -(10**400)},
        {"seed": 10**400},
        {"n": 10**400},
        {"logprobs": 10**400},
        {"speculation": -(10**400)},
        {"prompt": [10**400]},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": float("nan")},
        {"min_p": float("nan")},
        {"prompt": [float("nan")]},
        {"stop": ["a"] * 5000},
        {"stop": [1] * 5000},
        {"prompt": ["a"] * 9000},
        {"x" * 1_000_000: 1},
        {f"field {index}": 1 for index in range(8000)},
        {"temperature": "x" * 1_000_000},
        {"speculation": "x" * 1_000_000},
        {"stream_options": {"y" * 100_000: 1}, "stream": True},
        {"response_format": {"type": "z" * 100_000}},
        {"\ud800": 1},
        {"min_tokens": 10**30},
        {"no_repeat_ngram_size": 2**63},
        {"stop_token_ids": [-1]},
        {"stop": "x" * 1_000_000},
        {"stop": ["a", "x" * 1_000_000]},
        {"bad_words": ["x" * 1_000_000]},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_no_value_is_a_500_or_is_repeated_in_full(shared: Running, fields: dict[str, Any]) -> None:
    before = len(shared.service.submitted)
    body = json.dumps({"prompt": "Once", **fields}).encode()
    refused(raw(shared, body))
    assert len(shared.service.submitted) == before


def test_a_content_length_of_5000_digits_is_not_a_500(shared: Running) -> None:
    with clients(shared, 1) as (connection,):
        start = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        connection.sendall(start + b"9" * 5000 + b"\r\n\r\n")
        assert connection.recv(2000).split()[1] in (b"400", b"413")


def test_a_long_model_name_is_not_repeated_in_full(shared: Running) -> None:
    body = json.dumps({"model": "x" * 1_000_000, "prompt": "a"}).encode()
    assert "there is no model 'xxx" in refused(raw(shared, body), 404)
    refused(httpx.get(f"{shared.url}/v1/models/{'x' * 20_000}"), 404)
    refused(httpx.get(f"{shared.url}/{'x' * 20_000}"), 404)


@pytest.mark.parametrize("half", ("\ud800", "a\udfff", "🦊\ud83e"))
def test_half_of_a_surrogate_pair_is_a_400(shared: Running, half: str) -> None:
    for field, fields in (
        ("prompt", {"prompt": half}),
        ("prompt", {"prompt": ["a", half]}),
        ("stop", {"prompt": "a", "stop": half}),
        ("bad_words", {"prompt": "a", "bad_words": [half]}),
        ("user", {"prompt": "a", "user": half}),
        ("metadata", {"prompt": "a", "metadata": {"workload": half}}),
        ("metadata", {"prompt": "a", "metadata": {half: 1}}),
        ("structured_outputs", {"prompt": "a", "structured_outputs": {"regex": half}}),
        ("messages", {"messages": [{"role": "user", "content": half}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": half}]}]}),
    ):
        path = "/v1/chat/completions" if field == "messages" else "/v1/completions"
        message = refused(raw(shared, json.dumps(fields).encode(), path))
        assert message.startswith(f"{field}: \\ud")
    refused(raw(shared, json.dumps({"model": half, "prompt": "a"}).encode()))
    body = {"input": "a", "metadata": {"a": half}}
    assert refused(raw(shared, json.dumps(body).encode(), "/v1/responses")).startswith("metadata: \\ud")
    assert shared.ask(prompt="🦊", metadata={"🦊": "🦊"})["choices"]  # escaped as pairs


def test_half_of_a_surrogate_pair_in_the_arguments_of_a_call_is_a_400() -> None:
    function = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    body = json.dumps({"messages": [message]}).encode()
    with server(template=ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.a }}")) as running:
        assert refused(raw(running, body, "/v1/chat/completions")).startswith("messages: \\ud800")


def test_tiny_temperatures_are_accepted(shared: Running) -> None:
    for temperature in (1e-38, 5e-324, 0.0):
        shared.ask(temperature=temperature)
        assert shared.service.submitted[-1].config.sampling.temperature == temperature


def test_only_the_beginning_of_a_text_that_cannot_fit_is_encoded(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = shared.service.tokenizer
    encoded: list[int] = []
    encode = tokenizer.encode

    def counting(text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counting)
    for text in ("Once upon a time. " * 100_000, "x" * 1_000_000, "é🦊" * 100_000):
        encoded.clear()
        assert "shorten it" in refused(shared.post(prompt=text))
        assert sum(encoded) <= 3 * PREFIX_CHARS * CONTEXT
    assert shared.post(prompt=["a"] * 9).json()["error"]["param"] == "n"
    assert encoded[-1] != 1  # prompts are counted before any is encoded


def test_a_long_text_of_few_tokens_fits(shared: Running) -> None:
    class Sparse:
        """A tokenizer with one token for every word, and none for blanks between words."""

        def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
            return [1] * len(text.split()) or [0]

    encoder = PromptEncoder(Sparse(), shared.serving.template, CONTEXT, VOCAB)  # type: ignore[arg-type]
    text = " " * 1_000_000 + "a b c"
    assert encoder.encode(text, "prompt") == [1, 1, 1]
    assert len(encoder.encode("a " * CONTEXT, "prompt")) == CONTEXT
    with pytest.raises(ApiError, match="shorten it"):
        encoder.encode(" " * 100_000 + "a " * 100_000, "prompt")


def test_a_token_that_only_the_tokenizer_has_is_a_400() -> None:
    with server(vocab=300) as running:
        encode = running.service.tokenizer.encode
        text = next(text for text in ("Once upon a time", "fox") if max(encode(text)) >= 300)
        for fields in ({"prompt": text}, {"prompt": [300]}, {"prompt": [[5], [10**6]]}):
            assert "ids go from 0 to 299" in refused(running.post(**fields))


def test_other_clients_get_responses_while_a_large_prompt_is_refused(shared: Running) -> None:
    body = json.dumps({"prompt": "Once upon a time. " * (4_190_000 // 18)}).encode()
    assert (4 << 20) - 10_000 < len(body) <= MAX_BODY_BYTES
    answers: list[str] = []
    sender = threading.Thread(target=lambda: answers.append(refused(raw(shared, body))))
    slowest = 0.0
    with httpx.Client() as client:
        client.get(f"{shared.url}/health")
        sender.start()
        while sender.is_alive():
            start = time.perf_counter()
            assert client.get(f"{shared.url}/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - start)
    assert answers
    assert "shorten it" in answers[0]
    assert slowest < 1.0  # even on a busy machine; without the limit it took 17 s


def test_texts_of_a_client_are_never_encoded_in_the_event_loop(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = shared.service.tokenizer
    in_loop: list[str] = []
    encode = tokenizer.encode

    def noting(text: str, **options: Any) -> list[int]:
        with suppress(RuntimeError):  # no loop runs in this thread
            asyncio.get_running_loop()
            in_loop.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", noting)
    before = len(shared.service.submitted)
    shared.ask(prompt=["a", "b"], stop=["c"], bad_words=["d"], max_tokens=1)
    shared.chat(max_tokens=1)
    shared.post("/v1/responses", input="e", max_output_tokens=1)
    shared.post("/tokenize", prompt="f")
    assert len(shared.service.submitted) == before + 4
    assert set(in_loop) <= {shared.service.story}  # which the fake encodes


def test_the_scores_of_a_whole_answer_are_never_spelled_in_the_event_loop(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = shared.service.tokenizer
    in_loop: list[int] = []
    token_bytes = tokenizer.token_bytes

    def noting(token: int) -> bytes:
        with suppress(RuntimeError):  # no loop runs in this thread
            asyncio.get_running_loop()
            in_loop.append(token)
        return token_bytes(token)

    monkeypatch.setattr(tokenizer, "token_bytes", noting)
    assert shared.ask(logprobs=5)["choices"][0]["logprobs"]["tokens"]
    assert shared.ask(logprobs=5, echo=True)["choices"][0]["logprobs"]["tokens"]
    assert shared.ask(prompt_logprobs=5)["choices"][0]["prompt_logprobs"]
    answer = shared.chat(logprobs=True, top_logprobs=20).json()
    assert answer["choices"][0]["logprobs"]["content"]
    assert in_loop == []


def test_an_error_that_is_not_the_client_s_fault_contains_nothing_about_the_server(
    shared: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def submit(request: object) -> None:
        raise ArtifactError("/srv/models/secret.pt2", "corrupt\n  frame #0: at::native", "ygg compile")

    monkeypatch.setattr(shared.service, "submit", submit)
    assert "secret" not in refused(shared.post(prompt="a"), 500)
    assert "secret" in caplog.text


def test_a_config_error_shows_only_the_beginning_of_a_large_value() -> None:
    for value in ("x" * 10**6, ["x" * 1000] * 1000, {index: index for index in range(10**5)}):
        assert len(str(ConfigError("field", value, "small"))) < 10_000
    path = "/a/path/of/a/usual/length/model.safetensors"
    assert repr(path) in str(ConfigError("file", path, "there"))


# ---- hosts


@pytest.mark.parametrize(("key", "status"), [("", 421), ("secret", 200)])
def test_a_host_name_of_another_site_is_refused_unless_a_key_is_required(key: str, status: int) -> None:
    names = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example")
    foreign = (*names, "evil.example:8000", "user@localhost", "[::1", "")
    addresses = ("127.0.0.1", "[::1]:8000", "192.168.1.7:80")
    own = (*addresses, "localhost:1", "LOCALHOST", socket.gethostname(), "gpu.example.org:443")
    with server(api_key=key, hosts=HostNames(["gpu.example.org"])) as running:
        authorization = {"Authorization": f"Bearer {key or None}"}
        for host in foreign:
            headers = {"Host": host, **authorization}
            assert running.get("/v1/models", headers=headers).status_code == status, host
            refused(running.get("/nothing/", headers=headers), 404 if key else 421)
        for host in own:
            headers = {"Host": host, **authorization}
            assert running.get("/v1/models", headers=headers).status_code == 200, host


# ---- connections


@contextmanager
def clients(running: Running, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent nothing."""
    port = httpx.URL(running.url).port
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            for _ in range(count)
        ]


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection before the socket's timeout; earlier data is read."""
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_a_connection_is_closed_if_headers_do_not_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with server(max_connections=50) as running, clients(running, 3) as (silent, slow, again):
        again.sendall(HEALTH)
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        for connection in (slow, again):
            connection.sendall(b"GET /health HTTP/1.1\r\n")
        start = time.monotonic()
        for place in range(4):
            time.sleep(0.1)
            try:
                slow.sendall(b"X-%d: 1\r\n" % place)
            except OSError:
                break
        assert all(map(is_closed, (silent, slow, again)))
        assert time.monotonic() - start < 4


def test_an_idle_connection_is_not_closed_earlier() -> None:
    with server(max_connections=50) as running:
        running.web.config.timeout_keep_alive = 0  # uvicorn's own limit, by default 5 s as in clients
        with closing(HTTPConnection(running.url.removeprefix("http://"), timeout=20)) as kept:
            for _ in range(3):
                kept.request("GET", "/health")  # raises an error if the server has closed the connection
                with kept.getresponse() as response:
                    assert response.read()
                time.sleep(0.1)


def test_a_long_request_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.1)
    with server(max_connections=50) as running:
        running.service.is_stuck = True
        threading.Timer(0.5, setattr, (running.service, "is_stuck", False)).start()
        assert running.ask(max_tokens=100)["choices"][0]["finish_reason"] == "stop"


def test_a_body_that_does_not_arrive_in_time_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
    with server(max_connections=50) as running, clients(running, 1) as (slow,):
        slow.sendall(head(100) + b"{")
        response = slow.recv(2000)
        assert response.startswith(b"HTTP/1.1 408")
        assert b"did not arrive" in response + slow.recv(2000)
        assert is_closed(slow)


def test_a_client_that_disconnects_within_its_body_is_not_a_500() -> None:
    with server() as running, clients(running, 1) as (connection,):
        connection.sendall(head(100) + b"{")
        eventually(lambda: running.get("/health").status_code == 200)
        connection.close()
        sample = running.serving.metrics.registry.get_sample_value
        eventually(lambda: sample("ygg_requests_refused_total", {"status": "499"}) == 1)
        assert sample("ygg_requests_refused_total", {"status": "500"}) is None


def test_the_bodies_of_all_requests_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_HELD_BYTES", 1000)
    with server() as running, clients(running, 1) as (holding,):
        holding.sendall(head(900) + b" " * 800)
        body = json.dumps({"prompt": "a", "user": "b" * 400}).encode()
        eventually(lambda: raw(running, body).status_code == 503)
        assert "too many large requests" in refused(raw(running, body), 503)
        holding.close()
        eventually(lambda: raw(running, body).status_code == 200)
        for _ in range(3):  # finished requests hold no bytes
            assert raw(running, body).status_code == 200


def test_a_client_that_reads_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
    with server(max_connections=50) as running, clients(running, 1) as (deaf,):
        served = running.web.server_state.connections
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        eventually(lambda: len(served) == 1)

        def is_gone() -> bool:
            with suppress(OSError):  # the buffers are full, or the connection has been reset
                for _ in range(1000):
                    deaf.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return not served

        eventually(is_gone, 20)


def test_the_oldest_idle_connections_beyond_the_limit_are_closed() -> None:
    with server(max_connections=5) as running, clients(running, 12) as idle:
        assert running.get("/health").status_code == 200
        assert all(map(is_closed, idle[:7]))
        idle[-1].sendall(HEALTH)
        assert idle[-1].recv(1000).startswith(b"HTTP/1.1 200")


def test_connections_that_are_kept_alive_count_as_idle() -> None:
    with server(max_connections=3) as running, clients(running, 3) as kept:
        for connection in kept:
            connection.sendall(HEALTH)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        for _ in range(3):
            assert running.get("/health").status_code == 200
        assert is_closed(kept[0])


def test_a_connection_beyond_the_limit_gets_a_503_if_all_others_are_busy() -> None:
    with server(max_connections=2) as running:
        running.service.is_stuck = True
        threads = [threading.Thread(target=lambda: running.ask(max_tokens=2)) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(running.service.live) == 2)
        response = running.get("/health")
        assert "too many connections" in refused(response, 503)
        assert response.headers["retry-after"]
        running.service.is_stuck = False
        for thread in threads:
            thread.join()
        assert running.get("/health").status_code == 200


def test_the_number_of_connections_is_limited_by_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        most = raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        assert 1 <= most <= connections.MAX_CONNECTIONS
        assert hard == resource.RLIM_INFINITY or most <= max(1, hard - connections.OWN_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_errors_of_accept_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    log_errors_rarely(loop)
    try:
        error = OSError(24, "Too many open files")
        for _ in range(100):
            context = {"message": "socket.accept() out of system resource", "exception": error}
            loop.call_exception_handler(context)
        assert [record.getMessage() for record in caplog.records] == [
            "no connection can be accepted now: Too many open files"
        ]
        loop.call_exception_handler({"message": "another", "exception": ValueError("a defect")})
        assert caplog.records[-1].levelno == logging.ERROR
    finally:
        loop.close()


def test_every_server_has_its_own_limit() -> None:
    assert (limited(3).max_connections, limited(4).max_connections) == (3, 4)
    assert limited(3).waiting is not limited(3).waiting
