"""`ygg serve` as a process: refusals, output, and its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from yggdrasil.bundle import Bundle
from yggdrasil.cli import main
from yggdrasil.cli.serve import _num_bytes
from yggdrasil.config import ServeConfig
from yggdrasil.offline import pipeline

Capture = pytest.CaptureFixture[str]


def refused(capture: Capture, *arguments: str) -> str:
    """The one line on standard error of a run that exits with 2 and prints nothing."""
    assert main(["serve", *arguments]) == 2
    out, err = capture.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--max-batch", "0"), "--max-batch: 0"),
        (("--gamma-max", "-1"), "--gamma-max: -1"),
        (("--max-queue", "0"), "--max-queue: 0"),
        (("--kv-memory", "0MiB"), "--kv-memory: 0"),
        (("--target", "a", "--draft", "b"), "--pair cannot be combined with --target and --draft"),
        (("--draft", "none"), "--draft: 'none' .*; ygg serve --policy off never drafts"),
        ((), "no compiled pair named 'nobody'"),
        (("--host", "256.0.0.1"), "--host: '256.0.0.1'"),
        (("--host", "\udcff"), "--host: "),
        (("--host", "a" * 300), "--host: 'aaa"),
        (("--port", "65536"), "--port: 65536"),
        (("--port", "-1"), "--port: -1"),
        (("--drain-seconds", "-1"), "--drain-seconds: -1.0"),
        (("--drain-seconds", "nan"), "--drain-seconds: nan"),
        (("--tau-low", "1.5"), "--tau-low: 1.5"),
        (
            ("--allow-host", "http://gpu.example.org"),
            "--allow-host: 'http://gpu.example.org' .* a name alone",
        ),
        (("--allow-host", "gpu.example.org:8000"), "--allow-host: 'gpu.example.org:8000' .* a name alone"),
        (("--allow-origin", "chat.example.org"), "--allow-origin: 'chat.example.org' .* scheme"),
        (("--allow-origin", "https://a.example/"), "--allow-origin: 'https://a.example/' .* scheme"),
        (("--tool-parser", "qwen"), "--tool-parser: 'qwen' .*hermes, llama3, mistral, json"),
        (("--tau-low", "0.2", "--no-elastic"), "--tau-low: 0.2 .*; ygg serve --no-elastic, or"),
    ],
    ids=str,
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], complaint: str, capsys: Capture
) -> None:
    assert re.search(complaint, refused(capsys, "--pair", "nobody", "--port", "0", *arguments))


def test_a_port_in_use_is_found_out_before_anything_is_loaded(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        line = refused(capsys, "--pair", "nobody", "--port", port)
    assert f"--port: {port} is not allowed; it must be a free port of 127.0.0.1" in line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--policy", "nightingale"), "--policy: 'nightingale' .*one of trees, nightjar, .*tiers:PATH"),
        (("--policy", "fixed-9"), "--policy: 'fixed-9'"),
        (("--policy", "tiers:nowhere.json"), "--policy: 'tiers:nowhere.json'"),
        (("--max-batch", "1000"), "--max-batch: 1000 .*at most 64"),
        (("--gamma-max", "1000"), "--gamma-max: 1000 .*at most"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_before_anything_is_compiled(
    arguments: tuple[str, ...],
    complaint: str,
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    monkeypatch.setattr(pipeline, "compile_pair", lambda *args, **kwargs: pytest.fail("compiles"))
    assert re.search(complaint, refused(capsys, "--port", "0", *arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ("fastapi", "uvicorn", "prometheus_client", "jinja2"))
def test_a_missing_package_names_the_command_that_installs_it(
    package: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = refused(capsys)
    assert f"{package} is not installed, but serving needs it" in line
    assert "pip install 'yggdrasil-decoding[serve]'" in line


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("1024", 1024), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2gb", 2 * 10**9)]
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    assert _num_bytes(text) == num_bytes


@pytest.mark.parametrize("size", ("much", "1e9", "-1", "9" * 400))
def test_a_size_that_is_none_is_refused(size: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"--kv-memory={size}"])
    assert ended.value.code == 2
    assert f"'{size}' is not a size; write 512MiB" in capsys.readouterr().err


def test_help_shows_the_defaults_of_the_config_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from yggdrasil.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "finally: assert not {'torch', 'fastapi', 'uvicorn', 'pydantic', 'jinja2'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    defaults = ServeConfig()
    for value in (
        defaults.policy,
        defaults.max_queue,
        defaults.host,
        defaults.port,
        defaults.drain_seconds,
    ):
        assert f"default: {value})" in " ".join(done.stdout.split())


@contextmanager
def served(
    *arguments: str,
    environment: dict[str, str] | None = None,
    before: Sequence[str] = (),
    quiet: Sequence[str] = ("--quiet",),
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process on the tiny pair, and its address."""
    command = [
        *before,
        sys.executable,
        "-W",
        "error",
        "-m",
        "yggdrasil",
        "serve",
        "--pair",
        "tiny",
        "--port",
        "0",
        *quiet,
        *arguments,
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            found = re.fullmatch(r"serving (\S+) on (http://127\.0\.0\.1:\d+)\n", line)
            assert found is not None, line + process.stderr.read()
            facts = process.stderr.readline() + process.stderr.readline()
            assert "chat template: none" in facts
            assert ("; no page\n" if "--no-page" in arguments else "; a page for browsers at /\n") in facts
            assert re.search(r"context \d+ tokens, \d+ KV pages of 16, at most \d+ at once, ", facts)
            assert re.search(r" \d+ threads?, policy \S+\n$", facts)
            assert process.stderr.readline().startswith(f"  curl {found[2]}/v1/completions")
            yield process, found[2]
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code, and what else was printed."""
    out, err = process.communicate(timeout=30)
    return process.returncode, out + err


@pytest.mark.usefixtures("tiny_bundle")
@pytest.mark.parametrize(("arguments", "status"), (((), 200), (("--no-page",), 404)), ids=str)
def test_the_page_is_there_unless_it_is_turned_off(arguments: tuple[str, ...], status: int) -> None:
    with served("--max-batch", "2", *arguments) as (_, url):
        assert httpx.get(f"{url}/").status_code == httpx.get(f"{url}/page/app.js").status_code == status


UNFINISHED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n"
)


def is_taking_requests(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.usefixtures("tiny_bundle")
class TestServer:
    """On the compiled pair."""

    @pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
    def test_it_serves_and_a_signal_lets_a_running_stream_finish(self, number: signal.Signals) -> None:
        with served("--max-batch", "2", "--model-name", "mine") as (process, url):
            fields = {
                "model": "mine",
                "prompt": "Once upon a time",
                "max_tokens": 200,
                "temperature": 0,
                "ignore_eos": True,
            }
            whole = httpx.post(f"{url}/v1/completions", json=fields, timeout=60).json()
            assert whole["usage"]["completion_tokens"] == 200
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**fields, "stream": True}, timeout=60
            ) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(number)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert ended(process) == (0, "")

    def test_the_key_comes_from_the_environment(self) -> None:
        with served("--max-batch", "2", environment={"YGG_API_KEY": "secret"}) as (process, url):
            assert httpx.get(f"{url}/v1/models").status_code == 401
            info = httpx.get(f"{url}/server_info", headers={"Authorization": "Bearer secret"}).json()
            assert {
                "speculative_num_steps",
                "avg_spec_accept_length",
                "policy",
                "policy_state",
                "free_pages",
            } <= info["internal_states"][0].keys()
            process.send_signal(signal.SIGTERM)
            assert ended(process) == (0, "")

    def test_every_response_has_a_line_on_standard_error_unless_it_is_quiet(self) -> None:
        for arguments, count in (((), 2), (("--quiet",), 0)):
            with served("--max-batch", "2", *arguments, quiet=()) as (process, url):
                httpx.get(f"{url}/nowhere", headers={"X-Request-Id": "mine"})
                fields = {"prompt": "Once upon", "max_tokens": 3, "ignore_eos": True}
                httpx.post(f"{url}/v1/completions", json=fields, timeout=60)
                process.send_signal(signal.SIGTERM)
                code, printed = ended(process)
            assert code == 0
            lines = printed.splitlines()
            assert len(lines) == count
            if lines:
                assert re.search(r" GET /nowhere 404 \S+ ms mine$", lines[0])
                assert re.search(r" POST /v1/completions 200 \S+ ms \d+\+3 tokens \w{32}$", lines[1])

    def test_requests_go_on_if_nothing_reads_the_log(self) -> None:
        with served("--max-batch", "2", quiet=()) as (process, url):
            assert process.stderr is not None
            process.stderr.close()
            for _ in range(3):
                assert httpx.get(f"{url}/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0

    def test_openai_s_client_reads_a_text_with_the_log_probabilities_of_its_generation(self) -> None:
        def ask(path: str, **fields: Any) -> dict[str, Any]:
            answer: dict[str, Any] = httpx.post(url + path, json=fields).json()
            return answer

        with (
            served("--max-batch", "2") as (process, url),
            openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60) as client,
        ):
            fields = {"model": "tiny", "temperature": 0, "logprobs": 3, "extra_body": {"ignore_eos": True}}
            written = client.completions.create(prompt="Once upon a time", max_tokens=40, **fields)
            timings = written.model_dump()["timings"]
            assert 0 < timings["first_token_ms"] <= timings["total_ms"]
            assert timings["tokens_per_pass"] == round(40 / written.usage.target_passes, 4)
            tokens = ask("/tokenize", prompt="Once upon a time" + written.choices[0].text)["tokens"]
            text = ask("/detokenize", tokens=tokens)["prompt"]
            assert text == "Once upon a time" + written.choices[0].text
            read = client.completions.create(prompt=text, max_tokens=0, echo=True, **fields)
            assert (read.choices[0].text, read.usage.completion_tokens) == (text, 0)
            tops = read.choices[0].logprobs.top_logprobs
            assert (tops[0], len(tops)) == (None, len(tokens))
            for place in range(1, len(tokens)):
                after = client.completions.create(prompt=tokens[:place], max_tokens=1, **fields)
                assert after.choices[0].logprobs.top_logprobs[0].items() <= tops[place].items()
            metrics = httpx.get(f"{url}/metrics").text
            assert re.search(r"^vllm:spec_decode_num_draft_tokens_total \d", metrics, flags=re.MULTILINE)
            process.send_signal(signal.SIGTERM)
            assert ended(process) == (0, "")

    def test_a_pool_smaller_than_the_context_serves_what_it_holds(self, tiny_bundle: Bundle) -> None:
        with served("--max-batch", "2", "--kv-memory", str(4 * tiny_bundle.page_bytes)) as (process, url):
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 64
            fields = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
            usage = httpx.post(f"{url}/v1/chat/completions", json=fields, timeout=60).json()["usage"]
            assert usage["total_tokens"] == 64  # no max_tokens: as many as there is room for
            process.send_signal(signal.SIGTERM)
            assert ended(process) == (0, "")

    def test_requests_that_take_too_long_are_ended(self) -> None:
        with served("--max-batch", "2", "--drain-seconds", "0") as (process, url):
            fields = {"prompt": "Once upon a time", "max_tokens": 240, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            # it may have been done just then
            assert rest[-1] == "data: [DONE]" or "shutting down" in rest[-1]
            assert ended(process)[0] == 0

    @pytest.mark.parametrize(
        "numbers",
        [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)],
    )
    def test_a_second_signal_ends_it_at_once_in_a_line(
        self, numbers: tuple[signal.Signals, signal.Signals]
    ) -> None:
        with (
            served("--max-batch", "2") as (process, url),
            socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as unfinished,
        ):
            unfinished.sendall(UNFINISHED)  # which the first signal waits for
            assert unfinished.recv(1000).startswith(b"HTTP/1.1 100")
            process.send_signal(numbers[0])
            while is_taking_requests(url):
                time.sleep(0.01)
            process.send_signal(numbers[1])
            assert ended(process) == (
                128 + numbers[1],
                "ygg serve: ended at once; requests that were running are lost\n",
            )

    def test_idle_connections_on_all_descriptors_do_not_stop_requests(self, tiny_bundle: Bundle) -> None:
        limit = 'ulimit -n 400 && exec "$@"'
        with served("--max-batch", "2", before=("bash", "-c", limit, "bash")) as (process, url):
            port = httpx.URL(url).port
            with ExitStack() as stack:
                for _ in range(600):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                start = time.monotonic()
                assert httpx.get(f"{url}/health", timeout=20).json() == {"status": "ok"}
                assert time.monotonic() - start < 5
                assert (
                    httpx.post(
                        f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 3}, timeout=60
                    ).status_code
                    == 200
                )
            process.send_signal(signal.SIGTERM)
            assert ended(process) == (0, "")

    def test_a_name_of_another_site_is_refused_and_allow_host_adds_one(self) -> None:
        with served(
            "--max-batch", "2", "--allow-host", "gpu.example.org", "--allow-host", "other.example.org"
        ) as (process, url):
            for host, status in (
                ("evil.example", 421),
                ("gpu.example.org", 200),
                ("other.example.org:80", 200),
                ("localhost:1", 200),
            ):
                assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == status
            process.send_signal(signal.SIGTERM)
            assert ended(process) == (0, "")
