"""`ygg chat`: a conversation at a terminal, or one whose messages come from a pipe, a line each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yggdrasil.cli.heap import frozen_heap
from yggdrasil.cli.prompt import unreadable_input
from yggdrasil.cli.request import add_pair, add_request, load_chosen_pair, request_config
from yggdrasil.cli.terminal import is_terminal, print_dim
from yggdrasil.errors import ConfigError, UsageError, YggError, first_line
from yggdrasil.store.storage import write_whole

if TYPE_CHECKING:
    from yggdrasil.api import Pair
    from yggdrasil.config import GenerateConfig
    from yggdrasil.report.run import Run

__all__ = ["Chat", "add_parser", "run"]

ASKS = ">>> "
NO_TEMPLATE = (
    "the model has no chat template: it reads lines such as `user: Hello!`, and may not answer them"
)
DESCRIPTION = """\
Converse with the target. Its own chat template renders the conversation; the answers are what the target
alone would write. A further turn computes only its new tokens, because the KV of the conversation is kept.

  ygg chat                                          the bundled pair, which tells stories
  ygg chat --pair mine --system "Be brief."         with a message of the system
  ygg chat --temperature 0.7 --seed 1 -n 500        sampled, up to 500 tokens an answer
  printf 'Hello!\\nWho are you?\\n' | ygg chat         messages from a pipe, a line each

