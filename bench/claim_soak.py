"""Does the server stay whole under more load than it can bear, from clients that misbehave?

`ygg serve` on the bundled pair in a process of its own; open-loop arrivals at 1.2 times the rate at which
it was measured to finish requests. Clients: streaming and not; greedy and seeded; completions and chat;
some go away in the middle, some give up waiting, some send broken JSON, unknown models, prompts that are
too long or bodies that are too large. For minutes: resident memory, free pages, requests in flight.

Refuted by a completed text that is not the one that the engine writes for the same request alone and
plainly; by a page that is not given back or a request that is still there after the last client has left;
by resident memory that grows by more than 5 % after the first quarter; by an answer to a broken request
that is not a 4xx with OpenAI's error body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from bench.lib.claim import Claim, Log, Option
from bench.lib.workloads import WORKLOADS
from yggdrasil.bundle import BUNDLED
from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.report.run import Run
from yggdrasil.serve.chat import ChatTemplate, load_chat_template

OVERLOAD = 1.2
# the share of clients up to which they do so; the others stay
BREAKING = 0.1
LEAVING = 0.2
IMPATIENT = 0.3
STAYING = 1 - IMPATIENT  # only those are counted as load
NUM_ASKS = 60  # different good requests; which one is sent is drawn
CHATTING = (1, 2)  # of every four: a greedy one and a sampled one
SAMPLE_S = 5.0
ALLOWED_GROWTH = 1.05
PATIENCE_S = 120.0
BROKEN: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b'{"model": "tinystories", "prompt": '),
    ("/v1/completions", b"[]"),
    ("/v1/completions", b'{"model": "nobody", "prompt": "a"}'),
    ("/v1/completions", b'{"model": "tinystories", "prompt": "a", "max_tokens": -3}'),
    ("/v1/completions", b'{"model": "tinystories", "prompt": "a", "temperature": "hot"}'),
    ("/v1/completions", b'{"model": "tinystories", "prompt": [999999]}'),
    ("/v1/completions", json.dumps({"model": BUNDLED, "prompt": "word " * 9000}).encode()),
    ("/v1/completions", b"x" * (6 << 20)),
    ("/v1/chat/completions", b'{"model": "tinystories", "messages": "hello"}'),
    ("/v1/chat/completions", b'{"model": "tinystories", "messages": []}'),
)


@dataclass(frozen=True)
class Ask:
    """A good request and what it must bring.

    Args:
        path: Of the route.
        body: JSON.
        text: The engine's, alone and plainly.
    """

    path: str
    body: dict[str, Any]
    text: str


def asks(pair: LoadedPair) -> list[Ask]:
    """Prompts of three kinds of text, completions and chat, greedy and sampled, with and without
    speculation.
    """
    kinds = [workload.test_texts for workload in WORKLOADS.values()]
    template = load_chat_template(pair.bundle.models[0])
    made = []
    for index in range(NUM_ASKS):
        text = kinds[index % 3][index // 3][: 20 + 11 * (index % 30)]
        sampling = (
            SamplingConfig() if index % 2 else SamplingConfig(temperature=0.8, top_p=0.95, seed=index)
        )
        num_tokens = 4 + 7 * (index % 14)
        config = GenerateConfig(
            max_new_tokens=num_tokens, plain=True, sampling=sampling, stop=(". ",) if index % 7 == 0 else ()
        )
        body = {
            "model": BUNDLED,
            "max_tokens": num_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "speculation": ("auto", "off", 2)[index % 3],
            "stream": index % 5 != 0,
        }
        if config.stop:
            body["stop"] = list(config.stop)
        path, asked, prompt = (
            _chat(pair, template, text)
            if index % 4 in CHATTING
            else ("/v1/completions", {"prompt": text}, pair.tokenizer.encode(text))
        )
        made.append(Ask(path, body | asked, Run(pair, prompt, config).complete().text))
    return made


def _chat(pair: LoadedPair, template: ChatTemplate, text: str) -> tuple[str, dict[str, Any], list[int]]:
    """A conversation of one message: route, field, and its tokens as the model's template writes them."""
    messages = [{"role": "user", "content": text}]
    return (
        "/v1/chat/completions",
        {"messages": messages},
        pair.tokenizer.encode(template.render(messages), special_tokens=not template.is_own),
    )


