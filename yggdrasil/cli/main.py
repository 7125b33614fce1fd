"""Parse the command line and report errors: one line on standard error and exit code 2 for what the user can mend."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from yggdrasil.cli import compile as compile_command
from yggdrasil.cli import generate as generate_command
from yggdrasil.cli import serve as serve_command
from yggdrasil.cli import show as show_command
from yggdrasil.errors import YggError

__all__ = ["main"]

EPILOG = """\
first steps:
  ygg generate "Once upon a time"            the bundled pair; the first run compiles it
  ygg compile TARGET DRAFT --name mine       prepare your own pair for this machine, once
  ygg generate --pair mine "Hello"           decode with it
  ygg serve --pair mine                      answer OpenAI clients
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ygg",
        description="Speculative decoding with compiled token trees: the target's own text, sooner.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for command in (compile_command, generate_command, serve_command, show_command):
        command.add_parser(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, 2 for a mistake the user can mend, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except YggError as error:
        print(f"ygg {options.verb}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nygg {options.verb}: interrupted; finished parts are kept", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away: nothing is wrong
        sys.stderr.close()
        return 0
    return 0
