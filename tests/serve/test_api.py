"""The HTTP layer over a service without models: replies, refusals, and the cancellation of all rows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_pair
import uvicorn

import yggdrasil
from yggdrasil.bundle import bundled_models
from yggdrasil.config import GenerateConfig, GrammarConfig, SamplingConfig
from yggdrasil.errors import ConfigError, QueueFull, ServiceEnded
from yggdrasil.serve.api import create_app
from yggdrasil.serve.body import MAX_BODY_BYTES
from yggdrasil.serve.chat import ChatTemplate, load_chat_template
from yggdrasil.serve.connections import limited
from yggdrasil.serve.metrics import Metrics
from yggdrasil.serve.neutral import NEUTRAL
from yggdrasil.serve.openai import ChatRequest, CompletionRequest, WireRequest
from yggdrasil.serve.replies import CompletionReply
from yggdrasil.serve.request import Event, Request, RequestReport, StepTree, TokenLogProb
from yggdrasil.serve.serving import Serving
from yggdrasil.serve.wire import ApiError
from yggdrasil.text.tokenizer import TextStream, Tokenizer

STORY = " there was a café ☕ by the sea, and the fox drank 🦊 tea with the crow. The end."
REPORT = RequestReport(
    finish="stop",
    prompt_tokens=4,
    emitted_tokens=0,
    shared_tokens=2,
    target_passes=2,
    preemptions=0,
    queue_ms=1.0,
    ttft_ms=20.0,
    total_ms=120.0,
)
CONTEXT = 128
VOCAB = 4096


def call(arguments: str) -> dict[str, Any]:
    """A call of a tool in a message of the assistant."""
    return {"id": "a", "type": "function", "function": {"name": "sum", "arguments": arguments}}


@dataclass(eq=False)
class Ticket:
    """A row of the fake."""

    request: Request
    tokens: list[int]
    stream: TextStream
    emitted: int = 0


@dataclass(eq=False)
class FakeService:
    """Emits the same story for every request, two tokens per step, in its own thread.

    Attributes:
        is_stuck: No tokens are emitted.
        is_full: No requests are queued.
        speculates: What `set_speculation` has set.
        pauses_after: No tokens are emitted after this many of a row.
        fails_after: A row ends with an error after this many tokens.
        story: What it writes.
        submitted: All requests.
        cancelled: Number of rows that were cancelled before their end.
    """

    tokenizer: Tokenizer
    is_stuck: bool = False
    is_full: bool = False
    is_healthy: bool = True
    speculates: bool = True
    pauses_after: int | None = None
    fails_after: int | None = None
    story: str = STORY
    submitted: list[Request] = field(default_factory=list)
    prepared: list[GrammarConfig] = field(default_factory=list)
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.live: list[Ticket] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def knows(self, grammar: GrammarConfig) -> bool:
        return False

    def prepare(self, grammar: GrammarConfig) -> None:
        self.prepared.append(grammar)

    def check(self, grammar: GrammarConfig) -> None:
        raise AssertionError("a grammar that was not refused needs no check")

    def submit(self, request: Request) -> Ticket:
        if self.is_full:
            raise QueueFull(4, 2.5)
        ticket = Ticket(
            request,
            self.tokenizer.encode(self.story),
            TextStream(self.tokenizer, request.config.stop, request.prompt),
        )
        with self._lock:
            self.submitted.append(request)
            self.live.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket in self.live:
                self.live.remove(ticket)
                self.cancelled += 1
                ticket.request.on_event(Event("", (), finish="cancelled"))

    def set_speculation(self, enabled: bool) -> None:
        self.speculates = enabled

    def info(self) -> dict[str, Any]:
        return {
            "speculation": self.speculates,
            "policy": "nightjar",
            "policy_state": {"block": 3},
            "speculative_num_steps": 3,
            "avg_spec_accept_length": 1.5,
            "running": len(self.live),
            "max_context": CONTEXT,
        }

    def _run(self) -> None:
        while not self._stopped.wait(0.001):
            with self._lock:
                for ticket in [] if self.is_stuck else list(self.live):
                    self._step(ticket)

    def _step(self, ticket: Ticket) -> None:
        config = ticket.request.config
        start = ticket.emitted
        if self.pauses_after is not None and start >= self.pauses_after:
            return
        assert config.max_new_tokens is not None
        end = min(start + 2, len(ticket.tokens), config.max_new_tokens)
        text = ticket.stream.push(ticket.tokens[start:end])
        finish = None
        error = ""
        ticket.emitted = ticket.stream.num_tokens
        tokens = ticket.tokens[start : ticket.emitted]
        if self.fails_after is not None and end >= self.fails_after:
            finish = "error"
            error = "the grammar was lost"
        elif ticket.stream.stopped or end == len(ticket.tokens):
            finish = "stop"
        elif end == config.max_new_tokens:
            finish = "length"
        if finish:
            text += ticket.stream.finish()
            self.live.remove(ticket)
        first = () if start else self._prompt_log_probs(ticket)
        report = replace(REPORT, finish=finish, emitted_tokens=ticket.emitted) if finish else None
        ticket.request.on_event(
            Event(
                text,
                tokens,
                self._log_probs(ticket, tokens),
                finish,
                error,
                report,
                first,
                self._tree(ticket, start),
            )
        )

    def _tree(self, ticket: Ticket, start: int) -> StepTree | None:
        """A chain of all emitted tokens but the last, and a rejected sibling of the first of them."""
        emitted = ticket.tokens[start : ticket.emitted]
        if not ticket.request.trees or not emitted:
            return None
        root = ticket.tokens[start - 1] if start else ticket.request.prompt[-1]
        chain = emitted[:-1]
        path = range(1 + len(chain))
        return StepTree(
            shape="W=2 D=2 K=auto",
            drafted=5,
            tokens=[root, *chain, 5],
            parents=[-1, *path[:-1], 0],
            log_probs=[0.0, *(-0.5 * node for node in path[1:]), -2.0],
            path=list(path),
            ms=1.5,
        )

    def _prompt_log_probs(self, ticket: Ticket) -> list[TokenLogProb]:
        num_top = ticket.request.prompt_top
        if num_top is None:
            return []
        tops = [(place, -1.0 - place) for place in range(num_top)]
        return [TokenLogProb(token, -0.25, tuple(tops), 7) for token in ticket.request.prompt[1:]]

    def _log_probs(self, ticket: Ticket, tokens: Sequence[int]) -> list[TokenLogProb]:
        num_top = ticket.request.num_top
        if num_top is None:
            return []
        return [
            TokenLogProb(token, -0.5, tuple((token + place, -0.5 - place) for place in range(num_top)))
            for token in tokens
        ]


@dataclass
class Running:
    """A server on a free port."""

    url: str
    service: FakeService
    serving: Serving
    web: uvicorn.Server

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=fields, timeout=10)

    def ask(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        response = self.post(**{"prompt": "Once upon a time", **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chat(self, **fields: Any) -> httpx.Response:
        """A chat completion, by default of one short message."""
        messages = [{"role": "user", "content": "Hi"}]
        return self.post("/v1/chat/completions", **{"messages": messages, **fields})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, **options)


@contextmanager
def server(max_connections: int = 100, **options: Any) -> Iterator[Running]:
    """A real server with a fake service; asserts at the end that no row is left."""
    tokenizer = Tokenizer(bundled_models()[0] / "tokenizer.json", "ygg compile")
    service = FakeService(tokenizer)
    metrics = Metrics(token_bytes=1024, gamma_max=7)
    parts = {"service": service, "tokenizer": tokenizer, "template": ChatTemplate(), "metrics": metrics}
    limits = {"model": "tiny", "max_context": CONTEXT, "vocab": VOCAB, "max_rows": 8}
    serving = Serving(**{**parts, **limits, **options})
    config = uvicorn.Config(
        create_app(serving),
        http=limited(max_connections),
        port=0,
        log_level="critical",
        lifespan="off",
        ws="none",
    )
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    eventually(lambda: web.started)
    port = web.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", service, serving, web)
    finally:
        web.should_exit = True
        thread.join()
        service.stop()
    assert service.live == []


def eventually(condition: Any, seconds: float = 5.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)


def events(response: httpx.Response) -> list[Any]:
    """The JSON objects of a stream, and "[DONE]"."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with server() as running:
        yield running


