"""`ygg completion`: a shell completes verbs, options and the names of pairs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from yggdrasil.cli.parser import Parser
from yggdrasil.errors import UsageError, YggError
from yggdrasil.store import artifacts

__all__ = ["add_parser", "complete", "is_asked", "run"]

SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = """\
Print a script with which your shell completes verbs, options and the names of pairs:

  source <(ygg completion bash)     in ~/.bashrc
  source <(ygg completion zsh)      in ~/.zshrc, after compinit
  ygg completion fish | source      in ~/.config/fish/config.fish
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "completion",
        help="print a script for your shell's completion",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the script."""
    print(_argcomplete().shellcode(["ygg"], shell=options.shell))


def is_asked() -> bool:
    """Whether the shell runs this program to complete a word."""
    return "_ARGCOMPLETE" in os.environ


def complete(parser: Parser) -> None:
    """Answer the shell, and end the process."""
    for action in _actions(parser):
        if action.dest == "pair" or action.metavar == "NAME":
            action.completer = _pair_names  # type: ignore[attr-defined]
    _argcomplete().autocomplete(parser)


def _argcomplete() -> Any:
    try:
        import argcomplete
    except ImportError:
        command = "pip install 'yggdrasil-decoding[completion]'"
        raise UsageError("argcomplete is not installed, but completion needs it", command) from None
    return argcomplete


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)


def _pair_names(**_: Any) -> list[str]:
    try:
        return artifacts.pair_names()
    except YggError:  # a completion has no place for messages
        return []
