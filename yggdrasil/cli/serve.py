"""`ygg serve`: an OpenAI-compatible server; SIGTERM and Ctrl-C let running requests finish."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from yggdrasil.cli.compile import NO_DRAFT, pair_name
from yggdrasil.cli.heap import frozen_heap
from yggdrasil.cli.threads import add_threads, apply_threads, note_threads
from yggdrasil.config import REASONING_PARSERS, TOOL_PARSERS, CompileConfig, ServeConfig
from yggdrasil.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from yggdrasil.serve.service import Service
    from yggdrasil.serve.serving import Serving

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
Serve a compiled pair over HTTP with OpenAI's completions and chat completions: OpenAI clients work with
base_url http://HOST:PORT/v1. Requests are batched; a policy chooses the trees of every step.
The texts are what the target alone would write. Routes: /docs. Metrics: /metrics. State: /server_info.
"""
KEY_VARIABLE = "YGG_API_KEY"
HANG_UP_SECONDS = 5
WAITING_CONNECTIONS = 2048  # in the kernel's queue
UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    defaults = ServeConfig()
    parser = verbs.add_parser(
        "serve",
        help="answer requests over HTTP",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pair", help="a pair compiled with `ygg compile` (default: the bundled pair)")
    parser.add_argument(
        "--target", help="instead of --pair: folder or hub id of the target; compiled first if needed"
    )
    parser.add_argument(
        "--draft", help="with --target: folder or hub id of the draft (default: made from the target)"
    )
    parser.add_argument(
        "--policy",
        default=defaults.policy,
        help="chooses the trees or chains of every step; off never speculates (default: %(default)s)",
    )
    parser.add_argument(
        "--gamma-max",
        type=int,
        metavar="N",
        help="longest chain of policies that draft chains (default: 7, or the depth of the pair's trees)",
    )
    parser.add_argument(
        "--max-batch",
        type=int,
        metavar="N",
        help="most requests decoded at once (default: 32, or half of the pair's largest graph)",
    )
    parser.add_argument(
        "--kv-memory",
        type=_num_bytes,
        metavar="SIZE",
        help="memory for KV pages, such as 512MiB (default: for a full batch, at most half of free memory)",
    )
    parser.add_argument(
        "--elastic",
        action=argparse.BooleanOptionalAction,
        default=defaults.elastic,
        help="use the draft's memory for KV pages while speculation is off and pages are scarce "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--tau-low",
        type=float,
        metavar="SHARE",
        help="pages are scarce if fewer than this share are free; not with --no-elastic "
        f"(default: {defaults.tau_low})",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=defaults.max_queue,
        metavar="N",
        help="most waiting requests; more get status 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--host",
        default=defaults.host,
        help="address to listen on; 0.0.0.0 is all addresses (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=defaults.port,
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that clients must send, except for /health and /ping (default: {KEY_VARIABLE})",
    )
    parser.add_argument(
        "--model-name", metavar="NAME", help="what clients call the model (default: the pair's name)"
    )
    parser.add_argument(
        "--tool-parser",
        metavar="NAME",
        help=f"format of the model's tool calls: {', '.join(TOOL_PARSERS)} (default: as its template asks)",
    )
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="separate the model's reasoning from every chat's answer, as reasoning_content: "
        f"{', '.join(REASONING_PARSERS)} (default: only for requests with include_reasoning); "
        "does not apply where a strict function may be called in the format llama3 or mistral",
    )
    names = "also answer to this host name; may be repeated; with a key, every name is accepted"
    parser.add_argument("--allow-host", action="append", metavar="NAME", help=names)
    parser.add_argument(
        "--allow-origin",
        action="append",
        metavar="URL",
        help="let web pages of this origin read answers (CORS); may be repeated; * is every origin",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=defaults.drain_seconds,
        metavar="S",
        help="seconds that running requests get to finish after a signal (default: %(default)s)",
    )
    parser.add_argument(
        "--no-model-defaults",
        dest="model_defaults",
        action="store_false",
        help="ignore the sampling that the target's generation_config.json or GGUF file asks for: what a "
        "request leaves out has OpenAI's default",
    )
    parser.add_argument(
        "--shadow",
        type=float,
        default=defaults.shadow,
        metavar="RATE",
        help="share of requests to decode both ways and compare, while no request waits; clients get the "
        "plain text (default: %(default)s)",
    )
    parser.add_argument(
        "--no-page",
        dest="page",
        action="store_false",
        help="answer / with a 404 instead of a page that talks to the model",
    )
    parser.add_argument("--quiet", action="store_true", help="no line on standard error for every response")
    add_threads(parser, "")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Serve until a signal."""
    if options.tau_low is not None and not options.elastic:
        raise ConfigError(
            "--tau-low",
            options.tau_low,
            "left out with --no-elastic",
            "ygg serve --no-elastic, or --tau-low without it",
        )
    if options.draft == NO_DRAFT:
        raise ConfigError("draft", NO_DRAFT, "a folder or a hub id", "ygg serve --policy off never drafts")
    config = ServeConfig(
        policy=options.policy,
        gamma_max=options.gamma_max,
        max_batch=options.max_batch,
        kv_memory_bytes=options.kv_memory,
        max_queue=options.max_queue,
        elastic=options.elastic,
        tau_low=ServeConfig().tau_low if options.tau_low is None else options.tau_low,
        host=options.host,
        port=options.port,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        allow_hosts=tuple(options.allow_host or ()),
        allow_origins=tuple(options.allow_origin or ()),
        drain_seconds=options.drain_seconds,
        shadow=options.shadow,
        page=options.page,
    )
    _check_installed()
    with _listening(config.host, config.port) as listener:  # before loading, which takes seconds
        apply_threads(options)
        name = pair_name(options, lambda models: _check_uncompiled(config))
        serving, service = _serving(name, config, options)
        service.start()
        with frozen_heap():
            asyncio.run(_serve(serving, service, listener, config.drain_seconds))


def _check_uncompiled(config: ServeConfig) -> None:
    """Refuse what cannot work with the defaults before a pair is compiled, which takes minutes."""
    from yggdrasil.serve.load import check_fits

    check_fits(config, CompileConfig())


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512MiB or 2GiB")
    return int(float(match[1]) * UNITS[match[2]])


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import jinja2  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{error.name} is not installed, but serving needs it",
            "pip install 'yggdrasil-decoding[serve]'",
        ) from None


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket; connections are accepted once the server runs."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(address[0], socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name that IDNA cannot encode
        raise ConfigError("--host", host, "an address of this machine", str(error)) from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address[4])
            listener.listen()
        except OSError as error:
            raise ConfigError(
                "--port", port, f"a free port of {host}", f"{error}; --port 0 takes any"
            ) from None
        yield listener


def _serving(name: str, config: ServeConfig, options: argparse.Namespace) -> tuple[Serving, Service]:
    import torch

    from yggdrasil.loading import load_bundle
    from yggdrasil.serve.chat import load_chat_template
    from yggdrasil.serve.hosts import HostNames
    from yggdrasil.serve.load import load_service
    from yggdrasil.serve.metrics import Metrics
    from yggdrasil.serve.serving import Serving
    from yggdrasil.serve.tools import format_of

    bundle = load_bundle(name)
    metrics = Metrics(
        token_bytes=bundle.kv_target.token_bytes(getattr(torch, bundle.config.dtype)),
        gamma_max=bundle.config.max_depth,
    )
    opened = load_service(name, config, metrics)
    template = load_chat_template(bundle.models[0])
    note_threads(opened.latency, bundle.command)
    serving = Serving(
        service=opened.service,
        tokenizer=opened.tokenizer,
        template=template,
        metrics=metrics,
        model=options.model_name or bundle.name,
        max_context=opened.service.max_context,
        vocab=bundle.vocab,
        max_rows=config.max_queue,
        api_key=os.environ.get(KEY_VARIABLE, "") if options.api_key is None else options.api_key,
        tool_parser=config.tool_parser or format_of(template.tool_source),
        reasoning_parser=config.reasoning_parser,
        defaults=bundle.defaults if options.model_defaults else {},
        hosts=HostNames([config.host, *config.allow_hosts]),
        allow_origins=config.allow_origins,
        page=config.page,
        log=None if options.quiet else _log,
    )
    return serving, opened.service


async def _serve(serving: Serving, service: Service, listener: socket.socket, drain_seconds: float) -> None:
    """Run the server; on a signal answer 503, let the service finish, then stop."""
    import uvicorn

    from yggdrasil.serve import connections
    from yggdrasil.serve.api import create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(WAITING_CONNECTIONS)  # the loop has set a smaller number

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            # `_serve` handles signals: uvicorn would stop listening before the service has finished
            yield

    settings = uvicorn.Config(
        create_app(serving),
        http=connections.limited(connections.raise_descriptor_limit()),
        backlog=connections.ACCEPTED_AT_ONCE,
        log_level="error",  # uvicorn warns about every malformed request
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=HANG_UP_SECONDS,
    )
    server = Server(settings)
    loop = asyncio.get_running_loop()
    connections.log_errors_rarely(loop)
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    print(_greeting(serving, listener), file=sys.stderr, flush=True)
    stopping = asyncio.create_task(signalled.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
        signal.signal(number, _end_at_once)
    serving.is_draining = True
    if not await _drained(service, drain_seconds):
        print(
            f"ygg serve: some requests did not finish within {drain_seconds:g} s and were ended",
            file=sys.stderr,
        )
    server.should_exit = True
    await running


def _log(line: str) -> None:
    """Print a line of the access log; requests go on if nothing reads it any longer."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _end_at_once(number: int, frame: object) -> None:
    """At a second signal, end without waiting, not even for threads."""
    os.write(2, b"ygg serve: ended at once; requests that were running are lost\n")
    os._exit(128 + number)