def test_a_completion_has_text_reason_and_usage(shared: Running) -> None:
    answer = shared.ask(max_tokens=100)
    num_tokens = len(shared.service.tokenizer.encode(STORY))
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": STORY, "logprobs": None, "finish_reason": "stop"}]
    prompt_tokens = len(shared.service.tokenizer.encode("Once upon a time"))
    passes = (num_tokens + 1) // 2
    expected = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": prompt_tokens + num_tokens,
        "target_passes": passes,
    }
    assert answer["usage"] == expected


@pytest.mark.parametrize("stream", (False, True))
def test_timings_are_those_of_the_slowest_choice_and_have_the_tokens_per_pass(
    shared: Running, stream: bool
) -> None:
    fields: dict[str, Any] = {"prompt": "a", "n": 2, "max_tokens": 11}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = events(shared.post(**fields))[-2]
    else:
        answer = shared.ask(**fields)
    assert answer["usage"]["completion_tokens"] == 22
    assert answer["timings"] == {
        "queue_ms": 1.0,
        "first_token_ms": 20.0,
        "total_ms": 120.0,
        "tokens_per_second": 200.0,  # twice ten tokens after the first ones, in 100 ms
        "tokens_per_pass": round(22 / 12, 4),
        "shared_tokens": 4,
    }


