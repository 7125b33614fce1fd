"""Request ids, the access log, and web pages of other origins."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from test_api import Running, eventually, server

from yggdrasil.serve.access import GONE
from yggdrasil.serve.request import Request

LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) (?P<method>\S+) (?P<path>\S+) (?P<status>\d{3}) "
    r"(?P<ms>\d+\.\d) ms(?: (?P<tokens>\d+\+\d+) tokens)? (?P<id>\S+)"
)
PAGE = "https://chat.example.org"


def parsed(line: str) -> dict[str, str]:
    found = LINE.fullmatch(line)
    assert found is not None, line
    return found.groupdict()


def test_a_short_word_is_kept_as_the_request_s_id_and_anything_else_gets_a_new_one() -> None:
    with server() as running:
        for given, is_kept in (("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)):
            number = running.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"]
            assert (number == given) is is_kept
            assert is_kept or re.fullmatch(r"[0-9a-f]{32}", number)
        made = {running.get("/health").headers["x-request-id"] for _ in range(3)}
        assert len(made) == 3


@pytest.mark.parametrize("stream", (True, False))
def test_a_line_has_method_path_status_time_tokens_and_the_id_of_the_response(stream: bool) -> None:
    lines: list[str] = []
    with server(log=lines.append) as running:
        fields = {"prompt": [[5, 6, 7], [8]], "max_tokens": 4, "n": 2, "stream": stream}
        response = running.post(**fields)
        assert response.status_code == 200
        eventually(lambda: lines)
    [line] = map(parsed, lines)
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", "200")
    assert line["tokens"] == "4+16"
    assert line["id"] == response.headers["x-request-id"]
    assert float(line["ms"]) > 0


def test_refusals_and_defects_have_an_id_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def submit(request: Request) -> None:
        raise ZeroDivisionError

    with server(api_key="secret", log=lines.append) as running:
        monkeypatch.setattr(running.service, "submit", submit)
        key = {"Authorization": "Bearer secret"}
        responses = [
            running.get("/v1/models"),
            running.get("/nowhere", headers=key),
            httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"}, headers=key),
        ]
        eventually(lambda: len(lines) == 3)
    seen = [(line["status"], line["id"]) for line in map(parsed, lines)]
    assert seen == [(str(response.status_code), response.headers["x-request-id"]) for response in responses]
    assert [status for status, _ in seen] == ["401", "404", "500"]


def test_a_client_that_leaves_before_the_response_is_logged_as_gone() -> None:
    lines: list[str] = []
    with server(log=lines.append) as running:
        running.service.is_stuck = True
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"}, timeout=0.2)
        eventually(lambda: lines)
    assert parsed(lines[0])["status"] == str(GONE)


def test_a_path_cannot_write_a_line_of_its_own() -> None:
    lines: list[str] = []
    with server(log=lines.append) as running:
        port = urlsplit(running.url).port
        for target in (b"/a%0a2026-01-01", b"/\x1b[2J", b"/" + b"a" * 5000):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
                client.recv(1000)
        assert running.get("/health?key=secret").status_code == 200
        eventually(lambda: lines and "/health" in lines[-1])
    shown = [parsed(line)["path"] for line in lines]
    assert "/a%0a2026-01-01" in shown
    assert shown[-1] == "/health"
    assert max(map(len, shown)) < 300


def test_without_permission_no_page_may_read_an_answer() -> None:
    with server() as running:
        assert "access-control-allow-origin" not in running.get("/health", headers={"Origin": PAGE}).headers


def preflight(running: Running, origin: str) -> httpx.Response:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return httpx.options(f"{running.url}/v1/completions", headers=asked)


def test_pages_of_an_allowed_origin_may_ask_without_the_key_and_read_answers_and_refusals() -> None:
    with server(api_key="secret", allow_origins=(PAGE, "http://localhost:3000")) as running:
        assert preflight(running, "https://evil.example").status_code == 400
        for origin in (PAGE, "http://localhost:3000"):
            allowed = preflight(running, origin)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == origin
            assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
            refused = running.get("/v1/models", headers={"Origin": origin})
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
            assert "X-Request-Id" in refused.headers["access-control-expose-headers"]
        other = running.get("/health", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
    with server(allow_origins=("*",)) as running:
        assert (
            running.get("/health", headers={"Origin": PAGE}).headers["access-control-allow-origin"] == "*"
        )


def test_pages_read_streams_of_an_allowed_origin() -> None:
    with server(allow_origins=(PAGE,)) as running:
        response = httpx.post(
            f"{running.url}/v1/completions", json={"prompt": "a", "stream": True}, headers={"Origin": PAGE}
        )
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.text.rstrip().endswith("[DONE]")