async def _drained(service: Service, drain_seconds: float) -> bool:
    """Run `service.drain` in a daemon thread: a second signal need not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()

    def drain() -> None:
        finished = service.drain(drain_seconds)
        loop.call_soon_threadsafe(done.set_result, finished)

    threading.Thread(target=drain, name="ygg-drain", daemon=True).start()
    return await done


def _greeting(serving: Serving, listener: socket.socket) -> str:
    """The address, what is served there, and a first request."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = ' -H "Authorization: Bearer $KEY"' if serving.api_key else ""
    body = f'{{"model": "{serving.model}", "prompt": "Once upon a time", "max_tokens": 64}}'
    is_open = not serving.api_key and not host.startswith("127.") and host != "::1"
    warning = "\nanyone who reaches this address may use it: set --api-key" if is_open else ""
    curl = f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    return "\n  ".join((f"serving {serving.model} on {url}", *_facts(serving), curl)) + warning


def _facts(serving: Serving) -> tuple[str, str]:
    """Two lines: what chats are rendered with, and the limits of the batch."""
    from yggdrasil.kernels.threads import get_num_threads
    from yggdrasil.layout import PAGE_LEN

    info = serving.service.info()
    template = "the model's own" if serving.template.is_own else "none, so roles are written as text"
    tools = f"tools as {serving.tool_parser}" if serving.template.takes_tools else "no tools"
    threads = get_num_threads()
    limits = (
        f"context {info['max_context']} tokens",
        f"{info['num_pages']} KV pages of {PAGE_LEN}",
        f"at most {info['max_batch']} at once",
        f"{threads} thread{'s' if threads != 1 else ''}",
        f"policy {info['policy']}",
    )
    page = "a page for browsers at /" if serving.page else "no page"
    return f"chat template: {template}; {tools}; {page}", ", ".join(limits)