def test_the_default_length_is_openai_s_limited_by_the_context(shared: Running) -> None:
    assert shared.ask()["usage"]["completion_tokens"] == 16
    assert shared.ask(prompt=[5] * (CONTEXT - 3))["usage"]["completion_tokens"] == 3
    shared.chat()
    request = shared.service.submitted[-1]
    assert request.config.max_new_tokens == CONTEXT - len(request.prompt)


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("a fox", 1), (["a fox", "a crow"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
    ids=["text", "texts", "tokens", "token lists"],
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_either(
    shared: Running, prompt: Any, num_prompts: int
) -> None:
    answer = shared.ask(prompt=prompt, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
    submitted = [list(request.prompt) for request in shared.service.submitted[-2 * num_prompts :]]
    assert submitted[::2] == submitted[1::2]
    if not isinstance(prompt, str) and isinstance(prompt[-1], list):
        assert submitted[::2] == prompt


def test_every_choice_has_its_own_seed_which_follows_from_a_given_one(shared: Running) -> None:
    def seeds(**fields: Any) -> list[int]:
        shared.ask(**fields)
        return [request.config.sampling.seed for request in shared.service.submitted[-4:]]

    assert seeds(prompt=["a", "b"], n=2, seed=7) == [7, 8, 7, 8]
    assert seeds(n=4, seed=2**63 - 2) == [2**63 - 2, 2**63 - 1, 0, 1]
    assert len({*seeds(n=4), *seeds(n=4)}) == 8


def test_every_sampling_field_reaches_the_service(shared: Running) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 3}
    shared.ask(**fields, stop=["fox", "crow"], max_tokens=5, ignore_eos=True, logprobs=2)
    request = shared.service.submitted[-1]
    expected = GenerateConfig(
        max_new_tokens=5,
        stop=("fox", "crow"),
        ignore_eos=True,
        sampling=SamplingConfig(**fields),  # type: ignore[arg-type]
    )
    assert request.config == expected
    assert request.num_top == 2


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": None, "stop": None, "seed": None, "n": None}], ids=["absent", "null"]
)
def test_absent_and_null_fields_have_openai_s_defaults(shared: Running, fields: dict[str, Any]) -> None:
    shared.ask(**fields)
    sampling = shared.service.submitted[-1].config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)


@pytest.mark.parametrize(("speculation", "limit"), [("auto", None), ("off", 0), (3, 3)])
def test_a_request_can_limit_speculation_or_switch_it_off(
    shared: Running, speculation: Any, limit: int | None
) -> None:
    shared.ask(speculation=speculation)
    assert shared.service.submitted[-1].speculation == limit


def test_a_stop_text_ends_the_text_before_it(shared: Running) -> None:
    answer = shared.ask(max_tokens=100, stop=["never", "fox drank"])
    assert answer["choices"][0]["text"] == STORY[: STORY.index("fox drank")]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_tokens_after_a_stop_text_are_not_in_the_usage(shared: Running) -> None:
    tokens = shared.service.tokenizer.encode(STORY)
    texts = [shared.service.tokenizer.decode(tokens[: end + 1]) for end in range(len(tokens))]
    completed = next(end for end, text in enumerate(texts) if "café" in text) + 1
    for stop in ("café", "caf"):
        answer = shared.ask(max_tokens=100, stop=stop, logprobs=0)
        num_tokens = answer["usage"]["completion_tokens"]
        assert num_tokens == len(answer["choices"][0]["logprobs"]["tokens"])
        assert num_tokens <= completed
    assert shared.ask(max_tokens=100, stop="café")["usage"]["completion_tokens"] == completed


