"""What a client can send or leave out to hurt the others: every one of these costs it a line, and them
nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import pytest
from test_api import CONTEXT, VOCAB, Running, eventually, server

from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.serve import connections, middleware
from yggdrasil.serve.body import MAX_BODY_BYTES, MAX_VALUES
from yggdrasil.serve.connections import limited, log_errors_rarely, raise_descriptor_limit
from yggdrasil.serve.hosts import HostNames
from yggdrasil.serve.openai import ApiError
from yggdrasil.serve.prompts import PREFIX_CHARS, PromptEncoder

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with server() as running:
        yield running


def raw(running: Running, body: bytes, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    return httpx.post(running.url + path, content=body, headers={**JSON, **headers}, timeout=30)


def refused(response: httpx.Response, status: int = 400) -> str:
    """The message: one short line that is UTF-8."""
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
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(
    shared: Running, body: bytes, complaint: str
) -> None:
    assert len(body) <= MAX_BODY_BYTES
    start = time.perf_counter()
    message = refused(raw(shared, body))
    assert time.perf_counter() - start < 5  # parsing some of these takes longer
    assert "more than" in message
    assert any(kind in message for kind in complaint.split("|"))


def test_text_full_of_brackets_and_commas_is_no_list(shared: Running) -> None:
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
        (b"", "no JSON"),
        (b'"prompt"', "must be a JSON object"),
    ],
    ids=["bytes", "UTF-16", "digits", "deep", "two", "empty", "a text"],
)
def test_a_body_that_cannot_be_read_says_why(shared: Running, body: bytes, complaint: str) -> None:
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
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_no_value_is_a_500_and_none_comes_back_in_full(shared: Running, fields: dict[str, Any]) -> None:
    before = len(shared.service.submitted)
    body = json.dumps({"prompt": "Once", **fields}).encode()
    refused(raw(shared, body))
    assert len(shared.service.submitted) == before


def test_a_length_of_very_many_digits_is_no_500(shared: Running) -> None:
    with clients(shared, 1) as (connection,):
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            + b"9" * 5000
            + b"\r\n\r\n"
        )
        assert connection.recv(2000).split()[1] in (b"400", b"413")


def test_a_model_s_name_of_a_megabyte_does_not_come_back(shared: Running) -> None:
    assert "there is no model 'xxx" in refused(
        raw(shared, json.dumps({"model": "x" * 1_000_000, "prompt": "a"}).encode()), 404
    )
    refused(httpx.get(f"{shared.url}/v1/models/{'x' * 20_000}"), 404)
    refused(httpx.get(f"{shared.url}/{'x' * 20_000}"), 404)


@pytest.mark.parametrize("half", ("\ud800", "a\udfff", "🦊\ud83e"))
def test_half_of_a_surrogate_pair_is_a_400(shared: Running, half: str) -> None:
    for field, path, fields in (
        ("prompt", "/v1/completions", {"prompt": half}),
        ("prompt", "/v1/completions", {"prompt": ["a", half]}),
        ("stop", "/v1/completions", {"prompt": "a", "stop": half}),
        ("messages", "/v1/chat/completions", {"messages": [{"role": "user", "content": half}]}),
        (
            "messages",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": half}]}]},
        ),
    ):
        message = refused(raw(shared, json.dumps(fields).encode(), path))
        assert message.startswith(f"{field}: \\ud")
    refused(raw(shared, json.dumps({"model": half, "prompt": "a"}).encode()), 404)
    assert shared.ask(prompt="🦊")["choices"]  # escaped as a pair


def test_tiny_temperatures_are_taken(shared: Running) -> None:
    for temperature in (1e-38, 5e-324, 0.0):
        shared.ask(temperature=temperature)
        assert shared.service.submitted[-1].config.sampling.temperature == temperature


def test_a_text_that_cannot_fit_is_found_out_from_its_beginning(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = shared.service.tokenizer
    encoded: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **options: encoded.append(len(text)) or encode(text, **options)
    )
    for text in ("Once upon a time. " * 100_000, "x" * 1_000_000, "é🦊" * 100_000):
        encoded.clear()
        assert "shorten it" in refused(shared.post(prompt=text))
        assert sum(encoded) <= 3 * PREFIX_CHARS * CONTEXT
    assert shared.post(prompt=["a"] * 9).json()["error"]["param"] == "n"
    assert encoded[-1] != 1  # counted before anything is encoded


def test_a_long_text_of_few_tokens_fits(shared: Running) -> None:
    class Sparse:
        """A tokenizer with a token for any run of blanks."""

        def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
            return [1] * len(text.split()) or [0]

    encoder = PromptEncoder(Sparse(), shared.serving.template, CONTEXT, VOCAB)  # type: ignore[arg-type]
    text = " " * 1_000_000 + "a b c"
    assert encoder.encode(text, "prompt") == [1, 1, 1]
    assert len(encoder.encode("a " * CONTEXT, "prompt")) == CONTEXT
    with pytest.raises(ApiError, match="shorten it"):
        encoder.encode(" " * 100_000 + "a " * 100_000, "prompt")


def test_a_token_of_the_tokenizer_that_the_models_lack_is_a_400() -> None:
    with server(vocab=300) as running:
        text = next(
            text
            for text in ("Once upon a time", "fox")
            if max(running.service.tokenizer.encode(text)) >= 300
        )
        for fields in ({"prompt": text}, {"prompt": [300]}, {"prompt": [[5], [10**6]]}):
            assert "ids go from 0 to 299" in refused(running.post(**fields))


def test_others_are_answered_while_a_large_prompt_is_refused(shared: Running) -> None:
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
    assert slowest < 1.0  # of a busy machine; without the limit it took 17 s


def test_errors_that_are_no_client_s_fault_say_nothing_of_the_server(
    shared: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def submit(request: object) -> None:
        raise ArtifactError("/srv/models/secret.pt2", "corrupt\n  frame #0: at::native", "ygg compile")

    monkeypatch.setattr(shared.service, "submit", submit)
    assert "secret" not in refused(shared.post(prompt="a"), 500)
    assert "secret" in caplog.text


def test_a_config_error_shows_the_beginning_of_a_large_value() -> None:
    for value in ("x" * 10**6, ["x" * 1000] * 1000, {index: index for index in range(10**5)}):
        assert len(str(ConfigError("field", value, "small"))) < 10_000
    assert "'/a/path/of/a/usual/length/model.safetensors'" in str(
        ConfigError("file", "/a/path/of/a/usual/length/model.safetensors", "there")
    )


# ---- hosts


@pytest.mark.parametrize(("key", "status"), [("", 421), ("secret", 200)])
def test_a_name_of_another_site_is_refused_unless_a_key_is_asked_for(key: str, status: int) -> None:
    with server(api_key=key, hosts=HostNames(["gpu.example.org"])) as running:
        authorization = {"Authorization": f"Bearer {key or None}"}
        for host in (
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "user@localhost",
            "[::1",
            "",
        ):
            response = httpx.get(f"{running.url}/v1/models", headers={"Host": host, **authorization})
            assert response.status_code == status, host
            refused(
                httpx.get(f"{running.url}/nothing/", headers={"Host": host, **authorization}),
                404 if key else 421,
            )
        for host in (
            "localhost:1",
            "LOCALHOST",
            "127.0.0.1",
            "[::1]:8000",
            "192.168.1.7:80",
            socket.gethostname(),
            "gpu.example.org:443",
        ):
            assert (
                httpx.get(f"{running.url}/v1/models", headers={"Host": host, **authorization}).status_code
                == 200
            ), host


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
    """Whether the server ends it while this socket's patience lasts; what came before is read."""
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_headers_that_do_not_come_in_time_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with server(most_connections=50) as running, clients(running, 3) as (silent, slow, again):
        again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
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
        assert time.monotonic() - start < 4  # uvicorn's own limit for an idle connection is 5 s


