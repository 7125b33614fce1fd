"""Parse the command line; an error that the user can fix is one line on standard error and exit code 2."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import yggdrasil
from yggdrasil.cli import chat as chat_command
from yggdrasil.cli import compile as compile_command
from yggdrasil.cli import completion as completion_command
from yggdrasil.cli import doctor as doctor_command
from yggdrasil.cli import generate as generate_command
from yggdrasil.cli import list as list_command
from yggdrasil.cli import race as race_command
from yggdrasil.cli import rm as rm_command
from yggdrasil.cli import serve as serve_command
from yggdrasil.cli import show as show_command
from yggdrasil.cli import verify as verify_command
from yggdrasil.cli.interrupt import between_imports
from yggdrasil.cli.output import guarded_messages, guarded_output
from yggdrasil.cli.parser import Parser
from yggdrasil.errors import ConfigError, RankLost, YggError
from yggdrasil.ranks.launch import num_ranks, rank

__all__ = ["main"]

EPILOG = """\
first steps:
  ygg generate "Once upon a time"            the bundled pair; the first run compiles it
  ygg compile TARGET DRAFT --name mine       prepare your own pair for this machine, once
  ygg generate --pair mine "Hello"           decode with it
  ygg chat --pair mine                       converse
  ygg race --pair mine "Hello"               see how much sooner the text is there
  ygg serve --pair mine                      answer OpenAI clients

several GPUs (each has a shard of the target, the first also the draft):
  torchrun --nproc-per-node 2 -m yggdrasil compile TARGET DRAFT --name mine
  torchrun --nproc-per-node 2 -m yggdrasil generate --pair mine "Hello"
"""
SHARED = ("compile", "generate", "show")
# of fields: --json is the form of the output
OTHER_NAMES = {"json": "json_schema", "calibration_budget_s": "calibration_budget"}
VERBS = (
    compile_command,
    generate_command,
    chat_command,
    race_command,
    serve_command,
    show_command,
    list_command,
    verify_command,
    rm_command,
    doctor_command,
    completion_command,
)


def _parser() -> Parser:
    parser = Parser(
        prog="ygg",
        description="Speculative decoding with compiled token trees: the target's own text, sooner.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"ygg {yggdrasil.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for command in VERBS:
        command.add_parser(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, 2 for an error that the user can fix, 130 after Ctrl-C.

    `ygg doctor` returns 1 if it found something to fix.

    Under torchrun rank 0 runs the verb, and the other ranks follow it. While the interpreter ends, Ctrl-C
    does nothing; it would print a traceback.
    """
    with guarded_messages(), between_imports():
        code = _run_or_follow(arguments)
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the last one registered runs first
    return code


def _run_or_follow(arguments: Sequence[str] | None) -> int:
    try:
        if num_ranks() == 1:
            return _run(arguments)
        if rank() > 0:
            return _follow()
        from yggdrasil.ranks.lead import leading  # imports torch

        with leading() as lead:
            code = _run(arguments)
            if lead.is_lost:
                _end(code)
            return code
    except YggError as error:
        return _refuse(f"ygg: {error}")


def _follow() -> int:
    from yggdrasil.ranks.follow import follow_run

    try:
        follow_run()
    except RankLost as error:
        _end(_refuse(f"ygg, rank {rank()}: {error}"))
    except YggError as error:
        return _refuse(f"ygg, rank {rank()}: {error}")
    return 0


def _end(code: int) -> NoReturn:
    """End the process without the interpreter's own end.

    A thread of a broken connection can still want the interpreter then, and its end aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _refuse(message: str) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return 2


def _run(arguments: Sequence[str] | None) -> int:
    try:
        with guarded_output():
            return _run_verb(arguments)
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        return 0


def _run_verb(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    if completion_command.is_asked():
        completion_command.complete(parser)
    options = parser.parse_args(arguments)
    if options.verb is None:
        parser.print_help()
        return 0
    try:
        if num_ranks() > 1 and options.verb not in SHARED:
            raise ConfigError(
                "WORLD_SIZE",
                num_ranks(),
                f"1 for this verb; several processes run {', '.join(SHARED)}",
                f"ygg {options.verb} ...",
            )
        return options.run(options) or 0
    except ConfigError as error:
        return _refuse(f"ygg {options.verb}: {_in_words_of(options, error)}")
    except YggError as error:
        return _refuse(f"ygg {options.verb}: {error}")
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # a second one
            print(f"\nygg {options.verb}: interrupted; what was compiled is kept", file=sys.stderr)
        return 130


def _in_words_of(options: argparse.Namespace, error: ConfigError) -> ConfigError:
    """The error with the option's name, if the field is an option of this verb."""
    name = OTHER_NAMES.get(error.field, error.field)
    is_option = name != "prompt" and hasattr(options, name)
    return error.renamed(f"--{name.replace('_', '-')}") if is_option else error