@pytest.mark.parametrize("is_llama", (False, True), ids=("metaspace", "llama"))
def test_echo_and_offsets_are_right_when_the_decoder_strips_a_blank(tmp_path: Path, is_llama: bool) -> None:
    path = tiny_pair.save_sentence_piece_tokenizer(tmp_path, is_llama=is_llama)
    tokenizer = Tokenizer(path, "ygg compile")
    tokens = tokenizer.encode(tiny_pair.stories(1)[0])
    prompt = tokens[:12]
    rest = tokens[12:]
    assert tokenizer.token_bytes(rest[0]).startswith(b" ")
    stream = TextStream(tokenizer, after=prompt)
    events = []
    for token in rest:
        events.append(Event(stream.push([token]), [token], [TokenLogProb(token, -0.5, ())]))
    text = stream.text + stream.finish()
    for given in (prompt, tokenizer.decode(prompt)):
        echoing = CompletionReply(CompletionRequest(prompt=given, echo=True), "tiny", tokenizer, [prompt])
        assert echoing.whole([Event(text, rest)])["choices"][0]["text"] == tokenizer.decode(tokens)
    scoring = CompletionReply(CompletionRequest(prompt=prompt, logprobs=0), "tiny", tokenizer, [prompt])
    scores = [scoring.chunks(0, event)[0]["choices"][0]["logprobs"] for event in events]
    assert all(text[score["text_offset"][0] :].startswith(score["tokens"][0]) for score in scores)


def test_echo_puts_the_prompt_before_every_choice(shared: Running) -> None:
    choices = shared.ask(prompt=["a fox", "a crow"], n=2, echo=True, max_tokens=3)["choices"]
    for choice, prompt in zip(choices, ["a fox", "a fox", "a crow", "a crow"], strict=True):
        assert choice["text"].startswith(prompt)
    tokens = shared.service.tokenizer.encode("a fox")
    [choice] = shared.ask(prompt=tokens, echo=True, max_tokens=1)["choices"]
    assert choice["text"].startswith("a fox")
    streamed = events(shared.post(prompt="a fox", echo=True, stream=True, max_tokens=100))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == "a fox" + STORY


def test_a_stream_has_the_same_text_in_chunks_and_ends_with_done(shared: Running) -> None:
    response = shared.post(
        prompt=["a", "b"], stream=True, max_tokens=100, stream_options={"include_usage": True}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(response)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(shared.service.tokenizer.encode(STORY))
    assert {chunk["usage"] for chunk in chunks} == {None}
    for index in (0, 1):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == STORY
        assert not any("\ufffd" in choice["text"] for choice in choices)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert {chunk["id"] for chunk in chunks} == {last["id"]}


def test_a_chat_stream_names_the_role_once(shared: Running) -> None:
    response = shared.chat(stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response)[:-1]]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.get("content", "") for delta in deltas) == STORY


def test_log_probabilities_of_completions_have_texts_and_offsets_of_tokens(shared: Running) -> None:
    scores = shared.ask(logprobs=2, max_tokens=100)["choices"][0]["logprobs"]
    num_tokens = len(shared.service.tokenizer.encode(STORY))
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert len(scores[name]) == num_tokens
    assert any(token.startswith("bytes:\\xf0") for token in scores["tokens"])  # 🦊 spans tokens
    assert scores["top_logprobs"][0][scores["tokens"][0]] == scores["token_logprobs"][0] == -0.5
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert token.startswith("bytes:") or STORY[offset:].startswith(token)
    streamed = [
        chunk["choices"][0]["logprobs"]
        for chunk in events(shared.post(prompt="a", logprobs=0, max_tokens=100, stream=True))[:-1]
    ]
    assert [offset for part in streamed for offset in part["text_offset"]] == scores["text_offset"]
    assert {json.dumps(part["top_logprobs"]) for part in streamed} == {"null"}


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("given", ("text", "tokens"))
def test_an_echo_has_the_log_probabilities_of_the_prompt_without_its_first_token(
    shared: Running, stream: bool, given: str
) -> None:
    tokenizer = shared.service.tokenizer
    text = "Once upon a café"
    prompt = tokenizer.encode(text)
    fields = {"prompt": text if given == "text" else prompt, "echo": True, "logprobs": 2, "n": 2}
    for max_tokens in (0, 3):
        asked = {**fields, "max_tokens": max_tokens}
        if stream:
            chunks = [chunk["choices"][0] for chunk in events(shared.post(**asked, stream=True))[:-1]]
            parts = [chunk for chunk in chunks if chunk["index"] == 1]
        else:
            parts = [shared.ask(**asked)["choices"][1]]
        whole = "".join(part["text"] for part in parts)
        scores = {
            name: [entry for part in parts for entry in part["logprobs"][name]]
            for name in parts[0]["logprobs"]
        }
        assert whole == text + tokenizer.decode(tokenizer.encode(STORY)[:max_tokens])
        assert {len(entries) for entries in scores.values()} == {len(prompt) + max_tokens}
        expected = [None] + [-0.25] * (len(prompt) - 1) + [-0.5] * max_tokens
        assert scores["token_logprobs"] == expected
        assert scores["top_logprobs"][0] is None
        assert len(scores["top_logprobs"][1]) == 3
        for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
            assert token.startswith("bytes:") or whole[offset:].startswith(token)
        assert parts[-1]["finish_reason"] == "length"