def test_a_request_that_takes_long_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.1)
    with server(most_connections=50) as running:
        running.service.is_stuck = True
        threading.Timer(0.5, setattr, (running.service, "is_stuck", False)).start()
        assert running.ask(max_tokens=100)["choices"][0]["finish_reason"] == "stop"


def test_a_body_that_does_not_come_in_time_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
    with server(most_connections=50) as running, clients(running, 1) as (slow,):
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        answer = slow.recv(2000)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"did not come" in answer + slow.recv(2000)
        assert is_closed(slow)


def test_a_client_that_goes_within_its_body_is_no_defect() -> None:
    with server() as running, clients(running, 1) as (going,):
        going.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        eventually(lambda: httpx.get(f"{running.url}/health").status_code == 200)
        going.close()
        sample = running.serving.metrics.registry.get_sample_value
        eventually(lambda: sample("ygg_requests_refused_total", {"status": "499"}) == 1)
        assert sample("ygg_requests_refused_total", {"status": "500"}) is None


def test_the_bodies_of_all_requests_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_HELD_BYTES", 1000)
    with server() as running, clients(running, 1) as (holding,):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
        holding.sendall(head + b" " * 800)
        body = json.dumps({"prompt": "a", "user": "b" * 400}).encode()
        eventually(lambda: raw(running, body).status_code == 503)
        assert "too many large requests" in refused(raw(running, body), 503)
        holding.close()
        eventually(lambda: raw(running, body).status_code == 200)
        for _ in range(3):  # nothing is kept of requests that have ended
            assert raw(running, body).status_code == 200