class Server:
    """`ygg serve` on a free port."""

    def __init__(self) -> None:
        command = [
            sys.executable,
            "-m",
            "yggdrasil",
            "serve",
            "--port",
            "0",
            "--max-batch",
            "16",
            "--max-queue",
            "48",
            "--kv-memory",
            "24MiB",
            "--quiet",  # nothing reads its lines
        ]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        greeting = self._process.stderr.readline()
        if "http://" not in greeting:
            raise SystemExit(greeting + self._process.stderr.read())
        self.url = greeting.split()[-1]
        self.memory = psutil.Process(self._process.pid)

    def rss_mb(self) -> float:
        return round(float(self.memory.memory_info().rss) / 1e6, 1)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.terminate()
        return self._process.wait(timeout=PATIENCE_S)


@dataclass
class Tally:
    """What happened, by kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)


async def ask(
    client: httpx.AsyncClient,
    one: Ask,
    tally: Tally,
    *,
    leave_after: int | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """One good request, perhaps left after some events or some seconds."""
    try:
        async with asyncio.timeout(patience_s):
            text = await (_stream(client, one, leave_after) if one.body["stream"] else _whole(client, one))
    except TimeoutError:
        tally.outcomes["stuck" if patience_s == PATIENCE_S else "gave up waiting"] += 1
    except httpx.HTTPStatusError as error:
        tally.outcomes[str(error.response.status_code)] += 1
    else:
        if text is None:
            tally.outcomes["left in the middle"] += 1
        elif text == one.text:
            tally.outcomes["completed"] += 1
        else:
            tally.outcomes["wrong text"] += 1
            tally.wrong.append({"body": one.body, "text": text, "expected": one.text})


async def _whole(client: httpx.AsyncClient, one: Ask) -> str:
    response = await client.post(one.path, json=one.body)
    response.raise_for_status()
    return _text(response.json()["choices"][0])


async def _stream(client: httpx.AsyncClient, one: Ask, leave_after: int | None) -> str | None:
    text = ""
    events = 0
    async with client.stream("POST", one.path, json=one.body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                events += 1
                text += _text(json.loads(line[6:])["choices"][0])
                if events == leave_after:
                    return None
    return text + " (the stream broke off)"


def _text(choice: dict[str, Any]) -> str:
    """Of a completion, a message, or a stream's part of one, whose first and last may have none."""
    return str(
        choice["text"]
        if "text" in choice
        else choice.get("message", choice.get("delta", {})).get("content", "")
    )


async def break_(client: httpx.AsyncClient, index: int, tally: Tally) -> None:
    """One bad request."""
    path, body = BROKEN[index]
    try:
        response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        good = 400 <= response.status_code < 500 and "message" in response.json()["error"]
        answer = response.text
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        hung_up = isinstance(error, httpx.NetworkError | httpx.ProtocolError)
        # in the middle of too large a body, before the client had read the answer
        good = hung_up and len(body) > 1 << 20
        answer = repr(error)
    tally.outcomes["broken, refused" if good else "broken, NOT refused"] += 1
    if not good:
        tally.wrong.append(
            {"broken": path, "body": body[:80].decode(errors="replace"), "answer": answer[:200]}
        )


async def watch(client: httpx.AsyncClient, server: Server, tally: Tally, start: float) -> None:
    """Memory and counters, every few seconds."""
    while True:
        info = (await client.get("/server_info")).json()
        tally.samples.append(
            {
                "s": round(time.monotonic() - start, 1),
                "rss_mb": server.rss_mb(),
                **{key: info[key] for key in ("running", "waiting", "free_pages")},
            }
        )
        await asyncio.sleep(SAMPLE_S)