def test_no_token_is_returned_for_max_tokens_0(shared: Running) -> None:
    answer = shared.ask(max_tokens=0, logprobs=1)
    assert answer["usage"]["completion_tokens"] == 0
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("", "length", [])


@pytest.mark.parametrize("stream", (False, True))
def test_log_probabilities_of_a_prompt_have_vllm_s_form(shared: Running, stream: bool) -> None:
    fields = {"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 4}
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(shared.post(**fields, stream=True))[:-1]]
        assert ["prompt_logprobs" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        choice = chunks[0]
    else:
        [choice] = shared.ask(**fields)["choices"]
    spell = shared.service.tokenizer.token_bytes
    assert choice["prompt_logprobs"] == [
        None,
        *(
            {
                str(token): {"logprob": -0.25, "rank": 7, "decoded_token": spell(token).decode()},
                "0": {"logprob": -1.0, "rank": 1, "decoded_token": spell(0).decode()},
            }
            for token in (6, 7)
        ),
    ]
    assert choice["logprobs"] is None
    assert shared.ask(prompt=[5], prompt_logprobs=0)["choices"][0]["prompt_logprobs"] == [None]


def test_the_bytes_of_chat_log_probabilities_are_the_text(shared: Running) -> None:
    response = shared.chat(logprobs=True, top_logprobs=3)
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == STORY
    assert {len(entry["top_logprobs"]) for entry in content} == {3}


def test_the_default_template_takes_texts_and_parts(shared: Running) -> None:
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
    system = {"role": "developer", "content": "Be brief."}
    user = {"role": "user", "content": parts, "name": None}
    shared.chat(messages=[system, user])
    prompt = shared.service.tokenizer.decode(shared.service.submitted[-1].prompt)
    assert prompt == "system: Be brief.\nuser: Who are you?\nassistant:"


@pytest.mark.parametrize("path", ("/v1/chat/completions", "/v1/responses"))
def test_an_answer_ends_before_the_user_s_turn_if_the_model_has_no_template(path: str) -> None:
    is_chat = "chat" in path
    fields: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"input": "Hi"}
    )
    turns = " A fox.\nuser: Thanks."
    for template, whole in ((ChatTemplate(), " A fox."), (ChatTemplate("Hi"), turns)):
        with server(template=template) as running:
            running.service.story = turns
            for stop, text in (([], whole), (["fox"], " A ")):
                answer = running.post(path, **fields, stop=stop).json()
                if is_chat:
                    assert answer["choices"][0]["message"]["content"] == text
                else:
                    assert answer["output"][0]["content"][0]["text"] == text
            assert running.ask()["choices"][0]["text"] == turns


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "."}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"frequency_penalty": "low"}, "frequency_penalty"),
        ({"presence_penalty": [1]}, "presence_penalty"),
        ({"logit_bias": {"five": -100}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 4}}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "x" * 70_000}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": -4}, "min_tokens"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": ["a", ""]}, "bad_words"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"store": True}, "store"),
        ({"guided_json": {}}, "guided_json"),
        ({"min_p": 2}, "min_p"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"speculation": 0}, "speculation"),
        ({"speculation": "maybe"}, "speculation"),
        ({"speculation": True}, "speculation"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [None] * 100_000}, "prompt"),
    ],
    ids=str,
)
def test_an_unsupported_or_invalid_field_is_a_400_that_names_it(
    shared: Running, fields: dict[str, Any], param: str
) -> None:
    before = len(shared.service.submitted)
    response = shared.post(**{"prompt": "Once", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param in error["message"]
    assert len(error["message"]) < 400
    assert len(shared.service.submitted) == before


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "4", "tool_call_id": "a"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "Hi", "tool_calls": [call("{}")]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("[1]")]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [call('{"a"')]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("[" * 5000)]}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),  # not in the template
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "Hi", "name": 3}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"prompt": "Hi"}, "prompt"),
    ],
    ids=str,
)
def test_an_unsupported_or_invalid_field_of_chat_is_a_400_that_names_it(
    shared: Running, fields: dict[str, Any], param: str
) -> None:
    response = shared.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url is not a field of this server's requests; leave it out",
        ),
        (
            {"messages": [{"role": "user", "content": 4}]},
            "messages.0.content: Input should be a valid string or a valid list",
        ),
        (
            {"tool_choice": "maybe"},
            "tool_choice: Input should be 'none', 'auto' or 'required' or a valid object",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type: Input should be 'function'"),
        (
            {"tool_choice": {"type": "function", "function": 4}},
            "tool_choice.function: Input should be a valid object",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "add"}, "name": "add"}},
            "tool_choice.name is not a field of this server's requests; leave it out",
        ),
        ({"speculation": True}, "speculation: Input should be 'off' or 'auto' or a valid integer"),
        ({"frequency": 1}, "frequency is not a field of this server's requests; leave it out"),
    ],
    ids=str,
)
def test_the_error_of_a_value_is_that_of_the_form_that_the_client_meant(
    shared: Running, fields: dict[str, Any], message: str
) -> None:
    assert shared.chat(**fields).json()["error"]["message"] == message