def test_a_client_that_reads_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
    with server(most_connections=50) as running, clients(running, 1) as (deaf,):
        served = running.web.server_state.connections
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        eventually(lambda: len(served) == 1)

        def is_gone() -> bool:
            with suppress(OSError):  # no room in the buffers, or the connection has been reset
                for _ in range(1000):
                    deaf.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return not served

        eventually(is_gone, 20)


def test_idle_connections_beyond_the_limit_go_the_oldest_first() -> None:
    with server(most_connections=5) as running, clients(running, 12) as idle:
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert all(map(is_closed, idle[:7]))
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle[-1].recv(1000).startswith(b"HTTP/1.1 200")


def test_connections_that_are_kept_alive_go_too() -> None:
    with server(most_connections=3) as running, clients(running, 3) as kept:
        for connection in kept:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        for _ in range(3):
            assert httpx.get(f"{running.url}/health").status_code == 200
        assert is_closed(kept[0])


def test_a_connection_beyond_those_that_are_served_gets_a_503() -> None:
    with server(most_connections=2) as running:
        running.service.is_stuck = True
        threads = [threading.Thread(target=lambda: running.ask(max_tokens=2)) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(running.service.live) == 2)
        response = httpx.get(f"{running.url}/health")
        assert "too many connections" in refused(response, 503)
        assert response.headers["retry-after"]
        running.service.is_stuck = False
        for thread in threads:
            thread.join()
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_descriptors_bound_the_connections() -> None:
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
        for _ in range(100):
            loop.call_exception_handler(
                {
                    "message": "socket.accept() out of system resource",
                    "exception": OSError(24, "Too many open files"),
                }
            )
        assert [record.getMessage() for record in caplog.records] == [
            "no connection can be accepted now: Too many open files"
        ]
        loop.call_exception_handler({"message": "another", "exception": ValueError("a defect")})
        assert caplog.records[-1].levelno == logging.ERROR
    finally:
        loop.close()


def test_the_limit_of_one_server_is_not_another_s() -> None:
    assert (limited(3).most, limited(4).most) == (3, 4)
    assert limited(3).waiting is not limited(3).waiting