Ctrl-C stops an answer, Ctrl-D ends the program. /help lists the commands:
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    commands = "\n".join(f"  {usage:<13} {what}" for usage, what, _ in COMMANDS.values())
    parser = verbs.add_parser(
        "chat",
        help="converse",
        description=f"{DESCRIPTION}{commands}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="a message of the system before the conversation")
    add_pair(parser)
    add_request(parser)
    parser.add_argument("--plain", action="store_true", help="begin without speculation")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Converse until the end of the input."""
    config = request_config(options)
    pair = load_chosen_pair(options, config, options.system or "user:")
    is_live = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    chat = Chat(pair, request_config(options, pair), system=options.system, is_live=is_live)
    if not pair.template.is_own:
        print(f"ygg chat: {NO_TEMPLATE}", file=sys.stderr)
    with frozen_heap():
        for line in _typed() if is_live else _piped():
            try:
                chat.take(line)
            except KeyboardInterrupt:  # before an answer began, or just after its end
                if not is_live:
                    raise
                print()


def _typed() -> Iterator[str]:
    """What a person types, a line at a time."""
    with suppress(ImportError):  # it edits lines and remembers them, where the system has it
        import readline  # noqa: F401
    print_dim("/help lists the commands, Ctrl-D ends", sys.stdout)
    while True:
        try:
            yield input(ASKS)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            print_dim("Ctrl-D ends", sys.stdout)
        except UnicodeDecodeError as error:
            print(f"ygg chat: {_not_text(error)}", file=sys.stderr)


def _piped() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise _not_text(error) from None
    except OSError as error:
        raise unreadable_input(error, "printf 'Hello!\\n' | ygg chat") from None


def _not_text(error: UnicodeDecodeError) -> ConfigError:
    return ConfigError("message", error.object[error.start : error.end], "text in UTF-8")


class Chat:
    """A conversation, and the commands about it.

    Args:
        config: The request of every answer.
        system: A message before the conversation.
        is_live: Whether a person types: Ctrl-C then stops an answer, and an error ends nothing.

    Attributes:
        messages: The conversation, as OpenAI's messages.
        last: The last answer's run.
    """

    def __init__(
        self, pair: Pair, config: GenerateConfig, *, system: str | None = None, is_live: bool = False
    ) -> None:
        self.pair = pair
        self.config = replace(config, stop=(*config.stop, *pair.template.stops))
        self.messages: list[dict[str, str]] = []
        self.last: Run | None = None
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._is_live = is_live
        self.reset()

    def take(self, line: str) -> None:
        """Answer a message, or run a command; an empty line is neither."""
        try:
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                self._answer(line)
        except YggError as error:
            if not self._is_live:
                raise
            print(f"ygg chat: {error}", file=sys.stderr)

    def _answer(self, message: str) -> None:
        asked = [*self.messages, {"role": "user", "content": message}]
        tokens = self.pair.chat_tokens(asked)
        self.last = run = self._run(tokens)
        try:
            self._print(run)
        except KeyboardInterrupt:
            run.close()
            if not self._is_live:
                raise
            print_dim(" (stopped)", sys.stdout)
        # templates put their own blanks around an answer
        self.messages = [*asked, {"role": "assistant", "content": run.text.strip()}]

    def _run(self, tokens: list[int]) -> Run:
        """An answer of at most the tokens that the context has room for."""
        from yggdrasil.report.run import Run

        room = self.pair.engine.max_context - len(tokens)
        if room < 1:
            full = f"the conversation has {len(tokens)} tokens, and the context holds {len(tokens) + room}"
            raise UsageError(f"{full}; begin a new one", "/reset")
        limit = self.config.max_new_tokens
        config = self.config if limit is None else replace(self.config, max_new_tokens=min(limit, room))
        return Run(self.pair, tokens, config, keep=True)

    def _print(self, run: Run) -> None:
        has_begun = False
        for chunk in run:
            text = chunk if has_begun else chunk.lstrip()
            has_begun = has_begun or bool(text)
            print(text, end="", flush=True)
        print(flush=True)
        if self._is_live and run.finish_reason == "length":
            is_full = len(run.prompt) + run.num_tokens == self.pair.engine.max_context
            why = "the context is full, /reset begins a new conversation" if is_full else "-n allows more"
            print_dim(f"(stopped after {run.num_tokens} tokens; {why})", sys.stdout)

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].strip().partition(" ")
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, n=1) or ["help"]
            raise UsageError(f"there is no command /{name}; did you mean", f"/{near[0]}")
        usage, _, method = COMMANDS[name]
        if bool(rest.strip()) != (" " in usage):
            raise UsageError(f"/{name} takes {'a file' if ' ' in usage else 'nothing'}", usage)
        method(self, rest.strip())

    def _run_of_last(self) -> Run:
        if self.last is None or not self.last.results:
            raise UsageError("there is no answer yet; write a message first, such as", "Hello!")
        return self.last

    def plain(self, _: str = "") -> None:
        """Turn speculation off, or on again."""
        self.config = replace(self.config, plain=not self.config.plain)
        print(f"speculation is {'off' if self.config.plain else 'on'}; the text does not change")

    def tree(self, _: str = "") -> None:
        """Print the tree of the last answer that brought the most tokens."""
        run = self._run_of_last()
        best = max(run.results, key=lambda result: result.accepted)
        tokenizer = self.pair.tokenizer
        labels = [tokenizer.token_text(token) for token in best.tree.token_N.tolist()]
        own = tokenizer.token_text(best.tokens[-1])
        counts = f"{best.verified} nodes verified, {best.accepted} accepted (*), then {own}"
        print(f"step {run.results.index(best) + 1} of {len(run.results)}, {best.shape}: {counts}")
        print(best.tree.render(labels, best.path))

    def stats(self, _: str = "") -> None:
        """Print the figures of the last answer."""
        run = self._run_of_last()
        print(run.summary())
        print(f"prompt: {len(run.prompt)} tokens, {run.kept_tokens} of them kept from the turn before")

    def reset(self, _: str = "") -> None:
        """Begin a new conversation."""
        self.messages = list(self._beginning)
        self.last = None

    def save(self, file: str) -> None:
        """Write the conversation to a file, as JSON."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=1)
        try:
            write_whole(Path(file).expanduser(), f"{text}\n".encode())
        except (OSError, RuntimeError, ValueError) as error:  # of a user without a home, of a name
            reason = getattr(error, "strerror", None) or first_line(error)
            raise UsageError(f"{file} cannot be written ({reason})", "/save FILE") from None
        print(f"{len(self.messages)} messages in {file}")

    def help(self, _: str = "") -> None:
        """List the commands."""
        for usage, what, _method in COMMANDS.values():
            print(f"{usage:<13} {what}")


COMMANDS: dict[str, tuple[str, str, Callable[[Chat, str], None]]] = {
    "plain": ("/plain", "turn speculation off, or on again", Chat.plain),
    "tree": ("/tree", "the tree of the last answer that brought the most tokens", Chat.tree),
    "stats": ("/stats", "the figures of the last answer", Chat.stats),
    "reset": ("/reset", "begin a new conversation", Chat.reset),
    "save": ("/save FILE", "write the conversation to a file, as JSON", Chat.save),
    "help": ("/help", "list the commands", Chat.help),
}