@pytest.mark.parametrize("kind", (CompletionRequest, ChatRequest))
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_is_accepted_with_its_neutral_values_only(name: str, kind: type[WireRequest]) -> None:
    if name in kind.model_fields:
        return  # applied, so no value is neutral
    start = (
        {"prompt": "a"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "a"}]}
    )
    without = kind.model_validate(start)
    for value in (None, *NEUTRAL[name]):
        assert kind.model_validate({**start, name: value}) == without
    with pytest.raises(ApiError, match=f"{name} is not supported; leave it out"):
        kind.model_validate({**start, name: "another value"})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "json",
            SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "json", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    ],
    ids=str,
)
def test_a_grammar_reaches_the_service(
    shared: Running, fields: dict[str, Any], kind: str, value: Any
) -> None:
    shared.ask(**fields)
    expected = GrammarConfig.of(kind, value)
    assert shared.service.prepared[-1] == expected
    assert shared.service.submitted[-1].config.grammar == expected
    shared.chat(**fields)
    assert shared.service.submitted[-1].config.grammar == expected


def test_any_text_needs_no_grammar(shared: Running) -> None:
    before = len(shared.service.prepared)
    shared.ask(response_format={"type": "text"}, structured_outputs={})
    assert shared.service.submitted[-1].config.sampling.processors is None
    assert len(shared.service.prepared) == before


def test_neutral_values_and_labels_are_accepted(shared: Running) -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    shared.ask(**neutral, user="me", metadata={"a": "b"}, best_of=1)
    shared.ask(top_k=-1)
    assert shared.service.submitted[-1].config.sampling.top_k == 0
    answer = shared.chat(**{**neutral, "tool_choice": "none"}, n=2, best_of=2, user="me")
    assert answer.status_code == 200


def test_the_workload_of_the_metadata_reaches_the_service(shared: Running) -> None:
    shared.ask(metadata={"workload": "agents", "a": "b"})
    assert shared.service.submitted[-1].workload == "agents"
    shared.ask()
    assert shared.service.submitted[-1].workload == ""


def test_a_name_reaches_the_template(shared: Running) -> None:
    messages = [{"role": "user", "content": "Hi", "name": "Ann"}, {"role": "user", "content": "Ho"}]
    assert shared.chat(messages=messages).status_code == 200
    prompt = shared.service.tokenizer.decode(shared.service.submitted[-1].prompt)
    assert prompt == "user (Ann): Hi\nuser: Ho\nassistant:"
    own = ChatTemplate("{% for m in messages %}[{{ m.name if m.name is defined else '-' }}]{% endfor %}")
    with server(template=own) as running:
        running.chat(messages=messages)
        assert running.service.tokenizer.decode(running.service.submitted[-1].prompt) == "[Ann][-]"