async def capacity(client: httpx.AsyncClient, good: Sequence[Ask]) -> float:
    """Requests per second that 24 clients who wait for their answers get."""
    tally = Tally()
    start = time.monotonic()

    async def one_after_another(mine: Sequence[Ask]) -> None:
        for one in mine:
            await ask(client, one, tally)

    await asyncio.gather(*(one_after_another(good[place::24] * 3) for place in range(24)))
    if tally.outcomes["completed"] != 3 * len(good):
        raise SystemExit(f"not even without load: {dict(tally.outcomes)} {tally.wrong[:1]}")
    return 3 * len(good) / (time.monotonic() - start)


async def soak(server: Server, good: Sequence[Ask], minutes: float, log: Log) -> dict[str, Any]:
    """Overload it for `minutes`, then see what remains."""
    dice = random.Random(0)
    tally = Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client:
        rate = OVERLOAD * await capacity(client, good) / STAYING
        log(f"{rate:.1f} requests/s for {minutes:g} minutes")
        start = time.monotonic()
        tasks = set[asyncio.Task[None]]()
        watching = asyncio.create_task(watch(client, server, tally, start))
        reported = start
        while time.monotonic() - start < minutes * 60:
            await asyncio.sleep(dice.expovariate(rate))
            kind = dice.random()
            one = dice.choice(good)
            if kind < BREAKING:
                work = break_(client, dice.randrange(len(BROKEN)), tally)
            elif kind < LEAVING:
                work = ask(client, one, tally, leave_after=dice.randrange(1, 6))
            elif kind < IMPATIENT:
                work = ask(client, one, tally, patience_s=dice.uniform(0.01, 1.0))
            else:
                work = ask(client, one, tally)
            task = asyncio.create_task(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if time.monotonic() - reported > 60:
                reported = time.monotonic()
                log(
                    f"{(reported - start) / 60:.0f} min: {dict(tally.outcomes)}, in flight "
                    f"{len(tasks)}, {server.rss_mb()} MB"
                )
        await asyncio.gather(*tasks)
        watching.cancel()
        await asyncio.sleep(1.0)
        left = (await client.get("/server_info")).json()
    quarter = [sample["rss_mb"] for sample in tally.samples if sample["s"] >= minutes * 15]
    growth = max(quarter[-5:]) / max(quarter[:5])
    held = {
        "every completed text is its reference": not tally.wrong and tally.outcomes["completed"] > 0,
        "no stuck request": tally.outcomes["stuck"] == 0 and left["running"] == left["waiting"] == 0,
        "all pages given back": left["free_pages"] == left["num_pages"],
        "memory flat": growth <= ALLOWED_GROWTH,
        "broken requests refused": tally.outcomes["broken, NOT refused"] == 0,
    }
    return {
        "requests_per_s": round(rate, 2),
        "minutes": minutes,
        "outcomes": dict(tally.outcomes.most_common()),
        "wrong": tally.wrong[:5],
        "rss_growth_after_first_quarter": round(growth, 4),
        "left": {key: left[key] for key in ("running", "waiting", "free_pages", "num_pages")},
        "held": held,
        "samples": tally.samples[:: max(1, len(tally.samples) // 60)],
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Serve, soak, stop."""
    good = asks(load_pair(BUNDLED))
    server = Server()
    found = asyncio.run(soak(server, good, options.minutes, log))
    found["held"]["exit code 0 after SIGTERM"] = server.stop() == 0
    return found


def table(result: Mapping[str, Any]) -> str:
    """What happened and what held."""
    shown = ("outcomes", "left", "held", "rss_growth_after_first_quarter")
    return json.dumps({key: result[key] for key in shown}, indent=1)


CLAIM = Claim(
    name="soak",
    doc=__doc__,
    options=(Option("--minutes", "of overload", default=30.0, quick=0.5),),
    measure=measure,
    table=table,
    devices=(),
    rehearsal="half a minute",
)

if __name__ == "__main__":
    CLAIM.main()