def test_a_prompt_or_an_output_beyond_the_context_is_a_400(shared: Running) -> None:
    for fields, param in (
        ({"prompt": [5] * CONTEXT}, "prompt"),
        ({"prompt": [5] * 100, "max_tokens": 29}, "max_tokens"),
    ):
        response = shared.post(**fields)
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "at most 28 can follow" in error["message"]
    messages = [{"role": "user", "content": "fox " * 200}]
    for limit in (None, 999):
        error = shared.chat(messages=messages, max_completion_tokens=limit).json()["error"]
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b'{"prompt": ', "application/json"),
        (b'["prompt"]', "application/json"),
        (b'{"prompt": "a"}', "text/plain"),
        (b"[" * 100_000, "application/json"),
    ],
    ids=["cut", "a list", "no JSON header", "deep"],
)
def test_a_body_that_is_not_a_json_object_is_a_400(
    shared: Running, content: bytes, content_type: str
) -> None:
    response = httpx.post(
        f"{shared.url}/v1/completions", content=content, headers={"Content-Type": content_type}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("has_length", (True, False))
def test_a_client_gets_the_413_of_a_body_that_is_too_large(shared: Running, has_length: bool) -> None:
    body = b" " * (MAX_BODY_BYTES + 1)
    content = body if has_length else iter([body[: 1 << 20]] * 5)
    response = httpx.post(
        f"{shared.url}/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413
    assert "4 MiB" in response.json()["error"]["message"]


def test_errors_of_unknown_models_routes_and_methods_have_openai_s_format(shared: Running) -> None:
    response = shared.post(model="gpt-4", prompt="a")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert shared.get("/v1/models/gpt-4").status_code == 404
    assert "/v1/embeddings" in shared.post("/v1/embeddings").json()["error"]["message"]
    response = shared.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_model_is_listed_and_found_by_name(shared: Running) -> None:
    card = shared.get("/v1/models").json()["data"][0]
    assert card["id"] == "tiny"
    assert shared.get("/v1/models/tiny").json() == card


def test_health_info_and_metrics_show_the_state_of_the_service(shared: Running) -> None:
    assert shared.get("/health").json() == {"status": "ok"}
    info = shared.get("/server_info").json()
    assert info["internal_states"][0]["speculative_num_steps"] == info["speculative_num_steps"] == 3
    assert info["avg_spec_accept_length"] == 1.5
    assert info["policy_state"] == {"block": 3}
    assert info["chat_template"] == "default"
    assert "# TYPE ygg_emitted_tokens_total counter" in shared.get("/metrics").text


def test_a_ping_is_a_check_of_health_by_either_method(shared: Running) -> None:
    assert shared.get("/ping").json() == shared.post("/ping").json() == {"status": "ok"}
    with server() as running:
        running.serving.is_draining = True
        assert (running.get("/ping").status_code, running.post("/ping").status_code) == (503, 503)


def test_the_version_is_the_package_s(shared: Running) -> None:
    assert shared.get("/version").json() == {"version": yggdrasil.__version__}


def test_a_model_s_name_may_have_slashes() -> None:
    with server(model="me/mine") as running:
        assert running.get("/v1/models/me/mine").json()["id"] == "me/mine"


def test_every_route_except_health_and_ping_requires_the_key() -> None:
    with server(api_key="s3crét") as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3crét".encode()}):
            for path in ("/v1/models", "/metrics", "/server_info", "/openapi.json", "/nowhere"):
                response = running.get(path, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert [running.get(path).status_code for path in ("/health", "/ping")] == [200, 200]
        right = {"Authorization": "bearer s3crét".encode()}
        assert running.get("/v1/models", headers=right).status_code == 200
        sample = running.serving.metrics.registry.get_sample_value
        assert sample("ygg_requests_refused_total", {"status": "401"}) == 15


def test_a_full_queue_is_a_429_with_a_time_to_retry(shared: Running) -> None:
    shared.service.is_full = True
    try:
        response = shared.post(prompt="a", n=3, stream=True)
    finally:
        shared.service.is_full = False
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


def test_rows_submitted_before_a_refused_one_are_cancelled(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = shared.service.submit
    before = shared.service.cancelled
    shared.service.is_stuck = True

    def submit_two(request: Request) -> Ticket:
        if len(shared.service.live) == 2:
            raise QueueFull(2, 1.0)
        return submit(request)

    monkeypatch.setattr(shared.service, "submit", submit_two)
    assert shared.post(prompt="a", n=3).status_code == 429
    shared.service.is_stuck = False
    assert shared.service.cancelled == before + 2


def test_a_draining_server_refuses_new_requests_and_finishes_running_ones() -> None:
    fields = {"prompt": "a", "max_tokens": 100, "stream": True}
    with (
        server() as running,
        httpx.stream("POST", f"{running.url}/v1/completions", json=fields) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        running.serving.is_draining = True
        refused = running.post(prompt="a")
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
        assert running.get("/health").status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", (True, False))
def test_all_rows_of_a_client_that_disconnects_are_cancelled(stream: bool) -> None:
    fields = {"prompt": "a", "n": 3, "max_tokens": 100, "stream": stream}
    with server() as running:
        running.service.is_stuck = not stream
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.3) as client:  # noqa: SIM117
            with client.stream("POST", f"{running.url}/v1/completions", json=fields) as response:
                running.service.is_stuck = True
                for _ in response.iter_lines():
                    pass
        eventually(lambda: running.service.cancelled == 3)
        assert running.service.live == []
        running.service.is_stuck = False
        assert running.ask()["choices"][0]["finish_reason"] == "length"


def test_rows_are_cancelled_if_the_client_disconnects_before_the_first_event() -> None:
    fields = {"prompt": "a", "n": 2, "stream": True}
    with server() as running:
        running.service.is_stuck = True
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json=fields, timeout=0.2)
        eventually(lambda: running.service.cancelled == 2)


def test_an_error_of_a_row_is_a_500_or_the_end_of_a_stream() -> None:
    with server() as running:
        running.service.fails_after = 4
        response = running.post(prompt="a", n=2, max_tokens=100)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "the grammar was lost")
        streamed = events(running.post(prompt="a", max_tokens=100, stream=True))
        assert [chunk["choices"][0]["text"] for chunk in streamed[:-1]] != []
        assert streamed[-1]["error"]["message"] == "the grammar was lost"


def test_a_defect_is_a_500_without_a_traceback(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.service, "submit", lambda request: 1 / 0)
    response = shared.post(prompt="a")
    assert response.status_code == 500
    assert "ZeroDivision" not in response.text
    assert response.json()["error"]["type"] == "server_error"


def test_a_service_that_takes_no_request_is_a_503(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(request: Request) -> Ticket:
        raise ServiceEnded

    monkeypatch.setattr(shared.service, "submit", submit)
    response = shared.post(prompt="a")
    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
    assert "start `ygg serve` again" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", (True, False))
def test_a_row_that_a_shutdown_ends_is_a_503(stream: bool) -> None:
    with server() as running:
        running.service.is_stuck = True

        def cancel_all() -> None:
            while not running.service.live:  # the request may take seconds to arrive
                time.sleep(0.01)
            for ticket in list(running.service.live):
                running.service.cancel(ticket)

        threading.Timer(0.2, cancel_all).start()
        response = running.post(prompt="a", stream=stream)
        error = events(response)[-1]["error"] if stream else response.json()["error"]
        assert response.status_code == (200 if stream else 503)  # a stream's status line is already sent
        assert (error["message"], error["type"]) == ("the server is shutting down", "server_error")


def test_waiting_requests_end_if_the_service_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yggdrasil.serve.api.HEALTH_CHECK_S", 0.05)
    with server() as running:
        running.service.is_stuck = True
        threading.Timer(0.2, setattr, (running.service, "is_healthy", False)).start()
        assert running.post(prompt="a").status_code == 500
        assert running.get("/health").json() == {"status": "failed"}
        assert running.get("/server_info").status_code == 503


def test_a_template_can_use_special_tokens_and_refuse_messages() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.content }}]{% endfor %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "Hi"}]) == "<s>[Hi]"
    with pytest.raises(ConfigError, match="no system"):
        template.render([{"role": "system", "content": "Hi"}])
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% for %}")
    with server(template=template) as running:
        response = running.chat(messages=[{"role": "system", "content": "Hi"}])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(ConfigError, match="messages"):
        ChatTemplate("{{ messages.__class__.__base__.__subclasses__() }}").render([])
    with pytest.raises(ConfigError, match="messages"):
        ChatTemplate("{{ messages.append(1) }}").render([])


def test_templates_are_read_from_the_files_of_a_model(tmp_path: Any) -> None:
    assert not load_chat_template(str(tmp_path)).is_own
    assert not load_chat_template(str(tmp_path / "gone")).is_own
    settings = {"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": "{{ bos_token }}old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_chat_template(str(tmp_path)).render([]) == "<s>old"
    settings["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "default"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_chat_template(str(tmp_path)).render([]) == "default"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}new")
    assert load_chat_template(str(tmp_path)).render([]) == "<s>new"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        load_chat_template(str(tmp_path))
